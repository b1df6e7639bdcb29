"""The base class of feature extractors, and public rows with their source.

The features of a row depend on that row and on public constants only, so they need no epsilon. `Extractor.forward`
tries this rule on the first rows that it gets, and refuses an extractor that breaks it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from privgrad.errors import described, expected

FORMAT = 1  # of config.json and of digests
SHARED = "shared_with_public"  # attribute of features, for `fit_head`: how many of their rows, at least, are public
EXTRACTORS: dict[str, type["Extractor"]] = {}  # by class name, for load_extractor
_REMEDY = "use public statistics, computed in __init__; replace batch statistics by GroupNorm, and remove dropout"
Rows = Tensor | Sequence[str]


@dataclass(frozen=True)
class Public:
    """Public rows and where they come from. Statistics of features are computed on such rows only.

    Attributes:
        rows: shape (n, ...), or texts. No row may come from the private data.
        source: a few words for the ledger, such as "6,000 synthetic silhouettes (seed 0)".
    Raises:
        PrivacyError: the source is empty.
    Privacy:
        The library cannot check that rows are public. The source states it, and the ledger shows the source. `cache`
        and `fit_head` refuse private rows of which most are among the public ones.
    """

    rows: Rows
    source: str

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise expected("Public", "source", "to say where the rows come from", described(self.source))


def marks_of(rows: Rows) -> Tensor:
    """Return a hash of 64 bits for each row, int64 (n,). A text has the hash of its row of bytes, see `text_rows`."""
    if isinstance(rows, Tensor):  # numbers are compared as an extractor takes them
        rows = rows / 255 if rows.dtype == torch.uint8 else rows.float() if rows.is_floating_point() else rows
        flat = rows.detach().cpu().contiguous().flatten(1)
        contents = [row.tobytes() for row in flat.view(torch.uint8).numpy()]
        contents = [content.rstrip(b"\0") for content in contents] if rows.dtype == torch.int8 else contents
    else:
        contents = [text.replace("\0", " ").encode("utf-8", "replace") for text in rows]
    digests = b"".join(hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64)


class Copies:
    """The public rows of each part of an extractor, found among `count` other rows."""

    def __init__(self, extractor: "Extractor", count: int) -> None:
        marks = [value for name, value in extractor.named_buffers() if name.split(".")[-1] == "marks"]
        # The marks of the public rows of each part, and those of them that were found.
        self.parts = [(set(cast("list[int]", value.tolist())), set[int]()) for value in marks]
        self.count = count

    def add(self, rows: Rows) -> int:
        """Return 0, or a number of copies that is too large: just above half of the rows, or of the public ones."""
        own = cast("list[int]", marks_of(rows).tolist()) if self.parts else []
        for public, found in self.parts:  # fewer may be equal by chance, such as black images
            found |= public.intersection(own)
            if len(found) > (most := min(self.count, len(public)) // 2):
                return most + 1
        return 0


class Extractor(nn.Module, ABC):
    """A map from rows to features: each row of the result depends on that row and on public constants only.

    To write one, set the attributes named in `options`, pass public constants to `__init__`, and define `features`.
    `config`, `digest`, saving and loading follow from these. Constants are buffers; nested extractors are submodules.

    Attributes:
        source: where its constants come from, for the ledger, such as "no data".
        options: names of the attributes that hold its settings, as values that JSON can hold.
        block: the number of rows in one call of `features`, unless a nested extractor takes fewer. Fewer rows of a
            tensor are filled up to it.
        tolerance: the largest norm of the change that companions may cause by rounding, over the norm of the features.
            The largest one of all nested extractors counts.
    Privacy:
        `features` must treat each row alone. An extractor is always in evaluation mode and has no gradients. Before the
        first rows of each shape it is tried on a few of them, alone and with companions.
    """

    options: ClassVar[tuple[str, ...]] = ()
    block: int = 32
    tolerance: float = 1e-6

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        known = EXTRACTORS.get(cls.__name__)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            condition = f"to be new, as it names saved files ({known.__module__} has it)"
            raise expected("Extractor", "the class name", condition, cls.__qualname__)
        EXTRACTORS[cls.__name__] = cls

    def __init__(self, source: str, **constants: Tensor) -> None:
        """Keep the source, see the class, and constants from public numbers, which become buffers by their names."""
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

    def forward(self, rows: Rows, *, first: int = 0) -> Tensor:
        """Return the features of rows, float32 (n, width), computed in blocks.

        Args:
            rows: shape (n, ...), or texts. Bytes (uint8) are divided by 255. While torch.export records it, nothing is
                checked, and the rows are one block: see `forward` of Head.
            first: the number of the first row, for errors.
        Raises:
            PrivacyError: a row's features change with its companions or from call to call, have another shape, or are
                not finite.
        Privacy:
            See the class. Each call of `features` has the same number of rows, so that companions do not change how a
            row is rounded, either, where a matrix product treats its rows alike; `tolerance` bounds what remains.
        """
        if torch.compiler.is_exporting():
            assert isinstance(rows, Tensor)
            return self._features(rows / 255 if rows.dtype == torch.uint8 else rows).float()
        name = type(self).__name__
        # One text would be taken letter by letter, and an array as the texts of its rows.
        is_known = rows.ndim > 1 if isinstance(rows, Tensor) else isinstance(next(iter(rows), 0), str)
        if len(rows) == 0 or isinstance(rows, str) or not is_known:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            remedy = "give rows of numbers by torch.as_tensor, texts as [text, ...], and one row as rows[None]"
            raise expected(name, "rows", "to be a tensor (n, ...), or a list of n texts, n >= 1", got, remedy)
        shape = tuple(rows.shape[1:]) if isinstance(rows, Tensor) else ()  # of one row; () for texts
        if shape not in self._tried:
            self._try(rows)
            self._tried.add(shape)
        size, copies = self._size, Copies(self, len(rows))
        made = torch.cat([self._block(rows[i : i + size], first + i) for i in range(0, len(rows), size)])
        if shared := copies.add(rows):
            setattr(made, SHARED, shared)
        return made

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: statistics of a batch would mix its rows."""
        return super().train(False)

    def config(self) -> dict[str, Any]:
        """Return what rebuilds the extractor besides its constants, for JSON: class, source, options, parts."""
        parts = {name: part.config() for name, part in self._modules.items() if isinstance(part, Extractor)}
        options = {name: getattr(self, name) for name in self.options}
        return {"class": type(self).__name__, "source": self.source, "options": options, "parts": parts}

    @classmethod
    def rebuilt(cls, config: Mapping[str, Any], parts: Mapping[str, "Extractor"]) -> Self:
        """Return an extractor of this class from its `config` and its nested extractors, without constants."""
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
        for name, part in self._modules.items():  # a part may be there twice
            if isinstance(part, Extractor):
                found |= {f"{name}.{path}": value for path, value in part.constants().items()}
        return found

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the extractor and its parts, by path; torch's own are left out."""
        usual, found = vars(nn.Module()), dict[str, Any]()
        for path, part in cast("Iterator[tuple[str, nn.Module]]", self.named_modules()):
            if isinstance(part, Extractor):
                found |= {f"{path} {key}".strip(): value for key, value in vars(part).items() if key not in usual}
        return found

    def digest(self) -> str:
        """Return a SHA-256 of class, config, parameters and buffers, in hex. Equal digests mean equal features."""
        return digest_of(json.dumps([FORMAT, self.config()], sort_keys=True), self.state_dict())

    def _block(self, rows: Rows, start: int | None = None) -> Tensor:
        """Return the features of at most `block` rows, float32, on their device; `start` numbers the first of them."""
        self.eval()  # the owner of a nested module may have changed it
        if isinstance(rows, Tensor):
            # Fill the block with copies of the first row. Matrix products of different sizes are rounded differently:
            # without this, the number of rows would show in the last bits of each feature.
            constant = next(chain(self.buffers(), self.parameters()), rows)
            filled = torch.cat([rows, rows[:1].expand(self._size - len(rows), *rows.shape[1:])]).to(constant.device)
            made = self._features(filled / 255 if filled.dtype == torch.uint8 else filled)[: len(rows)].to(rows.device)
        else:
            made = self._features(rows)
        if made.ndim != 2 or len(made) != len(rows) or not made.is_floating_point():
            condition = f"to be floating point, of shape ({len(rows)}, width)"
            raise expected(type(self).__name__, "features", condition, f"{made.dtype} of shape {tuple(made.shape)}")
        if (row := first_infinite(made)) is not None:
            got = "inf or NaN in " + ("the first or the last row" if start is None else f"row {start + row}")
            raise expected(type(self).__name__, "features", "to be finite", got)
        return made.float()

    @property
    def _size(self) -> int:  # the number of rows that the extractor and all its parts take in one call
        return min(part.block for part in self._parts())

    def _parts(self) -> list["Extractor"]:
        return [part for part in self.modules() if isinstance(part, Extractor)]

    def _features(self, rows: Any) -> Tensor:
        # torch could not load a program with a block without gradients
        with nullcontext() if torch.compiler.is_exporting() else torch.no_grad():
            return self.features(rows)

    def _try(self, rows: Rows) -> None:
        """Raise PrivacyError if the features of a row depend on its companions or on earlier calls."""
        name, size = type(self).__name__, self._size
        tolerance = max(part.tolerance for part in self._parts())
        first, last = rows[:1], rows[-1:]
        tried = (first, _changed(first))
        others = [last, _changed(last), *tried]
        if isinstance(rows, Tensor):
            others *= size // 4 + 1
        others = others[: max(0, size - 2)]  # a whole block, so that nothing is filled up
        before, attributes = {key: value.clone() for key, value in self.named_buffers()}, self.attributes()
        alone = [self._block(row) for row in tried]
        ahead = self._block(_cat(*tried, *others)[:size])
        behind = self._block(_cat(*others, *tried)[-size:])
        pairs = [(ahead[i : i + 1], alone[i], "other companions") for i in range(min(2, size))]
        pairs += [(behind[-1:], alone[1], "another place"), (self._block(first), alone[0], "the same row again")]
        for made, usual, reason in pairs:
            if made.shape != usual.shape:
                got = f"widths {usual.shape[1]} and {made.shape[1]} for {reason}"
            elif not (change := _norm(made - usual) / max(_norm(usual), 1e-30)) <= tolerance:
                got = f"a relative change of {change:.2g} for {reason}"
            else:
                continue
            raise expected(name, "each row's features", "to depend on that row only", got, _REMEDY)
        after = dict(self.named_buffers())
        changed = [key for key in after if key not in before or not torch.equal(after[key], before[key])]
        changed += [key for key, value in self.attributes().items() if attributes.get(key, self) is not value]
        if changed:
            raise expected(name, "the state", "to stay as it is", f"a new value of {changed[0]}", _REMEDY)


