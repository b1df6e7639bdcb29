"""Every refusal of a model or loss names what to do; here that is done, and a step equals a loop over examples."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_attacks import ShufflesInTraining, SortedByLength
from test_factored import Prompted, TimeFirst
from test_one_by_one import Checkpointed
from test_rules import losses_of
from test_state import Overwrites
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import gradients
from privgrad.gradient.reference import Vmap

pytestmark = [
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),
    pytest.mark.filterwarnings("ignore:the forward pass changed"),
    pytest.mark.filterwarnings("ignore:Lazy modules"),
    pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning"),
]
SIZE = 6
BAM, EXACT = pg.perturb.BAM(0.1), pg.perturb.BAM(0.1, "exact")
Losses = Callable[[Any, Any], Tensor]


def vectors(*shape: int) -> Tensor:
    return torch.randn(SIZE, *(shape or (5,)), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A model that is refused, and what the message says to do.

    Attributes:
        make: the model.
        said: a pattern of the message, with the remedy.
        remedies: other arguments of `Case` or of PrivateGradient each, with which a step is right.
        x: the examples.
        losses: (model, x) -> losses.
        options: of PrivateGradient.
    """

    make: Callable[[], nn.Module]
    said: str
    remedies: list[dict[str, Any]]
    x: Tensor = field(default_factory=vectors)
    losses: Losses = losses_of
    options: dict[str, Any] = field(default_factory=dict[str, Any])


class With(nn.Module):
    """A forward around some parts, as m(parts, x)."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def between(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 4), layer(), nn.Linear(4, 3))


def normed() -> nn.Module:
    """With trained scales of each channel, (B, 2, 5)."""
    return nn.Sequential(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(10, 3))


def untracked() -> nn.Module:
    return nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(10, 3))


def initialized() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model(torch.zeros(1, 5, dtype=torch.float64))
    return model


def phases(*, real: bool) -> nn.Module:
    values = torch.randn(5, 2, dtype=torch.float64)
    phase = nn.Parameter(values if real else torch.view_as_complex(values))

    def call(model: Any, x: Tensor) -> Tensor:
        return x * torch.view_as_complex(model.phase).abs() if real else x * model.phase.abs()

    return With(call, phase=phase)


def frozen() -> nn.Module:
    return nn.Linear(5, 3).requires_grad_(False)


def orphaned(*, freeze: bool = False, use: bool = False) -> nn.Module:
    model = With(lambda m, x: m.used(x) + (m.orphan.sum() if use else 0.0), used=nn.Linear(5, 3))
    model.orphan = nn.Parameter(torch.ones(2), requires_grad=not freeze)
    return model


def counting(*, counted: bool) -> nn.Module:
    def call(model: Any, x: Tensor) -> Tensor:
        if counted:
            model.seen += x.detach().sum()
        return model.inner(x)

    model = With(call, inner=nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(1))
    return model


def writing(*, written: bool) -> nn.Module:
    def call(model: Any, x: Tensor) -> Tensor:
        if written:
            with torch.no_grad():
                model.code.add_(x.mean())
        return model.inner(x)

    return With(call, inner=nn.Linear(5, 3), code=nn.Parameter(torch.zeros(3), requires_grad=False))


class PowerIteration(nn.Module):
    """A spectral norm as people write it, with the vector in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.register_buffer("u", nn.functional.normalize(torch.randn(3), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        u, weight = self.get_buffer("u"), self.inner.weight
        v = nn.functional.normalize(weight.detach().T @ u, dim=0)
        if self.training:
            u.copy_(nn.functional.normalize(weight.detach() @ v, dim=0))
        return nn.functional.linear(x, weight / (u.clone() @ weight @ v), self.inner.bias)


def spectral(*, old: bool = False) -> nn.Module:
    norm: Any = nn.utils.spectral_norm if old else parametrizations.spectral_norm
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), norm(nn.Linear(4, 3)))


