"""Features of texts from a pretrained transformer, whose weights stay as they are.

Users call this class. The privacy guarantee rests on two facts. The weights come from other texts than the private
ones. Each text is padded to a length of its own and masked, so its features do not depend on its companions.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.errors import expected, require_choice, require_integer
from privgrad.features.extractor import Extractor, Rows
from privgrad.features.text import texts_of
from privgrad.pretrained import pretrained

Pooling = Literal["mean", "cls", "last"]
_POOLINGS = ("mean", "cls", "last")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}  # eight bits of precision, over the depth of the network
_STEP = 16  # tokens; texts are padded to a multiple


class FrozenText(Extractor):
    """The states of a pretrained transformer, pooled over the tokens of a text; each row has norm 1.

    Computes: the last hidden states of `AutoModel` of transformers, pooled, divided by their norm. This is what
    sentence-transformers computes for models that only pool and normalize. Further layers of such a model are left out.

    Args:
        encoder: a folder, or a name on the hub, of a model of transformers; see `privgrad.pretrained`.
        max_length: tokens of a text, >= 1; longer texts are cut.
        pooling: "mean" over all tokens, "cls" for the first token, or "last" for the last one. The model's card names
            the right one.
        dtype: "float32"; or "bfloat16", which is three times faster on recent processors, with an error of about 1 %.
        source: what the weights were trained on, for the ledger. None is "weights of <encoder>".
    Raises:
        PrivacyError: transformers is not installed, the model is not available, or an argument is out of its range.
    Privacy:
        The weights count as public. A model that was trained on the private texts would be a release that no epsilon
        covers; for public web text, the library cannot check that the private texts are not in it.
        `tolerance`, 1e-4 for float32 and 0.05 for bfloat16, bounds the influence of companions through rounding.
    Reference:
        Reimers, Gurevych 2019 (arXiv 1908.10084).
    """

    options: ClassVar[tuple[str, ...]] = ("encoder", "max_length", "pooling", "dtype", "weights")
    _model: Any

    def __init__(
        self,
        encoder: str,
        *,
        max_length: int = 128,
        pooling: Pooling = "mean",
        dtype: Literal["float32", "bfloat16"] = "float32",
        source: str | None = None,
    ) -> None:
        require_integer("FrozenText", "max_length", max_length, 1)
        require_choice("FrozenText", "pooling", pooling, _POOLINGS)
        require_choice("FrozenText", "dtype", dtype, tuple(_DTYPES))
        super().__init__(f"weights of {encoder}" if source is None else source)
        self.encoder, self.max_length, self.pooling, self.dtype = encoder, max_length, pooling, dtype
        self._load()
        self.weights = self._digest()

    @classmethod
    def rebuilt(cls, config: Mapping[str, Any], parts: Mapping[str, Extractor]) -> Self:
        """Load the model by its name again.

        Raises:
            PrivacyError: the model is not available, or has other weights.
        """
        made = super().rebuilt(config, parts)
        made._load()
        if (found := made._digest()) != made.weights:
            remedy = f"restore the weights that {made.encoder} had"
            raise expected("FrozenText", "the weights", f"to have digest {made.weights[:12]}", found[:12], remedy)
        return made

    def features(self, rows: Rows) -> Tensor:
        """Return the features of n texts, or of rows of bytes. Equal texts are computed once."""
        texts = texts_of(rows)
        by_width: dict[int, dict[str, list[int]]] = defaultdict(dict)
        known = list(dict.fromkeys(texts))
        for text, ids in zip(known, self._ids(known), strict=True):
            by_width[min(self.max_length, -(-max(1, len(ids)) // _STEP) * _STEP)][text] = ids or [self._padding]
        made: dict[str, Tensor] = {}
        for width, group in by_width.items():
            made |= zip(group, self._pooled(list(group.values()), width), strict=True)
        return torch.stack([made[text] for text in texts])

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._model._apply(fn, recurse)  # moves to a device
        return super()._apply(fn, recurse)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(list(texts), truncation=True, max_length=self.max_length)["input_ids"]

    def _pooled(self, ids: Sequence[Sequence[int]], width: int) -> Tensor:
        """Return the features of a few texts that have the same padded length."""
        device = next(self._model.parameters()).device
        lengths = torch.tensor([len(own) for own in ids], device=device)
        padded = torch.tensor([[*own, *[self._padding] * (width - len(own))] for own in ids], device=device)
        mask = torch.arange(width, device=device) < lengths[:, None]
        states: Tensor = self._model(input_ids=padded, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "mean":
            pooled = (states * mask[..., None]).sum(1)
        else:
            pooled = states[torch.arange(len(ids), device=device), 0 if self.pooling == "cls" else lengths - 1]
        return F.normalize(pooled, dim=1)

    def _load(self) -> None:
        """Load tokenizer and model; they are no submodules, so their weights are not saved with the extractor."""
        try:
            import transformers
        except ImportError as error:
            remedy = "pip install 'privgrad[hf]'"
            raise expected("FrozenText", "transformers", "to be installed", error, remedy) from error
        library: Any = transformers
        folder = pretrained(self.encoder)
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: nn.Module = library.AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=_DTYPES[self.dtype]
            )
        except Exception as error:  # a damaged folder can raise anything
            got = f"{folder}: {str(error).partition(chr(10))[0]}"
            remedy = "give the folder of a transformer and its tokenizer, as save_pretrained writes it"
            raise expected("FrozenText", "encoder", "to be a model of transformers", got, remedy) from error
        self.tolerance = _TOLERANCES[self.dtype]
        self._tokenizer: Any = tokenizer
        self._padding: int = tokenizer.pad_token_id or 0
        object.__setattr__(self, "_model", model.requires_grad_(False).eval())

    def _digest(self) -> str:
        """Return a SHA-256 of the weights, in hex."""
        digest = hashlib.sha256()
        for name, value in sorted(self._model.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()
