"""Losses that mix examples through state, by a coin, or on rare contents, as people write them.

Each case is two short trainings whose data differ by the last example, with the same sampling seed. A case holds if
each step before a refusal moved the clipped sum by at most C. A seed and a number determine it.
"""

import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.gradient.functional import seeded
from privgrad.private_gradient import RawStep
from tests.sensitivity.search import LIMIT, quiet, reason_of

Mix = Callable[[Tensor, Tensor], Tensor]
Fit = Callable[[Tensor], Tensor]
Fitter = Callable[[Tensor], Tensor]

# What a pass computes from all of its rows (B, D), and how it enters the rows of another pass.
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "largest": lambda x: x.amax(0),
    "spread": lambda x: x.std(0, unbiased=False),
    "last row": lambda x: x[-1],
    "sum": lambda x: x.sum(0),
    "norm": lambda x: x.norm(),
}
USES: dict[str, Mix] = {
    "minus": lambda x, s: x - s,
    "over": lambda x, s: x / (1e-3 + s.abs()),
    "times": lambda x, s: x * s,
    "beside": lambda x, s: x + 0.1 * s * torch.ones_like(x),
}
COINS: dict[str, Callable[[], float]] = {
    "Python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
    "normal": lambda: float(torch.special.ndtr(torch.randn(()))),
    "middle choice of Python": lambda: float(random.choice("abcde") != "c"),
    "middle choice of numpy": lambda: float(np.random.choice(3) != 1),
    "middle share of torch": lambda: float(torch.multinomial(torch.tensor([0.4, 0.2, 0.4]), 1) != 1),
    "integers": lambda: int(torch.randint(1000, ())) / 1000,
}
TRIGGERS = ("class", "large", "zero row", "whole row")
KINDS = ("fitted", "coin", "rare")


