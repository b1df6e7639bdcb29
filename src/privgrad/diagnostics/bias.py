"""What clipping does to the mean gradient: how far it moves it, along it and across it."""

from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_positive
from privgrad.gradient.engines.hooks import Hooks
from privgrad.gradient.module_state import trainable
from privgrad.gradient.perturb import SAT, Perturbation
from privgrad.gradient.validation import require_supported
from privgrad.types import LossFunction, NoisyGradient, count_examples, map_examples


def raw_clipping_bias(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    *,
    max_grad_norm: float,
    perturb: Perturbation | None = None,
    step: int = 0,
    released: NoisyGradient | None = None,
) -> dict[str, float]:
    """The bias of the clipped mean gradient, before any noise. NOT private.

    Computes, over l examples with gradients g_i, their mean g, M_i = max(1, |g_i| / C) and s = mean of g_i / M_i:
    s = a g + c with c orthogonal to g, and |s - g|^2 = (a - 1)^2 |g|^2 + |c|^2.

    Args:
        model, loss_fn: as in PrivateGradient.
        examples: l of them, at least one. Their number divides, not the expected batch size.
        max_grad_norm: C > 0.
        perturb: where the gradients are taken: BAM(radius) at a point of each example's own, SAT(radius) along
            `released`; None at the weights.
        step: whose radius is taken, where that is scheduled.
        released: the last released gradient: to compare directions with, and for SAT.
    Returns:
        "raw_norm" |g|; "raw_bias" |s - g|; "raw_bound" mean of max(0, |g_i| - C), which the bias never exceeds;
        "raw_along" a and "raw_across" |c|; "raw_cosine" of s with g; "raw_ascent" mean of the cosines of g_i with g;
        with `released` also "raw_released", its cosine with g. Cosines are nan where a vector is zero.
    Raises:
        PrivacyError: C is not positive; no examples; SAT without `released`; perturb asks for the mean gradient.
        UnsupportedModuleError: as PrivateGradient.
    Reference:
        The paper on BAM, theorem 1 and figures 2, 4, 5, 6. Deviation: M_i is as above, where they print its inverse;
        and their lemma 2, that shorter gradients always mean less bias, is false: 3 and -3 at C = 1 have none, 3 and
        -1.5 have 0.75. What holds is the bound above.
    """
    require_positive("raw_clipping_bias", "max_grad_norm", max_grad_norm, "give the plan's")
    require_supported(model)
    if isinstance(perturb, SAT) and released is None:
        raise expected("raw_clipping_bias", "released", "to be given for SAT", None, "give the last released gradient")
    engine, parameters = Hooks(model, loss_fn), trainable(model)
    chosen = Perturbation(0.0) if perturb is None else perturb.begun()
    if released is not None:
        chosen.released(released)
    if (count := count_examples(examples)) == 0:
        raise expected("raw_clipping_bias", "examples", "to be at least one", 0, "give a batch that is not empty")
    size = engine.microbatch_size(examples)
    # Sums of g_i, of its clipped form and of g_i / |g_i|: all else follows from the three.
    sums, cut_off = [{name: torch.zeros_like(p).double() for name, p in parameters.items()} for _ in range(3)], 0.0
    radius = chosen.radius(step)
    with chosen.at(radius, parameters, _refuse):
        for start in range(0, count, size):
            part = map_examples(itemgetter(slice(start, start + size)), examples)
            factors = chosen.gradients(engine, part, radius)
            norm_B = _norm(torch.stack([factor.norms() for factor in factors.values()]), 0)
            weights_B = (torch.ones_like(norm_B), 1 / (norm_B / max_grad_norm).clamp(min=1), 1 / norm_B)
            for total, weight_B in zip(sums, weights_B, strict=True):
                for name, factor in factors.items():
                    total[name] += factor.weighted_sum(weight_B)
            cut_off += float((norm_B - max_grad_norm).clamp(min=0).sum())
    g, s, unit = (_flat(total) / count for total in sums)
    square = float(g @ g)
    along = float(s @ g) / square if square else 0.0
    found = {
        "raw_norm": square**0.5,
        "raw_bias": float(_norm(s - g, 0)),
        "raw_bound": cut_off / count,
        "raw_along": along,
        "raw_across": float(_norm(s - along * g, 0)),
        "raw_cosine": _cosine(s, g),
        "raw_ascent": float(unit @ g / _norm(g, 0)),
    }
    if released is not None:
        found["raw_released"] = _cosine(_flat({name: released.values[name].double() for name in parameters}), g)
    return found


def _refuse() -> dict[str, Tensor]:
    raise expected("raw_clipping_bias", "perturb", "to be BAM or SAT", "RawSAM", "take the gradients there yourself")


def _flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def _cosine(one: Tensor, other: Tensor) -> float:
    return float((one @ other) / (_norm(one, 0) * _norm(other, 0)))


def _norm(values: Tensor, dim: int) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(values, dim=dim))
