"""Every method of the library as a game, with a tiny model and worst-case canaries and other examples."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad import optim, precondition
from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Release
from privgrad.audit.games import Audit, Game, directions, distinguish, one_run
from privgrad.clip import rules
from privgrad.errors import expected, require_choice, require_in, require_integer, require_positive
from privgrad.gradient.transform import Scales
from privgrad.noise.banded import Banded
from privgrad.perturb import points as perturb
from privgrad.perturb.local_training import LocalUpdate
from privgrad.plan import PrivacyPlan
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.loading import batches

Mechanism = Literal["step", "training"]
_CANARIES = 256
_COMPANY = 15  # people besides the canary, with truncated batches
_RATE, _STEPS = 0.5, 4  # of a "training"
_ONE_RUN = ("factored", "AdamBC")  # methods that are also audited by one run of a training
_ONE_RUN_CANARIES = 1000
_PAID_STEPS = 10**9  # one private_grad makes many trainings; the claim is about each of them alone
_MADE_UP = "public: made up"
_LR = 1e-3  # weights stay near 0, so that no gradient changes its sign


@dataclass(frozen=True)
class Method:
    """One method of the library, as it is audited."""

    # Its name in optim.OPTIMIZERS. Of "SGD" the released gradients are observed, else the parameters after the steps.
    optimizer: str = "SGD"
    private_grad: Callable[[nn.Module], dict[str, Any]] = field(default=lambda model: {})  # arguments by model
    layers: int = 1  # parallel linear layers, which share each example's gradient
    group_size: int = 1  # of the plan
    noise_on_grid: bool = False  # of the plan
    canaries: int = _CANARIES  # in one run
    users: bool = False  # whether a row of the data is a user with two examples
    bands: int = 1  # of the noise; 1 is independent noise
    is_truncated: bool = False  # batches are truncated to their expected size: one person pushes others out

    @property
    def is_shared(self) -> bool:
        """Whether the only canary shares its coordinate with all others."""
        return self.group_size > 1 or self.is_truncated


class _Sum(nn.ModuleList):
    """Linear layers, initially zero, whose outputs are added."""

    def __init__(self, layers: int, features: int) -> None:
        super().__init__(nn.Linear(features, 1, bias=False) for _ in range(layers))
        self.begin()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x)[:, 0] for layer in self]).sum(0)

    @torch.no_grad()
    def begin(self) -> None:
        for parameter in self.parameters():
            parameter.zero_()


def _losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square()


def _public(model: nn.Module) -> PublicGradient:
    inputs = torch.ones(2, cast("nn.Linear", next(iter(model.children()))).in_features)
    return PublicGradient(model, _losses, (inputs, torch.ones(2)), source=_MADE_UP)


def _scaled(model: nn.Module) -> dict[str, Any]:
    scales = {name: torch.linspace(0.5, 2.0, p.numel()).view_as(p) for name, p in model.named_parameters()}
    return {"precondition": precondition.fixed(Scales(scales, provenance="common knowledge", source="made up"))}


def _by(rule: Callable[..., precondition.Preconditioner], **options: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"precondition": rule(_public(model), **options)}


def _with(**arguments: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: dict(arguments)


METHODS: Mapping[str, Method] = {
    "factored": Method(),
    "vmap": Method(private_grad=_with(engine="vmap")),
    "microbatches of 50": Method(private_grad=_with(microbatch_size=50)),
    "Automatic": Method(private_grad=_with(clip=rules.Automatic())),
    "PerLayer": Method(private_grad=_with(clip=rules.PerLayer({"0": 1.0, "1": 2.0})), layers=2),
    "BAM sam": Method(private_grad=_with(perturb=perturb.BAM(0.05))),
    "BAM exact": Method(private_grad=_with(perturb=perturb.BAM(0.05, "exact"))),
    "BAM sam, vmap": Method(private_grad=_with(perturb=perturb.BAM(0.05), engine="vmap")),
    "BAM exact, vmap": Method(private_grad=_with(perturb=perturb.BAM(0.05, "exact"), engine="vmap")),
    "SAT": Method(private_grad=_with(perturb=perturb.SAT(0.05))),
    "fixed scales": Method(private_grad=_scaled),
    "public_rmsprop": Method(private_grad=_by(precondition.public_rmsprop)),
    "public_adam": Method(private_grad=_by(precondition.public_adam, keep=0.9)),
    "public_adagrad": Method(private_grad=_by(precondition.public_adagrad)),
    "noise on a grid": Method(noise_on_grid=True),
    "users": Method(private_grad=_with(perturb=LocalUpdate(0.5, batch_size=1)), users=True),
    "groups of 2": Method(group_size=2, canaries=1),
    "Banded": Method(bands=4),
    "truncated batches": Method(is_truncated=True, canaries=1),
    "AdaDPS, BAM, PerLayer, microbatches": Method(
        private_grad=lambda model: {
            "precondition": precondition.public_adam(_public(model)),
            "perturb": perturb.BAM(0.05),
            "clip": rules.PerLayer({"0": 1.0, "1": 2.0}),
            "microbatch_size": 50,
        },
        layers=2,
    ),
} | {name: Method(name) for name in optim.OPTIMIZERS if name != "SGD"}  # also an optimizer that is added later


def method_game(
    name: str, mechanism: Mechanism, *, epsilon: float, delta: float = 1e-5, canaries: int | None = None
) -> Game:
    """Return the game of one of METHODS, under a plan whose noise is calibrated for epsilon.

    The model is linear and starts at 0. Each canary has a coordinate of its own, which it shares with one example that
    pulls the other way by half of C. So the two cases lie on both sides of zero, where optimizers that use little more
    than the sign distinguish them. A canary's gradient is thousands of times C. With groups the only canary turns the
    mean of the group around, from -C to C.

    With noise of b bands, b steps stand in place of each step, and each person is drawn in one of them. The attack
    knows the group of each canary, and undoes the recursion of the noise. With truncated batches, the only canary
    pushes out people who pull the other way by C, and the rate of "step" is 1/2 too.

    Args:
        name: of METHODS.
        mechanism: "step" is one step of rate 1; "training" is 4 steps of rate 1/2, always from the same weights.
        epsilon: > 0: the epsilon that the plan claims.
        delta: in (0, 1).
        canaries: number of canaries; None is the method's number. A method with groups or truncation always has 1.
    Returns:
        A Game. Every release draws new noise, and new batches, from the system's entropy.
    Raises:
        PrivacyError: no method has this name, or a number is out of its range.
    """
    require_choice("audit", "method", name, tuple(METHODS))
    method = METHODS[name]
    if not method.is_shared and canaries is not None:
        method = replace(method, canaries=canaries)
    rate, steps = (1.0, 1) if mechanism == "step" else (_RATE, _STEPS)
    claimed = Release(1.0, rate, count=steps)
    goal: dict[str, Any] = {"target_epsilon": epsilon, "delta": delta}
    if method.is_truncated:
        claimed = truncated = Release(1.0, _RATE, "truncated", steps, round(_RATE * (_COMPANY + 1)), _COMPANY + 1)
        sigma = accounting.calibrate(lambda sigma: [replace(truncated, noise_multiplier=sigma)], **goal)
    else:
        sigma = accounting.calibrate_noise_multiplier(**goal, sample_rate=rate, steps=steps)
    claimed = replace(claimed, noise_multiplier=sigma)
    return Game(
        f"{name}, {mechanism}",
        _mechanism(method, claimed),
        _data(method, rate),
        _directions(replace(method, optimizer="SGD", noise_on_grid=False)),
        accounting.epsilon([claimed], delta=delta),
        delta,
        None if method.is_truncated else claimed,
    )


def rows(
    methods: Sequence[str] | None = None,
    epsilons: Sequence[float] = (1.0, 3.0, 8.0),
    *,
    delta: float = 1e-5,
    trials: int = 60_000,
    confidence: float = 0.95,
) -> tuple[int, Iterator[Audit]]:
    """Audit methods at several epsilons: one step, one training, and for some methods also a training by one run.

    Args:
        methods: names of METHODS; None is all.
        epsilons: each > 0: the claims of the plans.
        delta: in (0, 1).
        trials: number of guesses about one step at epsilon 1. A larger epsilon separates the two cases better and needs
            fewer: trials / epsilon**0.5. A training gets trials / 2. Where a run has one canary, so that each trial
            costs a run, they are trials / epsilon**1.5 and trials / 15.
        confidence: probability that all bounds of all rows hold together, in (0, 1). The rows of one run share half of
            1 - confidence evenly, and the other rows share the other half.
    Returns:
        The number of rows, and an iterator over the rows. Each row is audited when the iterator reaches it.
    Raises:
        PrivacyError: a name is unknown, or a number is out of its range.
    """
    require_in("audit.rows", "confidence", confidence, "(0, 1)")
    require_integer("audit.rows", "trials", trials, 1)
    for epsilon in epsilons:
        require_positive("audit.rows", "epsilon", epsilon, "1, 3 and 8 are usual")
    chosen = list(METHODS if methods is None else methods)
    for name in chosen:
        require_choice("audit", "method", name, tuple(METHODS))
    single = [name for name in chosen if name in _ONE_RUN]
    left = (1 - confidence) / 2
    each, each_single = left / (2 * len(chosen) * len(epsilons)), left / max(1, len(single) * len(epsilons))

    def audits() -> Iterator[Audit]:
        for epsilon in epsilons:
            for name in chosen:
                shares: dict[Mechanism, float] = {"step": epsilon**-0.5, "training": 0.5}
                if METHODS[name].canaries == 1:
                    shares = {"step": epsilon**-1.5, "training": 1 / 15}
                for mechanism, share in shares.items():
                    game = method_game(name, mechanism, epsilon=epsilon, delta=delta)
                    yield distinguish(game, trials=max(80, round(trials * share)), confidence=1 - each)
                if name in single:
                    game = method_game(name, "training", epsilon=epsilon, delta=delta, canaries=_ONE_RUN_CANARIES)
                    yield one_run(replace(game, name=f"{name}, one training"), confidence=1 - each_single)

    return (2 * len(chosen) + len(single)) * len(epsilons), audits()


def one_step(private_grad: PrivateGradient) -> Callable[[Any], Tensor]:
    """Return a `Game.release`: the first step of a PrivateGradient on a data set, with new noise at every call.

    Args:
        private_grad: without a research seed. Its plan has to pay for as many steps as there will be calls, but the
            audited claim is that of one step. The model keeps its weights.
    Raises:
        PrivacyError: the plan has a research seed, so every call would repeat the same noise.
    Privacy:
        Each release is charged to the private_grad's ledger.
    """
    if private_grad.plan.seed is not None:
        raise expected("one_step", "plan.seed", "to be None", private_grad.plan.seed)
    beginning = private_grad.state_dict()

    def release(data: Any) -> Tensor:
        private_grad.load_state_dict(beginning)
        return flat(private_grad(next(private_grad.plan.batches(data))))

    return release


def flat(values: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors as one vector of float64."""
    return torch.cat([value.detach().flatten().double() for value in values.values()])