def overwriting(*, copied: bool) -> nn.Module:
    def call(model: Any, x: Tensor) -> Tensor:
        x = x.clone()
        y = model.inner(x)
        if copied:
            x = x + 1
        else:
            x += 1
        return y + x.sum(1, keepdim=True)

    inner = nn.Linear(5, 3)
    inner.weight.requires_grad_(False)  # what autograd itself would refuse otherwise
    return With(call, inner=inner)


def recurrent(*, packed: bool = False, plain: bool = False) -> nn.Module:
    def call(model: Any, x: Tensor) -> Tensor:
        if packed:
            given: Any = pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
            return model.rnn(given)[1][-1]
        if plain:  # one sequence at a time, without a dimension of examples
            return torch.stack([model.rnn(row)[1][-1] for row in x])
        return model.rnn(x)[1][-1]

    return With(call, rnn=nn.GRU(4, 3, num_layers=2, batch_first=True))


def attending(*, plain: bool = False) -> nn.Module:
    def call(model: Any, x: Tensor) -> Tensor:
        if plain:
            return torch.stack([model.inner(row, row, row)[0] for row in x])
        return model.inner(x, x, x, need_weights=False)[0]

    return With(call, inner=nn.MultiheadAttention(4, 2, batch_first=True))


def bags(*, rows: bool) -> nn.Module:
    def call(model: Any, ids: Tensor) -> Tensor:
        return model.head((model.table(ids).sum(1) if rows else model.table(ids)).tanh())

    table = nn.Embedding(6, 4) if rows else nn.EmbeddingBag(6, 4, mode="sum")
    return With(call, table=table, head=nn.Linear(4, 3))


