"""Models as people write them: transformers, tables, graphs, recurrent networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Maker, Size, built, integers, plain_images, state_losses, tokens, vectors

CLASSES = 5


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm before it."""

    def __init__(self, size: Size, norm: type[nn.Module] = nn.LayerNorm, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.before, self.between = norm(size.width), norm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class RMSNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Tokens(nn.Module):
    """Puts a learned token before the patches, and adds positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        count = (size.image // size.patch) ** 2
        self.first = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(torch.zeros(1, count + 1, size.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions


class WrappedViT(nn.Module):
    """A vision transformer whose token and positions are in a module of their own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Conv2d(3, size.width, size.patch, size.patch), Tokens(size)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(self.patches(x).flatten(2).transpose(1, 2))))[:, 0])


class ViT(nn.Module):
    """A vision transformer that has its token and positions itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        count = (size.image // size.patch) ** 2
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(torch.zeros(1, count + 1, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class TextClassifier(nn.Module):
    """torch's encoder, with a learned first token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.table = nn.Embedding(size.words, size.width)
        layer = nn.TransformerEncoderLayer(size.width, size.heads, size.hidden, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.cat([self.token.expand(len(x), -1, -1), self.table(x)], 1)
        return self.head(self.encoder(states)[:, 0])


class GPT(nn.Module):
    """A causal model of words."""

    def __init__(self, size: Size, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(size.words, size.width), nn.Embedding(size.time, size.width)
        self.blocks = nn.Sequential(*(Block(size, norm, causal=True) for _ in range(size.layers)))
        self.norm, self.head = norm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states = self.table(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(states)))


class RootParameter(nn.Module):
    """A text classifier with positions of its own, and a table with a padding row."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(size.words, size.width, padding_idx=0), nn.Linear(size.width, 3)
        self.positions = nn.Parameter(torch.zeros(size.time, size.width))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = (self.table(input_ids) + self.positions).tanh() * attention_mask[..., None]
        return self.head(states.sum(1))


class Tagger(nn.Module):
    """A recurrent network with an output for each token."""

    def __init__(self, size: Size, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.table = nn.Embedding(size.words, size.width)
        self.recurrent = kind(size.width, size.width // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.table(x))[0])


class GraphLayer(nn.Module):
    """Averages over neighbours, and multiplies by a matrix."""

    def __init__(self, wide: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(wide, width) / wide**0.5), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return graph @ (x @ self.weight) + self.bias


class GraphNetwork(nn.Module):
    """Each example is a graph."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = nn.Linear(8, size.width)
        self.layers = nn.ModuleList(GraphLayer(size.width, size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        states = self.first(x)
        for layer in self.layers:
            states = layer(states, graph).relu()
        return self.head(states.mean(1))


class Tokenizer(nn.Module):
    """Turns each number of a row into a token."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(count, width)), nn.Parameter(torch.zeros(count, width))
        self.first = nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.expand(len(x), 1, -1), x[..., None] * self.weight + self.bias], 1)


class FTTransformer(nn.Module):
    """A transformer of tables."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokenizer = Tokenizer(size.time, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokenizer(x))[:, 0])


class DeepFM(nn.Module):
    """Factorization machine and feed-forward network over the same tables, with a bias of one number."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.linear, self.table = nn.Embedding(size.words, 1), nn.Embedding(size.words, 8)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(nn.Linear(64, size.width), nn.ReLU(), nn.Linear(size.width, 1))

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.table(x)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        return self.linear(x).sum(1) + pairs + self.deep(vectors.flatten(1)) + self.bias


class TwoTowers(nn.Module):
    """A user and an item meet in a bilinear layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(size.words, size.width // 4), nn.Embedding(size.words, size.width // 4)
        self.meet = nn.Bilinear(size.width // 4, size.width // 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.meet(self.users(x[:, 0]), self.items(x[:, 1]))


def _words(size: Size) -> dict[str, Tensor]:
    return integers(size, size.time)


def _texts(size: Size) -> dict[str, Tensor]:
    return {name: value for name, value in tokens(size).items() if name != "labels"}


def _graphs(size: Size) -> dict[str, Tensor]:
    """Points, and for each pair of them a share of the average."""
    near = vectors(size, size.time, size.time)["x"]
    return vectors(size, size.time, 8) | {"graph": near.softmax(-1)}


BY_HAND: dict[str, Maker] = {
    "hand_vit_root_params": built(ViT, plain_images, state_losses),
    "hand_vit_wrapped": built(WrappedViT, plain_images, state_losses),
    "hand_root_param_padding_idx": built(RootParameter, _texts, state_losses),
    "hand_text_transformer_cls": built(TextClassifier, _words, state_losses),
    "hand_nanogpt": built(GPT, _words, state_losses),
    "hand_llama_rmsnorm": built(lambda size: GPT(size, RMSNorm), _words, state_losses),
    "hand_lstm_tagger": built(lambda size: Tagger(size, nn.LSTM), _words, state_losses),
    "hand_gru_tagger": built(lambda size: Tagger(size, nn.GRU), _words, state_losses),
    "hand_gcn": built(GraphNetwork, _graphs, state_losses),
    "hand_ft_transformer": built(FTTransformer, lambda size: vectors(size, size.time), state_losses),
    "hand_deepfm": built(DeepFM, lambda size: integers(size, 8), state_losses),
    "hand_two_tower_bilinear": built(TwoTowers, lambda size: integers(size, 2), state_losses),
}
