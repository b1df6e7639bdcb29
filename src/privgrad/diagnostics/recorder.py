"""What clipping, noise and debiasing did between two evaluations: rows for a training's curve."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from privgrad.diagnostics.gradient_stats import RawGradientStats, by_module
from privgrad.diagnostics.moments import RawMoments
from privgrad.optim import PrivateOptimizer
from privgrad.optim.adaptive import Debiased
from privgrad.private_gradient import RawStep

# Eight bins a power of ten, in units of the noise's variance.
_EDGES = [float(f"{10 ** (k / 8):.4g}") for k in range(-32, 17)]


class RawRecorder:
    """Sums up a training, row by row. NOT private, and never part of any update.

    Give `observe` to `fit(..., raw_observers=[diary.observe])`, and let `evaluate` return `row()` with its own numbers.
    A training that is gone on with after an interruption has a diary from there on: averages start anew.

    Args:
        optimizer: that the watched gradients move.
    """

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self._optimizer, self._watch = optimizer, RawGradientStats()
        options = optimizer.param_groups[0]
        decays = options.get("betas", (0.9, options["alpha"]) if "alpha" in options else None)
        self._twins = None if decays is None else RawMoments(betas=decays)

    def observe(self, raw: RawStep) -> None:
        """Take in one step."""
        self._watch.observe(raw)
        if self._twins is not None:
            self._twins.observe(raw)

    def row(self) -> dict[str, Any]:
        """What has happened since the last row; nothing if there was no step.

        Returns:
            As `RawGradientStats.summary`; "raw_layers": by module "raw_signal_to_noise", "noise_share" and, of a
            debiased optimizer, "fraction_floored"; of an optimizer that keeps an average of squares, "raw_moments":
            counts of coordinates between "edges", in units of the noise's variance (the outermost bins hold what lies
            beyond), for "raw_clean", "noisy" and "debiased", see `RawMoments.over_noise`. None for what is not
            finite. NOT private.
        """
        watch, self._watch = self._watch, RawGradientStats()
        if watch.steps == 0:
            return {}
        floored = self._optimizer.floored() if isinstance(self._optimizer, Debiased) else {}
        on_floor, coordinates = (by_module({name: pair[i] for name, pair in floored.items()}) for i in (0, 1))
        layers: dict[str, dict[str, float | None]] = {}
        for layer in watch.layers(whole=True):
            name: str = layer.pop("name")
            if name in on_floor:
                layer["fraction_floored"] = on_floor[name] / coordinates[name]
            layers[name] = {key: _short(value) for key, value in layer.items()}
        found = {key: _short(value) for key, value in watch.summary().items()}
        return found | {"raw_layers": layers} | self._moments()

    def _moments(self) -> dict[str, Any]:
        """Histograms of the second moment, where there is one and noise to measure it by."""
        if self._twins is None:
            return {}
        floor = self._optimizer.param_groups[0].get("debias_floor")
        kinds = self._twins.over_noise(debias_floor=floor)
        if not isinstance(self._optimizer, Debiased):
            del kinds["debiased"]
        if not all(bool(torch.isfinite(values).all()) for values in kinds.values()):
            return {}
        counts = {kind: _counts(values) for kind, values in kinds.items()}
        return {"raw_moments": {"edges": _EDGES, **counts}}


def _counts(values: Tensor) -> list[int]:
    inside = values.double().cpu().clamp(_EDGES[0], _EDGES[-1])
    counts = torch.histogram(inside, torch.tensor(_EDGES, dtype=torch.float64)).hist
    return cast("list[int]", counts.long().tolist())


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