def digest_of(settings: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of a text and of tensors by name, in hex."""
    digest = hashlib.sha256(settings.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def public_rows(where: str, public: Public | Rows, source: str | None) -> Public:
    """Return public rows with their source; raise PrivacyError if there is no source, or a second one."""
    if isinstance(public, Public) != (source is None):
        condition = "to be given for bare rows" if source is None else "to be absent next to a Public, which has one"
        raise expected(where, "source", condition, source)
    return public if isinstance(public, Public) else Public(public, str(source))


def first_infinite(rows: Tensor) -> int | None:
    """Return the first row that holds inf or NaN; None if all are finite."""
    finite = rows.isfinite()
    return None if bool(finite.all()) else int((~finite).flatten(1).any(1).nonzero()[0])


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
    """Return other rows in the same range. Some values of a constant row become 0, or 1 if they are 0."""
    if not isinstance(rows, Tensor):
        return [f"{row} another text, which is longer {row}" for row in rows]
    flat = rows.flatten(1)
    high, low = flat.amax(1, keepdim=True), flat.amin(1, keepdim=True)
    halved = low + ((high - flat.flip(1)) / 2).to(flat.dtype)
    chosen = torch.rand(flat.shape[1], generator=torch.Generator().manual_seed(0)) < 0.5
    chosen[0] = True
    mixed = torch.where(chosen.to(flat.device), (flat == 0).to(flat.dtype), flat)
    return torch.where(high > low, halved, mixed).reshape(rows.shape)
