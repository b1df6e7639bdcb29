"""Losses that differentiate by their inputs: exact, however small the penalty is and however late it comes."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.engine.factored import Factored
from privgrad.gradient.reference import per_sample_gradients


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def input_of(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def penalty(model: Any, x: Tensor) -> Tensor:
    x = input_of(x)
    output = model(x)[:, 0]
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.softplus(-output) + 1e-6 * grad.square().sum(1)


def physics(model: Any, x: Tensor) -> Tensor:
    x = input_of(x)
    (grad,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad[:, 0].sum(), x, create_graph=True)
    return (grad[:, 1] - 0.1 * second[:, 0]).square()


def by_backward(model: Any, x: Tensor) -> Tensor:
    x = input_of(x)
    model(x)[:, 0].sum().backward(create_graph=True)
    assert x.grad is not None
    return x.grad.square().sum(1)


def of_features(model: Any, x: Tensor) -> Tensor:
    """A derivative by what the first layer computes."""
    features = model[0](x)
    (grad,) = torch.autograd.grad(model[1:](features)[:, 0].sum(), features, create_graph=True)
    return grad.square().sum(1)


def by_func(model: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x)[:, 0].sum())(x).square().sum(1)


def forward_mode(model: Any, x: Tensor) -> Tensor:
    output, tangent = cast(Any, torch.func.jvp)(model, (x,), (torch.ones_like(x),))
    return output.sum(1) + 1e-6 * tangent.square().sum(1)


def by_functional(model: Any, x: Tensor) -> Tensor:
    ones = torch.ones(len(x), dtype=x.dtype)
    of_inputs: Any = torch.autograd.functional.vjp(lambda x: model(x)[:, 0].tanh(), x, ones, create_graph=True)[1]
    return of_inputs.square().sum(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_fn", [penalty, physics, by_backward, of_features, by_func, forward_mode, by_functional])
def test_derivatives_within_the_loss_are_exact(loss_fn: Callable[[Any, Tensor], Tensor]):
    model, x = make_model(), torch.randn(6, 5, dtype=torch.float64)
    found = Factored(model, loss_fn)(x)
    for index in range(len(x)):
        loss = loss_fn(model, x[index : index + 1]).sum()
        model.zero_grad()
        rows = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
        for (name, _), row in zip(model.named_parameters(), rows, strict=True):
            got = found[name].dense()[index] if name in found else torch.zeros_like(row)
            torch.testing.assert_close(got, row, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_a_penalty_that_comes_late_is_noticed_at_once():
    model, steps = make_model(), list[int]()

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return penalty(model, x) if len(steps) >= 5 else F.softplus(-model(x)[:, 0])

    engine = Factored(model, loss_fn)
    for step in range(7):  # not a step of the schedule of checks
        steps.append(step)
        x = torch.randn(6, 5, dtype=torch.float64)
        found = engine(x)
        for name, rows in per_sample_gradients(model, loss_fn, x).items():
            torch.testing.assert_close(found[name].dense(), rows, rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_derivatives_that_are_not_differentiated_stay_fast():
    model, x = make_model(), torch.randn(6, 5, dtype=torch.float64)

    def adversarial(model: Any, x: Tensor) -> Tensor:
        moved = input_of(x)
        (grad,) = torch.autograd.grad(model(moved).square().sum(), moved)
        return model(x + 0.1 * grad.sign()).square().sum(1)

    def of_outputs(model: Any, x: Tensor) -> Tensor:
        outputs = model(x)
        (grad,) = torch.autograd.grad(outputs.sin().sum(), outputs, create_graph=True)
        return (outputs * grad).sum(1)

    for loss_fn in (adversarial, of_outputs):
        engine = Factored(model, loss_fn)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = engine(x)
        for name, rows in per_sample_gradients(model, loss_fn, x).items():
            torch.testing.assert_close(found[name].dense(), rows, rtol=1e-8, atol=1e-8)
        assert {use.way for use in engine.uses().values()} == {"rule"}


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_by_the_parameters_themselves_is_computed_from_whole_losses():
    model, x = make_model(), torch.randn(4, 5, dtype=torch.float64)

    def sharpness(model: Any, x: Tensor) -> Tensor:
        found = list[Tensor]()
        for row in x.split(1):
            grads = torch.autograd.grad(model(row).square().sum(), list(model.parameters()), create_graph=True)
            found.append(torch.stack([grad.square().sum() for grad in grads]).sum())
        return torch.stack(found)

    found = Factored(model, sharpness)(x)
    for name, rows in per_sample_gradients(model, sharpness, x).items():
        torch.testing.assert_close(found[name].dense(), rows, rtol=1e-8, atol=1e-10)
