"""Features from networks that do not learn: pretrained encoders, and random Fourier features.

Whether the training data of an encoder were public is the user's statement, in `source`.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.errors import expected, readable, require_choice, require_integer, require_positive
from privgrad.features.extractor import Extractor, Rows, digest_of
from privgrad.features.pretrained import pretrained
from privgrad.features.text import texts_of
from privgrad.gradient.functional import named_modules
from privgrad.plugins import optional

Pooling = Literal["mean", "cls", "last"]
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
        require_choice("FrozenText", "pooling", pooling, get_args(Pooling))
        require_choice("FrozenText", "dtype", dtype, tuple(_DTYPES))
        super().__init__(f"weights of {encoder}" if source is None else source)
        self.encoder, self.max_length, self.pooling, self.dtype = encoder, max_length, pooling, dtype
        self._load()
        self.weights = digest_of("", self._model.state_dict())

    @classmethod
    def rebuilt(cls, config: Mapping[str, Any], parts: Mapping[str, Extractor]) -> Self:
        made = super().rebuilt(config, parts)
        made._load()
        if (found := digest_of("", made._model.state_dict())) != made.weights:
            condition = f"to have digest {made.weights[:12]}, as when it was saved"
            raise expected("FrozenText", f"the weights of {made.encoder}", condition, found[:12])
        return made

    def features(self, rows: Rows) -> Tensor:
        """Return the features of n texts, or of rows of bytes. Equal texts are computed once."""
        texts = texts_of(rows)
        by_width: dict[int, dict[str, list[int]]] = defaultdict(dict)
        known = list(dict.fromkeys(texts))
        for text, ids in zip(known, self._ids(known), strict=True):
            width = -(-max(1, len(ids)) // _STEP) * _STEP  # by this text alone: companions must not change it
            by_width[min(self.max_length, width)][text] = ids or [self._padding]
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
        library = optional("FrozenText", "transformers", "transformers", "pip install 'privgrad[hf]'")
        folder = pretrained(self.encoder)
        remedy = "give the folder of a transformer and its tokenizer, as save_pretrained writes it"
        with readable("FrozenText", f"encoder {folder}", "to be a model of transformers", remedy):
            tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            options: dict[str, Any] = {"local_files_only": True, "dtype": _DTYPES[self.dtype]}
            model: nn.Module = library.AutoModel.from_pretrained(folder, **options)
        self.tolerance = _TOLERANCES[self.dtype]
        self._tokenizer: Any = tokenizer
        self._padding: int = tokenizer.pad_token_id or 0
        object.__setattr__(self, "_model", model.requires_grad_(False).eval())  # no submodule


class Frozen(Extractor):
    """The outputs of a pretrained network, flattened.

    The network is put into evaluation mode and stays there. It is not copied.

    Args:
        module: a network that maps rows to a tensor (n, ...).
        transform: a function of rows, such as a normalization or a change of size; None for none. It must treat
            each row alone.
        name: names the network in saved files, which do not hold its weights, such as "resnet18".
        source: what the network was trained on, for the ledger, such as "ResNet-18, trained on ImageNet".
        block: the number of rows in one call of the network; a larger one is faster on a GPU.
        tolerance: see Extractor. None: 1e-6 for float64, 1e-5 for float32, 2e-2 for float16 and bfloat16, by the
            least precise parameter.
    Raises:
        PrivacyError: an argument is wrong; or, as the first rows come, a layer normalizes by statistics of the batch
            even in evaluation mode.
    Privacy:
        The network must not have been trained on the private rows.
    """

    options: ClassVar[tuple[str, ...]] = ("name",)
    name: str

    def __init__(
        self,
        module: nn.Module,
        transform: Callable[[Tensor], Tensor] | None = None,
        *,
        name: str,
        source: str,
        block: int = 16,
        tolerance: float | None = None,
    ) -> None:
        require_integer("Frozen", "block", block, 1)
        super().__init__(source)
        self.module, self.transform, self.name, self.block = module, transform, name, block
        types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if tolerance is None:
            tolerance = 1e-5 if torch.float32 in types or not types else 1e-6
            tolerance = 2e-2 if types & {torch.float16, torch.bfloat16} else tolerance
        self.tolerance = tolerance
        self.eval()

    def constants(self) -> dict[str, Tensor]:
        return {}

    def digest(self) -> str:
        """Return a SHA-256 as Extractor does, of the kinds of layers and of the transform too.

        A transform counts by its name and the decimal numbers in its code: give another function another name.
        """
        kinds = "\n".join(f"{path} {type(layer).__qualname__}" for path, layer in named_modules(self.module))
        name = getattr(self.transform, "__qualname__", type(self.transform).__qualname__)
        code: Any = getattr(self.transform, "__code__", None)  # of a function only
        numbers = [] if code is None else [one for one in code.co_consts if isinstance(one, float)]
        return hashlib.sha256(f"{super().digest()}\n{kinds}\n{name} {numbers}".encode()).hexdigest()

    def features(self, rows: Any) -> Tensor:
        return self.module(rows if self.transform is None else self.transform(rows)).flatten(1)


class RandomFourier(Extractor):
    """Random Fourier features of rows of numbers: sqrt(2 / width) cos(W x + b), for a Gaussian kernel.

    They suit rows of few numbers. On features of images they lost accuracy.

    Args:
        inputs: number of values in a row.
        width: number of features.
        bandwidth: > 0, the distance at which the kernel falls to exp(-1/2). Take it from public knowledge: typical
            distances of the private rows are private.
        seed: of the directions, which are public.
    Raises:
        PrivacyError: a number is out of its range.
    Reference:
        Rahimi, Recht 2007.
    """

    options: ClassVar[tuple[str, ...]] = ("bandwidth",)

    def __init__(self, inputs: int, width: int, *, bandwidth: float, seed: int = 0) -> None:
        require_integer("RandomFourier", "inputs", inputs, 1)
        require_integer("RandomFourier", "width", width, 1)
        require_positive("RandomFourier", "bandwidth", bandwidth)
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(inputs, width, generator=generator) / bandwidth
        super().__init__("no data", directions=directions, shift=2 * math.pi * torch.rand(width, generator=generator))
        self.bandwidth = float(bandwidth)

    def features(self, rows: Any) -> Tensor:
        directions = self.get_buffer("directions")
        turned = rows.flatten(1).float() @ directions + self.get_buffer("shift")
        return math.sqrt(2 / directions.shape[1]) * torch.cos(turned)
