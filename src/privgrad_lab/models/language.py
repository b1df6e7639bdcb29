"""Models of text: recurrent networks and transformers, with random or with pretrained weights."""

from typing import Any

import torch
from torch import Tensor, nn

from privgrad.errors import readable
from privgrad.plugins import optional


class WordLSTM(nn.Module):
    """An LSTM classifier: word ids (B, T) -> embeddings, two LSTM layers, mean over words -> logits (B, num_classes).

    Args:
        vocabulary: ids are in [0, vocabulary).
        num_classes: number of labels.
        width: width of the embeddings and layers.
    Reference:
        Li et al. 2022 (AdaDPS), their LSTM for IMDB: 706,690 parameters for 10,000 words, width 64 and two classes.
    """

    def __init__(self, *, vocabulary: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(ids)))
        return self.head(self.dropout(states).mean(1))


class LanguageModel(nn.Module):
    """A small GPT-2 with random weights: token ids (B, T) -> logits of the next token (B, T, num_tokens).

    Args:
        num_tokens: size of the vocabulary.
        length: longest T.
        width, layers, heads: of the transformer.
    Raises:
        PrivacyError: transformers is not installed.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance) train the head of the pretrained GPT-2: see
        HeadLanguageModel. Deviation: this model is small, and all of it is trained.
    """

    def __init__(self, *, num_tokens: int, length: int, width: int = 64, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        transformers = _library("transformers")
        config = transformers.GPT2Config(
            vocab_size=num_tokens,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt2(input_ids=ids, use_cache=False).logits


class HeadLanguageModel(nn.Module):
    """A pretrained causal language model whose output layer is trained: token ids (B, T) -> logits (B, T, num_tokens).

    The output layer starts with its pretrained weights, but is no longer tied to the embeddings. The rest is frozen.

    Args:
        path: folder of the model, as transformers saves it.
    Raises:
        PrivacyError: transformers is not installed, or the folder holds no such model.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance), their TinyPTB experiment: GPT2LMHeadModel, 38.6 million
        trained weights. That the head is the output layer alone is our reading.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.language = _causal("HeadLanguageModel", path).requires_grad_(False)
        head = self.language.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        return self.language(input_ids=ids, use_cache=False).logits


class LoraLanguageModel(nn.Module):
    """A pretrained causal language model with low-rank adapters: token ids (B, T) -> logits (B, T, num_tokens).

    Only the adapters are trained. PEFT adds them to the projections that it chooses for the kind of model: queries and
    values, or in GPT-2 the one layer of queries, keys and values.

    Args:
        path: folder of the model, as transformers saves it.
        rank, alpha: of the adapters: each adds alpha / rank times a product of rank `rank`, which is 0 at first.
    Raises:
        PrivacyError: transformers or peft is not installed, or the folder holds no such model.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance), their E2E experiment, as Yu et al. 2022 adapt GPT-2:
        rank 4, alpha 32, no dropout.
    """

    def __init__(self, path: str, *, rank: int = 4, alpha: int = 32) -> None:
        super().__init__()
        peft, base = _library("peft"), _causal("LoraLanguageModel", path)
        with readable("LoraLanguageModel", "path", "to hold a model", "give one that PEFT supports"):
            config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=0.0)
            self.adapted: Any = peft.get_peft_model(base, config)

    def forward(self, ids: Tensor) -> Tensor:
        # Padding follows the example, so causal attention hides it from all tokens of the example.
        return self.adapted(input_ids=ids, use_cache=False).logits


class LowerLayers(nn.Module):
    """The layers of a BERT-like encoder below its last one: token ids and types (B, 2, T) -> states (B, T, width).

    They are the frozen part of PairClassifier, which takes their states in place of token ids. So the states can be
    computed once, as features. Those of padding are 0, those of other tokens are not. Types above 1 count as 1.

    Args:
        path: folder of the encoder, as transformers saves it.
    Raises:
        PrivacyError: transformers is not installed, or the folder holds no such encoder.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.encoder = _encoder("LowerLayers", path)
        self.encoder.encoder.layer = self.encoder.encoder.layer[:-1]

    def forward(self, x: Tensor) -> Tensor:
        ids, types = x.unbind(1)
        seen = ids != self.encoder.config.pad_token_id
        states = self.encoder(input_ids=ids, token_type_ids=types.clamp(max=1), attention_mask=seen.long())
        return states.last_hidden_state * seen[..., None]


class PairClassifier(nn.Module):
    """A pretrained BERT-like encoder with a linear head: token ids and types (B, 2, T) -> logits (B, num_classes).

    The last layer, the pooler and the head get new random weights and are trained. The rest is frozen. In place of ids
    and types, it takes the states (B, T * width) that LowerLayers computes from them.

    Args:
        path: folder of the encoder, as transformers saves it.
        num_classes: number of labels.
        std: standard deviation of new weights; None is the encoder's own, 0.02 for BERT.
    Raises:
        PrivacyError: transformers is not installed, or the folder holds no such encoder.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their SNLI experiment, whose code draws new weights with std = 1.
    """

    def __init__(self, path: str, *, num_classes: int, std: float | None = None) -> None:
        super().__init__()
        self.encoder = _encoder("PairClassifier", path)
        spread: float = self.encoder.config.initializer_range if std is None else std
        self.head = nn.Linear(self.encoder.config.hidden_size, num_classes)
        fresh = [self.encoder.encoder.layer[-1], self.encoder.pooler]
        for layer in (module for part in (*fresh, self.head) for module in part.modules()):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=spread)
                nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.LayerNorm):
                layer.reset_parameters()
        for part in fresh:
            part.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            states = x.view(len(x), -1, self.head.in_features)
            unseen = (states == 0).all(2)
            mask = torch.zeros_like(unseen, dtype=x.dtype).masked_fill(unseen, torch.finfo(x.dtype).min)
            last = self.encoder.encoder.layer[-1](states, mask[:, None, None])
            return self.head(self.encoder.pooler(last))
        ids, types = x.unbind(1)
        seen = ids != self.encoder.config.pad_token_id
        states = self.encoder(input_ids=ids, token_type_ids=types, attention_mask=seen.long())
        return self.head(states.pooler_output)


def _causal(where: str, path: str) -> Any:
    with readable(where, "path", "to hold a model", "give the folder of a causal language model"):
        library = _library("transformers")
        return library.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)


def _encoder(where: str, path: str) -> Any:
    with readable(where, "path", "to hold an encoder", "give the folder of a BERT-like encoder"):
        encoder = _library("transformers").AutoModel.from_pretrained(path, local_files_only=True)
        _ = encoder.encoder.layer[-1], encoder.pooler  # others have no such parts
    return encoder.requires_grad_(False)


def _library(name: str) -> Any:
    return optional("models", name, name, "pip install 'privgrad[hf]'")
