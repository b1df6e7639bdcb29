"""A module is taken whole where the fast engine refuses a unit; this hides no dependence between examples."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from test_factored import FunctionalTying
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn

import privgrad as pg
from privgrad.engine.factored import Factored
from privgrad.gradient.factor import Dense
from privgrad.gradient.functional import gradients
from privgrad.gradient.reference import Vmap
from privgrad.gradient.refusals import StepChangedError
from privgrad.types import LossFunction


def texts(count: int = 6) -> Tensor:
    return torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def nothing(x: Tensor) -> Tensor:
    return x


def earlier(x: Tensor) -> Tensor:
    """A share of the sum of all earlier rows, added to each."""
    return x + 0.1 * (x.cumsum(0) - x)


def repeated(value: Tensor, size: int) -> Tensor:
    """One copy for each example, in a way that cannot be attributed to them."""
    return torch.cat([value] * size)


class Bias(nn.Module):
    """Biases that are looked up once for all examples, and repeated in a list."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.values, self.change = nn.Embedding(9, 2), nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        x, places = self.change(x), torch.arange(x.shape[1])
        biases = self.table((places[:, None] - places).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        scores = (x @ x.transpose(1, 2))[:, None] + repeated(biases, len(x))
        return (scores.softmax(-1) @ self.values(x)[:, None]).mean(1)


class Net(nn.Module):
    """A list of blocks between two layers."""

    def __init__(self, inside: Callable[[Tensor], Tensor] = nothing, outside: Callable[[Tensor], Tensor] = nothing):
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(4, 4),
            nn.ModuleList([Bias(inside), Bias(inside)]),
            nn.Linear(4, 2),
        )
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = self.outside(x) + block(x)
        return self.last(x).sum(1)


def taken_by(engine: Factored, x: Tensor) -> str:
    """The engine's warning; the empty string if it takes nothing whole."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine(x)
    return "".join(str(warning.message) for warning in found)


def test_only_the_modules_that_need_it_are_taken_whole_once():
    torch.manual_seed(0)
    model, x = Net().double(), texts()
    engine = Factored(model, losses_of)
    message = taken_by(engine, x)
    assert message.startswith("PrivateGradient computes 'blocks.0', 'blocks.1' for each example by itself")
    assert "the uses of parameter 'blocks.1.table.weight' in cat must keep examples apart" in message
    for _ in range(3):
        found = engine(x)
        for name, rows in one_by_one(model, x).items():
            assert_equal_to_loop(found[name], rows, 1e-10)
            assert isinstance(found[name], Dense) == name.startswith("blocks") or name.endswith("bias")


def test_a_dependence_outside_of_what_is_taken_whole_is_refused():
    torch.manual_seed(0)
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        Factored(Net(outside=earlier).double(), losses_of)(texts())


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_a_dependence_inside_of_what_is_taken_whole_is_cut_and_found_by_the_check_of_the_losses():
    torch.manual_seed(0)
    model, x = Net(inside=earlier).double(), texts()
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        Factored(model, losses_of)(x)
    # Without that check, each row still is the gradient of its example alone.
    engine = Factored(model, losses_of)
    engine.audit(x)
    engine._schedule.calls, engine._schedule.is_due = 4, False
    found = engine(x)  # the fifth call
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-10)


def coupled(model: nn.Module, x: Tensor) -> Tensor:
    """Losses that are divided by the largest of the batch."""
    losses = losses_of(model, x)
    return losses / losses.detach().max()


def of_the_table(model: nn.Module, x: Tensor) -> Tensor:
    """Losses that use a parameter, so that even the root is refused, and that are coupled."""
    penalty: Tensor = model.last.weight.square().sum()[None]  # type: ignore[union-attr]
    return coupled(model, x) + repeated(penalty, len(x))


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("losses", [coupled, of_the_table])
def test_coupled_losses_are_refused_also_where_a_module_or_the_loss_is_taken_whole(losses: LossFunction):
    torch.manual_seed(0)
    with pytest.raises(pg.PrivacyError, match=r"(own example|single examples)"):
        Factored(Net().double(), losses)(texts())


class Later(nn.Module):
    """Uses a layer's weight outside of it from some step on, though nothing that the configuration holds changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        outside = repeated(self.layer.weight.sum()[None, None], len(x)) if LATER["on"] else 0.0
        return self.layer(x).sum(1) + outside


LATER = {"on": False}


