"""The bias of clipping: how far clipping moves the mean gradient, along it and orthogonal to it."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.checks.model_and_loss import require_supported
from privgrad.engine.factored import Factored
from privgrad.errors import expected, require_integer, require_positive
from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.gradient.functional import advanced, trainable
from privgrad.perturb.points import SAT
from privgrad.types import LossFunction, NoisyGradient, count_examples, part_of


def raw_clipping_bias(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    *,
    max_grad_norm: float,
    perturb: Contribution | None = None,
    step: int = 0,
    released: NoisyGradient | None = None,
) -> dict[str, float]:
    """Compute the bias of the clipped mean gradient, before any noise. NOT private.

    Computes, over l examples with gradients g_i, their mean g, M_i = max(1, |g_i| / C) and s = mean of g_i / M_i:
    s = a g + c with c orthogonal to g, and |s - g|^2 = (a - 1)^2 |g|^2 + |c|^2.

    Args:
        model: as in PrivateGradient.
        loss_fn: as in PrivateGradient.
        examples: l examples, at least one. The divisor is l, not the expected batch size.
        max_grad_norm: C > 0.
        perturb: the point at which the gradients are taken. BAM(radius): a point for each example; SAT(radius): along
            `released`; None: the weights.
        step: the step whose radius is used, if the radius follows a schedule.
        released: the last released gradient, for comparing directions and for SAT.
    Returns:
        "raw_norm" |g|; "raw_bias" |s - g|; "raw_bound" mean of max(0, |g_i| - C), which the bias never exceeds;
        "raw_along" a and "raw_across" |c|; "raw_cosine" of s with g; "raw_ascent" mean of the cosines of g_i with g;
        with `released` also "raw_released", its cosine with g. Cosines are nan where a vector is zero.
    Raises:
        PrivacyError: C is not positive; there are no examples; SAT without `released`; perturb requests the mean
            gradient.
        UnsupportedModuleError: as in PrivateGradient.
    Reference:
        The paper on BAM, theorem 1 and figures 2, 4, 5, 6. Deviation: M_i is as above; the paper prints its inverse.
        The paper's lemma 2 says that shorter gradients always have less bias. It is false: 3 and -3 at C = 1 have no
        bias, 3 and -1.5 have 0.75. The bound above does hold.
    """
    require_positive("raw_clipping_bias", "max_grad_norm", max_grad_norm, "give the max_grad_norm of the plan")
    require_supported(model)
    if isinstance(perturb, SAT) and released is None:
        raise expected("raw_clipping_bias", "released", "to be given for SAT", None)
    engine, parameters = Factored(model, loss_fn), trainable(model)
    chosen = SampleGradient() if perturb is None else perturb.begun()
    if released is not None:
        chosen.released(released)
    count = count_examples(examples)
    require_integer("raw_clipping_bias", "the number of examples", count, 1)
    # Sums of g_i, of the clipped g_i and of g_i / |g_i|: the results follow from these three.
    sums = [{name: torch.zeros_like(p).double() for name, p in parameters.items()} for _ in range(3)]
    cut_off = 0.0

    def refuse() -> dict[str, Tensor]:  # a perturbation requests the mean gradient
        raise expected("raw_clipping_bias", "perturb", "to be BAM or SAT", type(chosen).__name__)

    with advanced(model, keep=False), chosen.at(step, parameters, refuse):
        size = engine.microbatch_size(examples, count)
        for start in range(0, count, size):
            part = part_of(examples, slice(start, start + size))
            factors = chosen.gradients(engine, part, step, {})
            norm_B = _norm(torch.stack([factor.norms() for factor in factors.values()]))
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
        "raw_bias": float(_norm(s - g)),
        "raw_bound": cut_off / count,
        "raw_along": along,
        "raw_across": float(_norm(s - along * g)),
        "raw_cosine": _cosine(s, g),
        "raw_ascent": float(unit @ g / _norm(g)),
    }
    if released is not None:
        found["raw_released"] = _cosine(_flat({name: released[name].double() for name in parameters}), g)
    return found


def _flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def _cosine(one: Tensor, other: Tensor) -> float:
    return float((one @ other) / (_norm(one) * _norm(other)))


def _norm(values: Tensor) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(values, dim=0))