VMAP: dict[str, Any] = {"options": {"engine": "vmap"}}
IDS = torch.randint(0, 6, (SIZE, 4), generator=torch.Generator().manual_seed(2))
CASES: dict[str, Case] = {
    "batch norm": Case(
        between(lambda: nn.BatchNorm1d(4)),
        "GroupNorm or LayerNorm.*eval",
        [
            {"make": between(lambda: nn.GroupNorm(2, 4))},
            {"make": between(lambda: nn.LayerNorm(4))},
            {"make": between(lambda: nn.BatchNorm1d(4).eval())},
        ],
    ),
    "statistics of an instance norm": Case(normed, "track_running_stats=False", [{"make": untracked}], x=vectors(2, 5)),
    "max_norm": Case(
        lambda: nn.Embedding(6, 3, max_norm=1.0), "max_norm=None", [{"make": lambda: nn.Embedding(6, 3)}], x=IDS
    ),
    "lazy": Case(
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)), "one public example", [{"make": initialized}]
    ),
    "complex": Case(
        lambda: phases(real=False),
        "view_as_real",
        [{"make": lambda: phases(real=True)}, VMAP | {"make": lambda: phases(real=True)}],
    ),
    "nothing trained": Case(frozen, r"requires_grad_\(True\)", [{"make": lambda: frozen().requires_grad_(True)}]),
    "a mean": Case(
        lambda: nn.Linear(5, 3),
        "one loss per example",
        [{"losses": losses_of}],
        losses=lambda m, x: losses_of(m, x).mean(),
    ),
    "detached": Case(
        lambda: nn.Linear(5, 3),
        "without no_grad",
        [{"losses": losses_of}],
        losses=lambda m, x: losses_of(m, x).detach(),
    ),
    "unused": Case(
        orphaned,
        "freeze_unused, or use them in the loss",
        [{"make": lambda: orphaned(freeze=True)}, {"make": lambda: orphaned(use=True)}],
    ),
    "centered": Case(
        lambda: nn.Linear(5, 3),
        "no statistics, ranks or means over the batch",
        [{"losses": losses_of}],
        losses=lambda m, x: losses_of(m, x - x.mean(0)),
    ),
    "divided": Case(
        lambda: nn.Linear(5, 3),
        "number of examples",
        [{"losses": losses_of}],
        losses=lambda m, x: losses_of(m, x) / len(x),
    ),
    "rows that change places": Case(
        SortedByLength,
        "use engine='vmap'; or keep .* in one order in every layer",
        [VMAP],
        x=vectors(3).sort(0, descending=True)[0],
    ),
    "shuffled in training": Case(
        ShufflesInTraining,
        "use engine=.vmap.; or keep examples in dimension 0",
        [VMAP, {"make": lambda: ShufflesInTraining().eval()}],
        x=vectors(3),
    ),
    "buffers": Case(
        lambda: counting(counted=True), "do not write to buffers", [{"make": lambda: counting(counted=False)}]
    ),
    "buffers, by vmap": Case(
        lambda: counting(counted=True),
        "do not write to",
        [{"make": lambda: counting(counted=False)}],
        options={"engine": "vmap"},
    ),
    "parameters": Case(
        lambda: writing(written=True), "do not write to parameters", [{"make": lambda: writing(written=False)}]
    ),
    "parameters, by vmap": Case(
        lambda: writing(written=True),
        "do not write to",
        [{"make": lambda: writing(written=False)}],
        options={"engine": "vmap"},
    ),
    "a power iteration of one's own": Case(
        PowerIteration,
        r"\.eval\(\).*torch's spectral_norm",
        [{"make": lambda: PowerIteration().eval()}, {"make": spectral}, {"make": lambda: spectral(old=True)}],
    ),
    "a power iteration of one's own, by vmap": Case(
        PowerIteration,
        r"\.eval\(\).*torch's spectral_norm",
        [{"make": lambda: PowerIteration().eval()}, {"make": spectral}, {"make": lambda: spectral(old=True)}],
        options={"engine": "vmap"},
    ),
    "changed in place": Case(
        lambda: overwriting(copied=False), "work on a copy", [{"make": lambda: overwriting(copied=True)}]
    ),
    "changed in place, needed by autograd": Case(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Overwrites(copied=False), nn.Linear(4, 2)),
        "work on a copy",
        [{"make": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Overwrites(copied=True), nn.Linear(4, 2))}],
    ),
    "packed": Case(
        lambda: recurrent(packed=True),
        "of '[^']+' to be a tensor.*pad sequences.*vmap",
        [{"make": recurrent}, VMAP],
        x=vectors(5, 4),
    ),
    "without examples, recurrent": Case(
        lambda: recurrent(plain=True), "give a batch, of size 1", [{"make": recurrent}, VMAP], x=vectors(5, 4)
    ),
    "without examples, attention": Case(
        lambda: attending(plain=True), "give a batch of padded sequences", [{"make": attending}, VMAP], x=vectors(5, 4)
    ),
    "no second derivative": Case(
        lambda: bags(rows=False),
        r"use BAM\(mode='sam'\), or other layers \(for instance Embedding and a sum",
        [{"options": {"perturb": BAM}}, {"make": lambda: bags(rows=True)}],
        x=IDS,
        options={"perturb": EXACT},
    ),
    "no second derivative, by vmap": Case(
        lambda: bags(rows=False),
        r"use BAM\(mode='sam'\)",
        [{"options": {"perturb": BAM, "engine": "vmap"}}],
        x=IDS,
        options={"perturb": EXACT, "engine": "vmap"},
    ),
    "re-entrant": Case(lambda: Checkpointed(reentrant=True), "use_reentrant=False", [{"make": Checkpointed}]),
    "re-entrant, by vmap": Case(
        lambda: Checkpointed(reentrant=True),
        "use_reentrant=False",
        [{"make": Checkpointed}],
        options={"engine": "vmap"},
    ),
}

# Refused by the fast engine, and so taken whole, with a warning.
TAKEN: dict[str, Case] = {
    "time first": Case(TimeFirst, "computes 'inner' for each.*examples in dimension 0", [VMAP], x=vectors(3, 4)),
    "repeated in a list": Case(
        lambda: Prompted(lambda x, size: torch.cat([x] * size)),
        "the whole model.*the uses of parameter 'prompt.weight'",
        [VMAP],
        x=vectors(3, 4),
    ),
}