@functools.cache
def _directions(method: Method) -> Tensor:
    """Return `Game.directions` of a method, from its mechanism before the noise."""
    if method.is_truncated:
        return torch.ones(1, 1, dtype=torch.float64)  # from -C of the others to C
    if method.bands > 1:
        return torch.eye(method.canaries, dtype=torch.float64)  # the mechanism releases a score for each canary
    # Not a plan without noise: scales that are measured by the noise would differ.
    return directions(_mechanism(method, Release(1.0, 1.0), before_noise=True), _data(method, 1.0), method.canaries)


def _company(method: Method, rate: float) -> int:
    if method.is_truncated:
        return _COMPANY
    return method.canaries if method.group_size == 1 else round(method.group_size / rate)


def _data(method: Method, rate: float) -> Callable[[Tensor], TensorDataset]:
    """Return `Game.data` of a method: a function from the canaries that are in to the data set."""
    coordinates = torch.eye(method.canaries)
    others, pull, push = coordinates, 0.25 / method.layers**0.5, 1e3
    if method.is_shared:
        others, pull, push = torch.ones(_company(method, rate), 1), 1e4, 1e8
    pull = 2 * pull if method.users else pull  # local training moves the weight to the target, C / 2

    def data(included: Tensor) -> TensorDataset:
        canaries = coordinates[included]
        targets = torch.cat([torch.full((len(others),), pull), torch.full((len(canaries),), -push)])
        inputs = torch.cat([others, canaries])
        if method.users:
            each = torch.full((len(inputs),), 2)
            return TensorDataset(inputs[:, None].expand(-1, 2, -1), targets[:, None].expand(-1, 2), each)
        return TensorDataset(inputs, targets)

    return data