@dataclass(frozen=True)
class Mixed:
    """A case and what came of it.

    Attributes:
        parts: what was drawn, in words.
        change: largest L2 norm of a step's change of the clipped sum before a refusal, over C.
        refused: the step of the refusal, from 0; None if all steps passed.
        reason: of the refusal, without names and numbers.
    """

    number: int
    parts: tuple[str, ...]
    change: float
    refused: int | None
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the guarantee was broken."""
        return not self.change <= LIMIT


def _in_closure(fit: Fit, use: Mix) -> Fitter:
    stats: Tensor | None = None

    def fitted(x: Tensor) -> Tensor:
        nonlocal stats
        if stats is None:
            stats = fit(x)
        return use(x, stats)

    return fitted


def _in_list(fit: Fit, use: Mix) -> Fitter:
    seen = list[Tensor]()

    def fitted(x: Tensor) -> Tensor:
        if not seen:
            seen.append(fit(x))
        return use(x, seen[0])

    return fitted


def _in_default(fit: Fit, use: Mix) -> Fitter:
    def fitted(x: Tensor, cache: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006, as people write it
        if "fit" not in cache:
            cache["fit"] = fit(x)
        return use(x, cache["fit"])

    fitted.__defaults__ = ({},)  # of this case alone
    return fitted


def _in_partial(fit: Fit, use: Mix) -> Fitter:
    fitted: Any = _in_default(fit, use)
    return partial(fitted, cache={})


def _in_function(fit: Fit, use: Mix) -> Fitter:
    def scaled(x: Tensor) -> Tensor:
        if not hasattr(fitted, "center"):
            fitted.center = fit(x)
        return use(x, fitted.center)

    fitted: Any = scaled
    return scaled


_fit: Any = None


def _in_globals(fit: Fit, use: Mix) -> Fitter:
    global _fit
    _fit = None

    def fitted(x: Tensor) -> Tensor:
        global _fit
        if _fit is None:
            _fit = fit(x)
        return use(x, _fit)

    return fitted


def _in_object(fit: Fit, use: Mix) -> Fitter:
    class Scaler:
        fit: Tensor | None = None

        def __call__(self, x: Tensor) -> Tensor:
            if self.fit is None:
                self.fit = fit(x)
            return use(x, self.fit)

    return Scaler()


def _in_new_attribute(fit: Fit, use: Mix) -> Fitter:
    class Scaler:
        def scaled(self, x: Tensor) -> Tensor:
            if not hasattr(self, "center"):
                self.center = fit(x)
            return use(x, self.center)

    scaler = Scaler()
    return lambda x: scaler.scaled(x)


def _in_class(fit: Fit, use: Mix) -> Fitter:
    class Shared:
        center: Any = None

    def fitted(x: Tensor) -> Tensor:
        if Shared.center is None:
            Shared.center = fit(x)
        return use(x, Shared.center)

    return fitted


def _in_new_class_attribute(fit: Fit, use: Mix) -> Fitter:
    class Shared:
        pass

    cls: Any = Shared

    def fitted(x: Tensor) -> Tensor:
        if not hasattr(cls, "center"):
            cls.center = fit(x)
        return use(x, cls.center)

    return fitted


def _in_new_global(fit: Fit, use: Mix) -> Fitter:
    globals().pop("_late", None)

    def fitted(x: Tensor) -> Tensor:
        global _late  # pyright: ignore[reportUnusedVariable]
        if "_late" not in globals():
            _late = fit(x)  # pyright: ignore
        return use(x, _late)

    return fitted


def _in_average(fit: Fit, use: Mix) -> Fitter:
    class Running:
        def __init__(self) -> None:
            self.mean: Any = 0.0

        def update(self, x: Tensor) -> None:
            self.mean = 0.9 * self.mean + 0.1 * fit(x)

    running = Running()

    def fitted(x: Tensor) -> Tensor:
        running.update(x)
        return use(x, running.mean)

    return fitted


def _in_number(fit: Fit, use: Mix) -> Fitter:
    config = {"scale": {"value": 0.0}}

    def fitted(x: Tensor) -> Tensor:
        if config["scale"]["value"] == 0.0:
            config["scale"]["value"] = float(fit(x).mean())
        return use(x, torch.tensor(config["scale"]["value"]))

    return fitted


def _in_number_of_numpy(fit: Fit, use: Mix) -> Fitter:
    kept = SimpleNamespace(scale=np.float32(0))

    def fitted(x: Tensor) -> Tensor:
        if kept.scale == 0:
            kept.scale = np.float32(fit(x).mean())
        return use(x, torch.tensor(float(kept.scale)))

    return fitted


def _in_array(fit: Fit, use: Mix) -> Fitter:
    kept = SimpleNamespace(array=np.zeros(1), full=False)

    def fitted(x: Tensor) -> Tensor:
        if not kept.full:
            kept.array, kept.full = fit(x).double().numpy(), True
        return use(x, torch.from_numpy(kept.array).to(x))

    return fitted


def _in_arguments(fit: Fit, use: Mix) -> Fitter:
    args = Namespace(center=None)

    def fitted(x: Tensor) -> Tensor:
        if args.center is None:
            args.center = fit(x)
        return use(x, args.center)

    return fitted


def _in_module(fit: Fit, use: Mix) -> Fitter:
    settings: Any = ModuleType("settings_of_the_user")

    def fitted(x: Tensor) -> Tensor:
        if not hasattr(settings, "center"):
            settings.center = fit(x)
        return use(x, settings.center)

    return fitted


def _in_tensor(fit: Fit, use: Mix) -> Fitter:
    held = torch.zeros(1)

    def fitted(x: Tensor) -> Tensor:
        if not held.any():
            held.copy_(fit(x).mean())
        return use(x, held)

    return fitted


HOLDERS: dict[str, Callable[[Fit, Mix], Fitter]] = {
    "closure": _in_closure,
    "list": _in_list,
    "default": _in_default,
    "partial": _in_partial,
    "function": _in_function,
    "globals": _in_globals,
    "object": _in_object,
    "new attribute": _in_new_attribute,
    "class": _in_class,
    "new class attribute": _in_new_class_attribute,
    "new global": _in_new_global,
    "average": _in_average,
    "number": _in_number,
    "number of numpy": _in_number_of_numpy,
    "array": _in_array,
    "tensor": _in_tensor,
    "arguments": _in_arguments,
    "module": _in_module,
}


class Scaled(nn.Module):
    """A model that keeps its state itself, in an attribute, a new one, or a buffer; or fits by a function."""

    def __init__(self, inner: nn.Module, fit: Fit, use: Mix, place: str) -> None:
        super().__init__()
        self.inner, self._of, self._use, self._place = inner, fit, use, place
        if place == "module's attribute":
            self.center: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "center", None) is None:
            center = self._of(x)
            self.register_buffer("center", center) if self._place == "buffer" else setattr(self, "center", center)
        return self.inner(self._use(x, self.center))


PLACES = ("module's attribute", "module's new attribute", "buffer")


def run_mixed(seed: int, number: int, kind: str | None = None) -> Mixed:
    """Draw a case, train twice, and compare.

    Args:
        seed, number: determine the case.
        kind: one of KINDS; None draws it.
    """
    rng = random.Random(f"mixing {seed} {number}")
    torch.manual_seed(rng.getrandbits(60))
    kind = kind or rng.choice(KINDS)
    width, classes, count = rng.choice((2, 5, 12)), rng.choice((2, 3, 7)), rng.choice((24, 60, 200))
    rate, steps = rng.choice((1.0, 0.5, 0.2)), rng.choice((3, 6, 12))
    x, y = torch.randn(count, width), torch.randint(classes, (count,))
    if kind != "rare":
        x[-1] *= rng.choice((3.0, 30.0, 1e3))
    statistic, use = rng.choice(list(STATISTICS)), rng.choice(list(USES))
    mix = partial(_mixed, STATISTICS[statistic], USES[use])
    parts = [kind, statistic, use, f"{count} examples, rate {rate}, {steps} steps, width {width}, {classes} classes"]

    inner = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes))
    state = {name: value.clone() for name, value in inner.state_dict().items()}
    if rng.random() < 0.2:
        inner.insert(2, nn.Dropout(0.1))
        state = {name.replace("2.", "3."): value for name, value in state.items()}
        parts.append("dropout")
    options = {"engine": rng.choice(("factored", "factored", "vmap"))}
    parts.append(options["engine"])
    holder, source = rng.choice((*HOLDERS, *PLACES)), rng.choice(list(COINS))
    chance, trigger = rng.choice((0.002, 0.1, 0.5, 0.9, 0.998)), rng.choice(TRIGGERS)
    is_rare: Callable[[Tensor, Tensor], bool] = lambda x, y: False  # noqa: E731
    if kind == "rare":
        is_rare, (x, y) = _rarely(trigger, x, y, classes)
    parts += {"fitted": [holder], "coin": [source, f"chance {chance}"], "rare": [trigger]}[kind]

    def made() -> tuple[nn.Module, Any]:
        """Return the model and its loss anew, so that no training sees the state of the other."""
        inner.load_state_dict(state)
        model: nn.Module = inner
        if kind == "fitted":
            fit, mixing = (lambda x: STATISTICS[statistic](x).detach()), USES[use]
            if holder in PLACES:
                return Scaled(model, fit, mixing, holder), lambda net, ex: _plain(net, *ex)
            fitted = HOLDERS[holder](fit, mixing)
            return model, lambda net, ex: _plain(net, fitted(ex[0]), ex[1])
        if kind == "coin":
            coin = COINS[source]
            return model, lambda net, ex: _plain(net, mix(ex[0]) if coin() < chance else ex[0], ex[1])
        return model, lambda net, ex: _plain(net, mix(ex[0]) if is_rare(*ex) else ex[0], ex[1])

    with quiet(), seeded(0):
        runs = [_train(*made(), (x[:end], y[:end]), count, rate, steps, options) for end in (count, count - 1)]
    (more, one), (fewer, other) = runs
    change = max((float((a - b).norm()) for a, b in zip(more, fewer, strict=False)), default=0.0)
    error = one or other
    stop = None if error is None else min(len(more), len(fewer))
    return Mixed(number, tuple(parts), change, stop, "" if error is None else reason_of(error))


def _mixed(statistic: Callable[[Tensor], Tensor], use: Mix, x: Tensor) -> Tensor:
    return use(x, statistic(x))


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def _rarely(
    trigger: str, x: Tensor, y: Tensor, classes: int
) -> tuple[Callable[[Tensor, Tensor], bool], tuple[Tensor, Tensor]]:
    """Return whether a batch holds what only the last example has, and data in which this is so."""
    if trigger == "class":
        y = y % (classes - 1) if classes > 2 else y * 0
        y[-1] = classes - 1
        return lambda x, y: bool((y == classes - 1).any()), (x, y)
    if trigger == "large":
        x[-1, 0] = 5 * x.abs().max()
        most = float(x[:-1].abs().max()) * 2
        return lambda x, y: bool((x.abs() > most).any()), (x, y)
    x[:, 0] = torch.where(torch.rand(len(x)) < 0.5, 0.0, x[:, 0])
    x[:, -1] = torch.where(x[:, 0] == 0, x[:, -1], torch.zeros(()))  # of each row, one end is zero
    x[-1] = 0.0 if trigger == "zero row" else 1.5
    if trigger == "zero row":
        return lambda x, y: bool((x == 0).all(1).any()), (x, y)
    return lambda x, y: bool((x != 0).all(1).any()), (x, y)


def _train(
    model: nn.Module, loss: Any, data: tuple[Tensor, Tensor], count: int, rate: float, steps: int, options: Any
) -> tuple[list[Tensor], Exception | None]:
    """Return the clipped sum of each step, in units of C, and the refusal that ended the training."""
    size = max(1, round(rate * count))
    plan = pg.PrivacyPlan(
        sample_rate=size / count,
        steps=steps,
        expected_batch_size=size,
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        num_examples=count,
        delta=1e-5,
        seed=0,
    )
    sums = list[Tensor]()

    def seen(step: RawStep) -> None:
        values = [value.double().flatten() for value in step.raw_mean.values()]
        sums.append(torch.cat(values) * plan.divisor / plan.max_grad_norm)

    try:
        private_grad = pg.PrivateGradient(model, loss, plan, microbatch_size=256, **options)
        private_grad.register_raw_observer(seen)
        for batch in plan.batches(TensorDataset(*data)):
            private_grad(batch)
    except pg.PrivacyError as error:
        return sums, error
    return sums, None