def released(case: Case) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = case.make()
    if not any(isinstance(p, nn.UninitializedParameter) or p.is_complex() for p in model.parameters()):
        model = model.double()
    numbers: dict[str, Any] = {"sample_rate": 1.0, "expected_batch_size": SIZE, "num_examples": SIZE}
    plan = make_plan(**numbers, noise_multiplier=0.0, max_grad_norm=1.0, seed=0)
    private_grad = pg.PrivateGradient(model, lambda m, batch: case.losses(m, batch[0]), plan, **case.options)
    (batch,) = [next(iter(plan.batches(TensorDataset(case.x))))]
    return dict(private_grad(batch))


def summed(case: Case) -> dict[str, Tensor]:
    """By autograd on one example at a time."""
    torch.manual_seed(0)
    model = case.make().double()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(name.endswith("_u") for name, _ in model.named_buffers()):  # a step advances a spectral norm once
        case.losses(model, case.x)
        model.eval()
    perturb = case.options.get("perturb")
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for index in range(SIZE):
        one = case.x[index : index + 1]

        def gradient(one: Tensor = one) -> list[Tensor]:
            losses = case.losses(model, one).sum()
            grads = torch.autograd.grad(losses, list(parameters.values()), create_graph=perturb is EXACT)
            return list(grads)

        grads = gradient()
        if perturb is not None:
            along = [g.detach() * 0.1 / norm_of(grads) for g in grads]
            if perturb is EXACT:
                phi = torch.stack([(g * v).sum() for g, v in zip(grads, along, strict=True)]).sum()
                more = torch.autograd.grad(phi, list(parameters.values()), allow_unused=True, materialize_grads=True)
                grads = [g.detach() + m for g, m in zip(grads, more, strict=True)]
            else:
                for p, v in zip(parameters.values(), along, strict=True):
                    p.data += v
                grads = gradient()
                for p, v in zip(parameters.values(), along, strict=True):
                    p.data -= v
        for name, g in zip(total, grads, strict=True):
            total[name] += g.detach() * min(1.0, 1.0 / float(norm_of(grads))) / SIZE
    return total


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([g.detach().norm() for g in grads]).norm()


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_does_what_its_message_says(name: str):
    case = CASES[name]
    with pytest.raises(pg.PrivacyError, match=case.said):
        released(case)
    for remedy in case.remedies:
        assert_right(replace(case, **remedy))


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_fast_engine_refuses_is_taken_whole(name: str):
    case = TAKEN[name]
    options: dict[str, Any]
    for options in ({}, {"perturb": BAM}):
        with pytest.warns(UserWarning, match=case.said):
            assert_right(replace(case, options=options))
    for remedy in case.remedies:  # no warning
        assert_right(replace(case, **remedy))


def assert_right(case: Case) -> None:
    found = released(case)
    wanted = summed(case)
    assert found.keys() == wanted.keys()
    for parameter, value in wanted.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-7, atol=1e-9, msg=parameter)


class SometimesDeep(nn.Module):
    """Takes its second layer for long sequences only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        deep = self.second(h)
        return (deep if x.shape[1] > 3 else h + 0.0 * deep.detach()).sum(1)


def test_a_parameter_cut_off_after_the_first_batch():
    torch.manual_seed(0)
    model, engine = SometimesDeep().double(), Factored(SometimesDeep().double(), losses_of)
    for _ in range(2):  # the second call is audited
        engine(vectors(5, 4))
    with pytest.raises(pg.UnsupportedModuleError, match=r"second.*on the first batch.*use engine='vmap'"):
        engine(vectors(2, 4))
    for x in (vectors(5, 4), vectors(2, 4)):
        found = Vmap(model, losses_of)(x)
        for index in range(SIZE):
            for name, value in gradients(model, losses_of, x[index : index + 1]).items():
                torch.testing.assert_close(found[name].dense()[index], value, rtol=1e-9, atol=1e-11)
