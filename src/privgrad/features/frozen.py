"""Features from networks that do not learn: pretrained encoders, and random Fourier features.

Users and `experiments` call them. The privacy guarantee rests on this: the network stays in evaluation mode, and
`Extractor.forward` refuses one whose features depend on companions. Whether its own training data were public is the
user's statement, in `source`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from privgrad.errors import did_you_mean, expected, require_callable, require_integer, require_positive
from privgrad.features.extractor import Extractor

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Frozen(Extractor):
    """The outputs of a pretrained network, flattened.

    The network is put into evaluation mode and stays there. It is not copied.

    Attributes:
        name: names the network in saved files, which do not hold its weights.
        module: the network.
        transform: applied to the rows before the network.
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
        """Keep the network.

        Args:
            module: a network that maps rows to a tensor (n, ...).
            transform: a function of rows, such as a normalization or a change of size; None for none. It must treat
                each row alone.
            name: a name for saved files, such as "resnet18".
            source: what the network was trained on, for the ledger, such as "ResNet-18, trained on ImageNet".
            block: the number of rows in one call of the network; a larger one is faster on a GPU.
            tolerance: see Extractor. None: 1e-6 for float64, 1e-5 for float32, 2e-2 for float16 and bfloat16, by the
                least precise parameter.
        Raises:
            PrivacyError: a layer normalizes by statistics of the batch even in evaluation mode, or an argument is
                wrong.
        """
        require_integer("Frozen", "block", block, 1)
        if transform is not None:
            require_callable("Frozen", "transform", transform, "give a function of rows, or leave it out")
        for path, layer in cast(Iterator[tuple[str, nn.Module]], module.named_modules()):
            if isinstance(layer, _BATCH_NORMS) and cast(Any, layer).running_mean is None:
                remedy = "set track_running_stats=True and load running statistics, or use GroupNorm"
                raise expected("Frozen", f"layer {path!r}", "to have running statistics", None, remedy)
        super().__init__(source)
        self.module, self.transform, self.name, self.block = module, transform, name, block
        types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        self.tolerance = _tolerance(types) if tolerance is None else tolerance
        self.eval()

    @classmethod
    def rebuilt(cls, config: Mapping[str, Any], parts: Mapping[str, Extractor]) -> Self:
        """Raise PrivacyError. `load_extractor` calls it with its modules as parts, if the network is not among them."""
        name = config["options"]["name"]
        remedy = f"make it with the same code as before, and give modules={{{name!r}: Frozen(...)}}"
        got = sorted(parts) if name not in parts else f"{name!r}, a {type(parts[name]).__name__}"
        remedy = did_you_mean(next(iter(parts), ""), [] if name in parts else [name], remedy)
        raise expected("load_extractor", "modules", f"to hold the {cls.__name__} {name!r}", got, remedy)

    def constants(self) -> dict[str, Tensor]:
        return {}

    def digest(self) -> str:
        """Return a SHA-256 as Extractor does, of the kinds of layers and of the transform too.

        A transform counts by its name and the decimal numbers in its code: give another function another name.
        """
        layers = cast(Iterator[tuple[str, nn.Module]], self.module.named_modules())
        kinds = "\n".join(f"{path} {type(layer).__qualname__}" for path, layer in layers)
        name = getattr(self.transform, "__qualname__", type(self.transform).__qualname__)
        code: Any = getattr(self.transform, "__code__", None)  # of a function only
        numbers = [] if code is None else [one for one in code.co_consts if isinstance(one, float)]
        return hashlib.sha256(f"{super().digest()}\n{kinds}\n{name} {numbers}".encode()).hexdigest()

    def features(self, rows: Any) -> Tensor:
        made: object = self.module(rows if self.transform is None else self.transform(rows))
        if not isinstance(made, Tensor):
            remedy = "wrap the network in a module that returns one tensor"
            raise expected("Frozen", "the network's result", "to be a tensor", f"a {type(made).__name__}", remedy)
        return made.flatten(1)


class RandomFourier(Extractor):
    """Random Fourier features of rows of numbers: sqrt(2 / width) cos(W x + b), for a Gaussian kernel.

    They suit rows of few numbers. On features of images they lost accuracy.

    Attributes:
        bandwidth: the distance at which the kernel falls to exp(-1/2).
    Reference:
        Rahimi, Recht 2007.
    """

    options: ClassVar[tuple[str, ...]] = ("bandwidth",)

    def __init__(self, inputs: int, width: int, *, bandwidth: float, seed: int = 0) -> None:
        """Draw the directions.

        Args:
            inputs: number of values in a row.
            width: number of features.
            bandwidth: > 0, from public knowledge: typical distances of the private rows are private.
            seed: of the directions, which are public.
        Raises:
            PrivacyError: a number is out of its range.
        """
        require_integer("RandomFourier", "inputs", inputs, 1)
        require_integer("RandomFourier", "width", width, 1)
        require_positive("RandomFourier", "bandwidth", bandwidth, "give a typical distance of two rows")
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(inputs, width, generator=generator) / bandwidth
        super().__init__("no data", directions=directions, shift=2 * math.pi * torch.rand(width, generator=generator))
        self.bandwidth = float(bandwidth)

    def features(self, rows: Any) -> Tensor:
        directions, values = self.get_buffer("directions"), rows.flatten(1).float()
        if values.shape[1] != len(directions):
            remedy = "make RandomFourier with the width of the rows"
            raise expected("RandomFourier", "rows", f"of {len(directions)} numbers", values.shape[1], remedy)
        return math.sqrt(2 / directions.shape[1]) * torch.cos(values @ directions + self.get_buffer("shift"))


def _tolerance(types: set[torch.dtype]) -> float:
    if types & {torch.float16, torch.bfloat16}:
        return 2e-2
    return 1e-5 if torch.float32 in types or not types else 1e-6