@pytest.mark.parametrize("first", ["computed", "empty", "changed"])
def test_a_module_is_taken_whole_in_any_step(first: str):
    torch.manual_seed(0)
    model, x = Later().double(), texts()
    engine = Factored(model, losses_of)
    LATER["on"] = False
    engine.begin_step()
    if first != "empty":
        engine(x)
    if first == "changed":  # as PrivateGradient does for another configuration of the model
        engine.check_again()
    engine.begin_step()
    LATER["on"] = True
    with pytest.warns(UserWarning, match="the whole model"):
        found = engine(x)
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-10)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_the_step_starts_again_if_examples_were_computed_otherwise():
    torch.manual_seed(0)
    model, x = Later().double(), texts()
    engine = Factored(model, losses_of)
    engine.begin_step()
    LATER["on"] = False
    engine(x)
    LATER["on"] = True
    while True:  # the layer, then the whole model, then the loss
        try:
            found = engine(x)
        except StepChangedError:
            continue
        break
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-10)


class Masked(Bias):
    """Is handed a mask only where some token is padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask[..., None])


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), Masked(nothing)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.abs().sum(-1) > 0).to(x.dtype)
        return self.block(self.first(x), None if bool(mask.all()) else mask).sum(1)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_a_tensor_that_is_handed_over_for_some_contents_only():
    """The one padded text of a later batch is not among the examples that an audit draws."""
    torch.manual_seed(0)
    model, x = Texts().double(), texts(9)
    padded = x.clone()
    padded[4, 2:] = 0.0
    engine = Factored(model, losses_of)
    for step, batch in enumerate((x, x, x, padded, x, padded, padded[:5], x)):
        engine.begin_step()
        found = engine.moved(batch, 0.0, exact=False) if step == 5 else engine(batch)
        for name, rows in one_by_one(model, batch).items():
            assert_equal_to_loop(found[name], rows, 1e-10)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_an_expert_that_no_example_of_a_batch_needs():
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

        def forward(self, x: Tensor) -> Tensor:
            chosen, output = (x[:, 0] > 0).long(), x.new_zeros(len(x), 3)
            for index in chosen.unique().tolist():
                output = output.index_add(0, (at := torch.nonzero(chosen == index)[:, 0]), self.experts[index](x[at]))
            return output

    torch.manual_seed(0)
    model, x = Chosen().double(), texts(9)[:, 0]
    engine = Factored(model, losses_of)
    for batch in (x, x[x[:, 0] > 0], x[x[:, 0] <= 0], x):
        engine.begin_step()
        found = engine(batch)
        for index in range(len(batch)):
            for name, wanted in gradients(model, losses_of, batch[index : index + 1]).items():
                torch.testing.assert_close(found[name].dense()[index], wanted)


class Twice(nn.Module):
    """Uses one layer inside of the module that is taken whole, and outside of it."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        if before:
            self.layer = layer
        self.block = Bias(nothing)
        self.block.values = layer
        self.again = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.again(x).tanh()).sum(1)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("before", [True, False])
def test_a_layer_that_is_used_inside_and_outside(before: bool):
    torch.manual_seed(0)
    model, x = Twice(before=before).double(), texts()
    found = Factored(model, losses_of)(x)
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-10)


def test_the_reason_holds_no_shape_of_the_examples():
    """How many rows go to each expert is private."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

        def forward(self, x: Tensor) -> Tensor:
            chosen, output = (x[:, 0] > 0).long(), x.new_zeros(len(x), 3)
            for index, expert in enumerate(self.experts):
                output = output.index_add(0, (at := torch.nonzero(chosen == index)[:, 0]), expert(x[at]))
            return output

    torch.manual_seed(0)
    engine = Factored(Routed().double(), losses_of)
    assert taken_by(engine, texts()[:, 0]) == "", "no remedy is known, so that no warning is of use"
    for use in engine.uses().values():
        assert "expert" in use.why
        assert not re.search(r"\d", re.sub(r"experts\.\d|dimension 0", "", use.why))


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_above_the_root_all_kinds_of_points_are_those_of_the_reference():
    torch.manual_seed(0)
    model, x = FunctionalTying().double(), torch.randint(0, 7, (6, 3))

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        penalty: Tensor = model.embedding.weight.square().sum()[None]  # type: ignore[union-attr]
        return losses_of(model, x) + repeated(penalty, len(x))

    engine, reference = Factored(model, losses), Vmap(model, losses)
    moved = reference(x)
    for one, other in (
        (engine(x), moved),
        (engine.moved(x, 0.1, exact=False), reference.moved(x, 0.1, exact=False)),
        (engine.moved(x, 0.1, exact=True), reference.moved(x, 0.1, exact=True)),
        (engine.at(x, moved, -0.5), reference.at(x, moved, -0.5)),
    ):
        for name, factor in other.items():
            assert_equal_to_loop(one[name], factor.dense(), 1e-10)
    assert engine.microbatch_size(x, 6) == 6
    with pytest.raises(pg.UnsupportedModuleError, match=r"inputs of layers.*precondition\.fixed"):
        engine.inputs(x)
