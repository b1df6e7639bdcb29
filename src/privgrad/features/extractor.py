"""The base class of feature extractors, and public rows with their source.

Users, `features.cache`, `heads` and `experiments` call extractors. The privacy guarantee rests on one rule: a row of
the result depends on the same row of the input and on public constants only. So features need no epsilon.
`Extractor.forward` tries the rule on the first rows that it gets, and refuses an extractor that breaks it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from privgrad.errors import described, expected

FORMAT = 1  # of config.json and of digests
EXTRACTORS: dict[str, type["Extractor"]] = {}  # by class name, for load_extractor

Rows = Tensor | Sequence[str]


@dataclass(frozen=True)
class Public:
    """Public rows and where they come from. Statistics of features are computed on such rows only.

    Attributes:
        rows: shape (n, ...), or texts. No row may come from the private data.
        source: a few words for the ledger, such as "6,000 synthetic silhouettes (seed 0)".
    Raises:
        PrivacyError: there are no rows, or the source is empty.
    Privacy:
        The library cannot check that rows are public. The source states it, and the ledger shows the source.
    """

    rows: Rows
    source: str

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise expected("Public", "source", "to be a text", described(self.source), "say where the rows come from")
        if len(self.rows) == 0:
            raise expected("Public", "rows", "to be at least one", 0, "give public rows")


class Extractor(nn.Module, ABC):
    """A map from rows to features: each row of the result depends on that row and on public constants only.

    To write one, set the attributes named in `options`, pass public constants to `__init__`, and define `features`.
    `config`, `digest`, saving and loading follow from these. Constants are buffers; nested extractors are submodules.

    Attributes:
        source: where its constants come from, for the ledger, such as "no data".
        options: names of the attributes that hold its settings, as values that JSON can hold.
        block: the number of rows in one call of `features`; tensors of fewer rows are filled up to it.
        tolerance: the largest norm of the change that companions may cause by rounding, over the norm of the features.
    Privacy:
        `features` must treat each row alone. An extractor is always in evaluation mode and has no gradients. Before the
        first rows of each shape it is tried on a few of them, alone and with companions.
    """

    options: ClassVar[tuple[str, ...]] = ()
    block: int = 64
    tolerance: float = 1e-6

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        known = EXTRACTORS.get(cls.__name__)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            got = f"{cls.__module__}.{cls.__qualname__}, but {known.__module__}.{known.__qualname__} exists"
            raise expected("Extractor", "the class name", "to be new", got, "rename the class: it names saved files")
        EXTRACTORS[cls.__name__] = cls

    def __init__(self, source: str, **constants: Tensor) -> None:
        """Keep the source and the public constants, as buffers.

        Args:
            source: see the class.
            **constants: tensors from public numbers, by name.
        """
        super().__init__()
        self.source = source
        self._tried: set[tuple[int, ...]] = set()
        for name, constant in constants.items():
            self.register_buffer(name, constant.detach())
        self.eval()

    @abstractmethod
    def features(self, rows: Any) -> Tensor:
        """Return the features of a few rows, floating point, shape (n, width).

        Args:
            rows: at most `block` rows, shape (n, ...) on the extractor's device, or texts.
        """

    def forward(self, rows: Rows) -> Tensor:
        """Return the features of rows, float32 (n, width), computed in blocks.

        Args:
            rows: shape (n, ...), or texts. Bytes (uint8) are divided by 255.
        Raises:
            PrivacyError: a row's features change with its companions or from call to call, have another shape, or are
                not finite.
        Privacy:
            See the class. Each call of `features` has the same number of rows, so that companions do not change how a
            row is rounded, either, where a matrix product treats its rows alike; `tolerance` bounds what remains.
        """
        if len(rows) == 0:
            raise expected(type(self).__name__, "rows", "to be at least one", 0, "give rows")
        shape = tuple(rows.shape[1:]) if isinstance(rows, Tensor) else ()
        if shape not in self._tried:
            self._try(rows)
            self._tried.add(shape)
        starts = range(0, len(rows), self.block)
        return torch.cat([self._block(rows[start : start + self.block]) for start in starts])

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: statistics of a batch would mix its rows."""
        return super().train(False)

    def config(self) -> dict[str, Any]:
        """Return what rebuilds the extractor besides its constants, for JSON: class, source, options, parts."""
        parts = {name: part.config() for name, part in self.named_children() if isinstance(part, Extractor)}
        options = {name: getattr(self, name) for name in self.options}
        return {"class": type(self).__name__, "source": self.source, "options": options, "parts": parts}

    @classmethod
    def rebuilt(cls, config: Mapping[str, Any], parts: Mapping[str, "Extractor"]) -> Self:
        """Return an extractor of this class from its `config`, without constants; `load_extractor` adds them.

        Args:
            config: as `config` returns it.
            parts: the nested extractors, by name.
        """
        made = cls.__new__(cls)
        Extractor.__init__(made, config["source"])
        for name in cls.options:
            setattr(made, name, config["options"][name])
        for name, part in parts.items():
            made.add_module(name, part)
        return made

    def constants(self) -> dict[str, Tensor]:
        """Return the tensors that `save_extractor` writes: the buffers of the extractor and of its parts, by path.

        Override it if weights are found elsewhere, as those of Frozen are; `digest` names them all the same.
        """
        found = dict(self.named_buffers(recurse=False))
        for name, part in self.named_children():
            if isinstance(part, Extractor):
                found |= {f"{name}.{path}": value for path, value in part.constants().items()}
        return found

    def digest(self) -> str:
        """Return a SHA-256 of class, config, parameters and buffers, in hex. Equal digests mean equal features."""
        settings = json.dumps([FORMAT, self.config()], sort_keys=True)
        digest = hashlib.sha256(settings.encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def _block(self, rows: Rows) -> Tensor:
        """Return the features of at most `block` rows, float32, on the device of the rows.

        Privacy:
            Tensors are filled up to exactly `block` rows with copies of the first. Matrix products of different sizes
            are rounded differently: without this, the number of rows would show in the last bits of each feature.
        """
        self.eval()  # the owner of a nested module may have changed it
        if isinstance(rows, Tensor):
            constant = next(chain(self.buffers(), self.parameters()), rows)
            filled = torch.cat([rows, rows[:1].expand(self.block - len(rows), *rows.shape[1:])]).to(constant.device)
            made = self._features(filled / 255 if filled.dtype == torch.uint8 else filled)[: len(rows)].to(rows.device)
        else:
            made = self._features(rows)
        if made.ndim != 2 or len(made) != len(rows) or not made.is_floating_point():
            got = f"{made.dtype} of shape {tuple(made.shape)}"
            condition = f"to be floating point, of shape ({len(rows)}, width)"
            raise expected(type(self).__name__, "features", condition, got, "return one row for each row")
        if not bool(made.isfinite().all()):
            raise expected(type(self).__name__, "features", "to be finite", "inf or NaN", "check the rows for NaN")
        return made.float()

    @torch.no_grad()
    def _features(self, rows: Any) -> Tensor:
        return self.features(rows)

    def _try(self, rows: Rows) -> None:
        """Raise PrivacyError if the features of a row depend on its companions or on earlier calls."""
        name = type(self).__name__
        first, last = rows[:1], rows[-1:]
        before = {key: value.clone() for key, value in self.state_dict().items()}
        alone = self._block(first)
        pairs = [
            (self._block(_cat(first, _changed(first), last))[:1], "other companions"),
            (self._block(_cat(last, _changed(last), _changed(first), first))[-1:], "another place"),
            (self._block(first), "the same row again"),
        ]
        for made, reason in pairs:
            if made.shape != alone.shape:
                got = f"widths {alone.shape[1]} and {made.shape[1]} for {reason}"
                raise expected(name, "each row's features", "to depend on that row only", got, _REMEDY)
            change = _norm(made - alone) / max(_norm(alone), 1e-30)
            if not change <= self.tolerance:
                got = f"a relative change of {change:.2g} for {reason}"
                raise expected(name, "each row's features", "to depend on that row only", got, _REMEDY)
        after = self.state_dict()
        changed = [key for key, value in before.items() if not torch.equal(after[key], value)]
        if changed:
            condition = "to stay as it is while features are computed"
            raise expected(name, "the state", condition, f"a new value of {changed[0]}", _REMEDY)


_REMEDY = "replace batch statistics by GroupNorm or LayerNorm, and remove dropout and state"


def public_rows(where: str, public: Public | Rows, source: str | None) -> Public:
    """Return public rows with their source.

    Args:
        where: the class or function that the user called.
        public: rows with a source, or bare rows.
        source: of bare rows; None for rows that have one.
    Raises:
        PrivacyError: no source is given, or two.
    """
    if isinstance(public, Public):
        if source is not None:
            raise expected(where, "source", "to be given once", source, "leave source out: the public rows have one")
        return public
    if source is None:
        remedy = "give source= in a few words, or a Public(rows, source)"
        raise expected(where, "source", "to be given for bare rows", None, remedy)
    return Public(public, source)


def eigen(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of a second moment, >= 0 and falling, and its eigenvectors as columns."""
    values, vectors = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(moment))
    return values.clamp(min=0).flip(0), vectors.flip(1)


def _norm(values: Tensor) -> float:
    return float(values.double().square().sum().sqrt())


def _cat(*parts: Rows) -> Rows:
    if isinstance(parts[0], Tensor):
        return torch.cat(cast("tuple[Tensor, ...]", parts))
    return [text for part in cast(Sequence[Sequence[str]], parts) for text in part]


def _changed(rows: Rows) -> Rows:
    """Return rows with other values in the same range, as companions."""
    if not isinstance(rows, Tensor):
        return [f"{row} another text, which is longer {row}" for row in rows]
    flat = rows.flatten(1)
    return (flat.amax(1, keepdim=True) + flat.amin(1, keepdim=True) - flat.flip(1)).reshape(rows.shape)