def _mechanism(method: Method, claimed: Release, *, before_noise: bool = False) -> Callable[[TensorDataset], Tensor]:
    """Return a function from a data set to a released vector, or to what one step releases before the noise."""
    model, count = _Sum(method.layers, method.canaries), _company(method, claimed.sample_rate)
    bands, steps = method.bands, claimed.count * method.bands
    plan = PrivacyPlan(
        sample_rate=claimed.sample_rate / bands,
        steps=_PAID_STEPS,
        expected_batch_size=claimed.max_batch_size or round(count * claimed.sample_rate / bands),
        correlation=Banded(bands).for_steps(steps) if bands > 1 else None,
        noise_multiplier=claimed.noise_multiplier,
        max_grad_norm=1.0,
        num_examples=count + method.is_truncated,  # with the canary
        sampling="truncated" if method.is_truncated else "poisson",
        max_batch_size=claimed.max_batch_size,
        group_size=method.group_size,
        noise_on_grid=method.noise_on_grid,
        privacy_unit="user" if method.users else "example",
    )
    private_grad = PrivateGradient(model, _losses, plan, side_information=_MADE_UP, **method.private_grad(model))
    beginning = private_grad.state_dict()
    if "perturb" in beginning and "direction" in beginning["perturb"]:
        # One step of SAT differs from one of SGD only after an earlier release.
        beginning["perturb"]["direction"] = {name: torch.ones_like(p) for name, p in model.named_parameters()}

    kind: Callable[..., optim.PrivateOptimizer] = optim.OPTIMIZERS[method.optimizer]
    raw: list[Tensor] = []
    if before_noise:
        private_grad.register_raw_observer(lambda seen: raw.append(flat(seen.raw_mean)))

    def release(data: TensorDataset) -> Tensor:
        model.begin()
        private_grad.load_state_dict(beginning)
        # The further arguments that the constructor may take. With a density of 1, the weight of each canary moves.
        further = {"horizon": steps, "public": _public(model), "density": 1.0}
        taken: Any = {name: further[name] for name in inspect.signature(kind.__init__).parameters if name in further}
        optimizer = kind(model.named_parameters(), lr=_LR, **taken)
        released: list[Tensor] = []
        sampler = plan.sampler(data)
        for batch in islice(batches(sampler), steps):
            gradient = private_grad(batch)
            released.append(flat(gradient))
            optimizer.step(grad=gradient)
        if before_noise:
            return raw.pop()
        if plan.correlation is not None:
            canaries = data.tensors[0][count:].argmax(1)
            groups = torch.randint(bands, (method.canaries,))  # of those that are out
            groups[canaries] = torch.from_numpy(sampler.groups[count:].astype("int64"))
            return _scores_in_groups(torch.stack(released), plan.correlation, groups)
        if method.optimizer == "SGD":
            return torch.stack(released).sum(0)
        return -flat(dict(model.named_parameters()))

    return release


def _scores_in_groups(released: Tensor, correlation: Banded, groups: Tensor) -> Tensor:
    """Return the score of each coordinate for who knows its group, shape (P,), given releases of shape (T, P)."""
    steps, bands = len(released), correlation.bands
    factor = torch.zeros(steps, steps, dtype=torch.float64)
    for back, coefficient in enumerate(correlation.chosen):
        factor += coefficient * torch.diag(torch.ones(steps - back, dtype=torch.float64), -back)
    # y = S + sigma F^-1 z becomes F S + sigma z by F. With S = 1 at the steps g, g + b, ... and 0 at all others, the
    # sum of F^T F y over these steps is the optimal score.
    scores = factor.T @ factor @ released
    by_group = torch.stack([scores[group::bands].sum(0) for group in range(bands)])
    return by_group.gather(0, groups[None])[0]
