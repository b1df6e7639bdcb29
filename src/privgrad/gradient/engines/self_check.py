"""What the fast engine goes by, tried on a few examples: that their gradients are those of each alone."""

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
from privgrad.gradient.validation import gradients
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
    """Require that rows of the factors are the gradients of these examples alone, moved if there are moves.

    A forward pass that writes to parameters writes to the model's: this runs where they are `restored`.

    Raises:
        UnsupportedModuleError: the name of a parameter for which it is not, by more than the relative tolerance.
    """
    parameters = trainable(model)
    for index in rows:
        row = slice(index, index + 1)
        along = {} if moves is None else {n: move[row].dense()[0] for n, move in moves.of(parameters).items()}
        alone = map_examples(itemgetter(row), examples)
        single = gradients(model, loss_fn, alone, along=along, exact=exact, copied=False)
        whole = sum(norm_of(wanted) ** 2 for wanted in single.values()) ** 0.5
        for name, wanted in single.items():
            got = found[name][row].dense()[0] if name in found else torch.zeros_like(wanted)
            # What is not finite compares as false: such an example contributes zero anyway.
            if norm_of(got - wanted) > tolerance * (norm_of(wanted) + 0.1 * whole):
                remedy = (
                    "keep examples in dimension 0 (batch_first=True) and apart in every layer; if you registered a "
                    f"rule for this layer or the next, correct it; or {REMEDY}"
                )
                raise refused(f"the gradient of {name!r}", "to be that of single examples", "another", remedy)


def norm_of(x: Tensor) -> float:
    return float(cast(Tensor, torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))))


@contextmanager
def restored(model: nn.Module) -> Generator[None]:
    """Put the parameters back, bit by bit, if what runs here writes to them or ends in an error.

    Raises:
        UnsupportedModuleError: they were written to, even past autograd's own count.
    """
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    refusal: UnsupportedModuleError | None = None
    try:
        yield
    except UnsupportedModuleError as error:  # which may be due to what was written
        refusal = error
    finally:
        written = [parameter for parameter, held in before if not _bits(parameter).equal(_bits(held))]
        with torch.no_grad():
            for parameter, held in before if written else []:
                parameter.data.copy_(held)
    if written:
        raise written_to("other values") from refusal
    if refusal is not None:
        raise refusal


def _bits(x: Tensor) -> Tensor:
    """Return the numbers as integers, of which NaN equals itself."""
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
