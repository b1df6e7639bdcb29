"""Compare the fast engine's gradients of a few examples with the gradients of each example alone.

`hooks.Hooks` calls this when it learns a model, and on some rows of the 1st, 2nd, 4th, 8th ... batch. The privacy
guarantee of the fast engine rests on these comparisons: they would detect a model or a rule that mixes examples in
the compared rows. They do not prove that it never happens.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.engines.capture import REMEDY, refused, written_to
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.module_state import trainable
from privgrad.gradient.probes import gradients
from privgrad.types import LossFunction, map_examples


def require_single(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    found: Mapping[str, Factor],
    tolerance: float,
    moves: Displacements | None = None,
    *,
    rows: Sequence[int],
    exact: bool = False,
) -> None:
    """Raise UnsupportedModuleError if rows of the factors differ from the gradients of these examples alone.

    If the forward pass writes to parameters, it writes to the model's own. Callers therefore use `restored`.

    Args:
        model: the module.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: the examples of the factors, with leading dimension B.
        found: the factors to check, by parameter name.
        tolerance: the largest accepted difference, relative to the norm of the parameter's gradient plus a tenth of
            the norm over all parameters.
        moves: displacements of each example's parameters; None if they are not displaced.
        rows: the rows to check.
        exact: whether the gradients include the Hessian's product with the moves, instead of being displaced.
    Raises:
        UnsupportedModuleError: some gradient differs by more than the tolerance; the message names the parameter.
    """
    parameters = trainable(model)
    for index in rows:
        row = slice(index, index + 1)
        along = {} if moves is None else {n: move[row].dense()[0] for n, move in moves.of(parameters).items()}
        alone = map_examples(itemgetter(row), examples)
        single = gradients(model, loss_fn, alone, along=along, exact=exact, copied=False)
        whole = sum(norm_of(reference) ** 2 for reference in single.values()) ** 0.5
        for name, reference in single.items():
            value = found[name][row].dense()[0] if name in found else torch.zeros_like(reference)
            # The comparison is false if values are not finite: such an example contributes zero anyway.
            if norm_of(value - reference) > tolerance * (norm_of(reference) + 0.1 * whole):
                remedy = (
                    "keep examples in dimension 0 (batch_first=True) and apart in every layer; if you registered a "
                    f"rule for this layer or the next, correct it; or {REMEDY}"
                )
                condition, got = "to match the gradients of single examples", f"a difference above {tolerance:g}"
                raise refused(f"the gradient of {name!r}", condition, f"{got}, relative", remedy)


def norm_of(x: Tensor) -> float:
    """Return the norm of all entries, computed in float32 or wider."""
    return float(cast(Tensor, torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))))


@contextmanager
def restored(model: nn.Module) -> Generator[None]:
    """Run a check, and put the parameters back bit by bit if it wrote to any of them, also after an exception.

    Raises:
        UnsupportedModuleError: a parameter was written to, even if autograd's version counter missed it.
    """
    before = [(name, parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    refusal: UnsupportedModuleError | None = None
    try:
        yield
    except UnsupportedModuleError as error:  # the write may be its cause
        refusal = error
    finally:
        written = [name for name, parameter, held in before if not _bits(parameter).equal(_bits(held))]
        with torch.no_grad():
            for _, parameter, held in before if written else []:
                parameter.data.copy_(held)
    if written:
        raise written_to(", ".join(written)) from refusal
    if refusal is not None:
        raise refusal


def _bits(x: Tensor) -> Tensor:
    """Return the bits of the numbers as integers, so that NaN equals itself."""
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
