"""Rows for a training's curve: the effect of clipping, noise and debiasing between two evaluations."""

import math
from typing import Any

import torch

from privgrad.diagnostics.gradient_stats import RawGradientStats, by_module
from privgrad.diagnostics.moments import RawMoments
from privgrad.optim import PrivateOptimizer
from privgrad.optim.debiased import Debiased
from privgrad.private_gradient import RawStep

# Eight bins per power of ten, in units of the noise's variance.
_EDGES = [float(f"{10 ** (k / 8):.4g}") for k in range(-32, 17)]


class RawRecorder:
    """A recorder of a training, row by row. NOT private, and never part of any update.

    Call `private_grad.register_raw_observer(recorder.observe)`, and let `evaluate` return `row()` together with its own
    numbers. After a resume the recorder covers only the steps since then: its averages start again at 0.

    Args:
        optimizer: the optimizer that applies the observed gradients.
    """

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self._optimizer = optimizer
        self._stats = RawGradientStats()
        options = optimizer.param_groups[0]
        decays = options.get("betas", (0.9, options["alpha"]) if "alpha" in options else None)
        self._twins = None if decays is None else RawMoments(betas=decays)

    def observe(self, raw: RawStep) -> None:
        """Add one step to the current row."""
        self._stats.observe(raw)
        if self._twins is not None:
            self._twins.observe(raw)

    def row(self) -> dict[str, Any]:
        """Return the statistics since the last row; an empty dict if there was no step.

        Returns:
            As `RawGradientStats.summary`. "raw_layers": by module "raw_signal_to_noise", "noise_share" and, for a
            debiased optimizer, "fraction_floored". For an optimizer that keeps an average of squares, "raw_moments":
            counts of coordinates between "edges", in units of the noise's variance (the outermost bins also hold all
            values beyond), for "raw_clean", "noisy" and "debiased", see `RawMoments.over_noise`. Values that are not
            finite are None. NOT private.
        """
        stats, self._stats = self._stats, RawGradientStats()
        if stats.steps == 0:
            return {}
        floored = self._optimizer.floored() if isinstance(self._optimizer, Debiased) else {}
        on_floor = by_module({name: count for name, (count, _) in floored.items()})
        coordinates = by_module({name: count for name, (_, count) in floored.items()})
        layers: dict[str, dict[str, float | None]] = {}
        for layer in stats.layers(whole=True):
            name: str = layer.pop("name")
            if name in on_floor:
                layer["fraction_floored"] = on_floor[name] / coordinates[name]
            layers[name] = {key: _short(value) for key, value in layer.items()}
        found = {key: _short(value) for key, value in stats.summary().items()}
        return found | {"raw_layers": layers} | self._moments()

    def _moments(self) -> dict[str, Any]:
        """Return histograms of the second moment; empty without one, or without noise as its unit."""
        if self._twins is None:
            return {}
        group = self._optimizer.param_groups[0]
        floor = {name: group[name] for name in ("debias_floor", "gamma_prime") if name in group}
        kinds = self._twins.over_noise(**floor)
        if not isinstance(self._optimizer, Debiased):
            del kinds["debiased"]
        if not all(bool(torch.isfinite(values).all()) for values in kinds.values()):
            return {}
        found: dict[str, Any] = {"edges": _EDGES}
        for kind, values in kinds.items():
            inside = values.double().cpu().clamp(_EDGES[0], _EDGES[-1])
            counts = torch.histogram(inside, torch.tensor(_EDGES, dtype=torch.float64)).hist
            found[kind] = counts.long().tolist()
        return {"raw_moments": found}


def _short(value: float) -> float | None:
    """Round a number to four digits; return None for one that is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
