"""One case: a model, its options, and batches that differ by one example.

A case is determined by its seed and number. Everything goes through PrivateGradient with a sampling rate of 1: in a
share of cases by the public API alone, otherwise by the part that clips, at a step without an audit.
"""

import random
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad import precondition
from privgrad.clip.clipping import Clipping, Flat
from privgrad.clip.norm_statistics import NORMS
from privgrad.clip.rules import Automatic, PerLayer
from privgrad.engine import factored
from privgrad.engine.factored import Factored
from privgrad.engine.factors.mapped import with_mapped_inputs
from privgrad.gradient.contribution import Contribution
from privgrad.gradient.functional import evaluating, seeded, trainable
from privgrad.perturb.points import BAM, SAT
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.private_gradient import RawStep
from tests.reference.norm_slots import poured
from tests.sensitivity.examples import LOSSES, Examples, doubled, draw_examples, loss_of, tame, without
from tests.sensitivity.grammar import Draw, Drawn, draw_model

LIMIT = 1.005  # times C; promise.md states this room for rounding
_PROFILES = {"plain": 22, "canceling": 30, "extreme": 20, "padded": 10, "aligned": 12, "crowd": 6}
_PRECONDITIONERS = {
    "plain": {"none": 60, "fixed": 30, "public_adam": 10},
    "extreme": {"none": 45, "fixed": 50, "public_adam": 5},
    "crowd": {"none": 80, "fixed": 15, "public_adam": 5},
}
# First parts that a profile aims at; others come too.
_FAVORED = {
    "canceling": ("Linear", "Linear time first", "RNN", "weight_norm", "computed weight", "constant parametrization"),
    "crowd": ("Linear time first", "Linear time first", "RNN", "GRU", "LSTM", "weight_norm"),
    "padded": ("owner of a table with padding",),
    "aligned": ("weight_norm", "old weight_norm", "orthogonal", "constant parametrization"),
    "extreme": ("Linear", "Linear", "Linear", "Conv1D of transformers", "SparseLinear"),
}
_INPUTS = 0.25  # share of cases without scales that map their inputs
# Calls of an engine after which no audit is due for long.
_LATER = 2**40 + 1


@dataclass(frozen=True)
class Options:
    """How gradients are taken and clipped."""

    engine: str
    contribution: str
    radius: float
    clip: str
    max_grad_norm: float
    preconditioner: str
    unit: tuple[str, float]
    microbatch: int | None
    memory_mb: float | None
    expected: int
    loss: str
    public: bool
    dtype: torch.dtype
    bins: int | None


@dataclass
class Case:
    """A drawn case; `describe` puts it into words."""

    seed: int
    number: int
    drawn: Drawn
    options: Options
    examples: Examples
    places: list[int]
    profile: str
    used: list[str]
    clip: Clipping
    perturb: Contribution | None
    direction: dict[str, Tensor]
    scales: dict[str, Tensor]
    public_examples: Examples
    first: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return what a reader needs to know of the case, as plain values."""
        options = vars(self.options) | {"dtype": str(self.options.dtype), "clip": repr(self.clip)}
        sizes = [float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0 for x in self.examples]
        return {
            "case": f"--seed {self.seed} --only {self.number}" + (f" --first {self.first!r}" if self.first else ""),
            "model": re.sub(r"\s+", " ", repr(self.drawn.model)),
            "parts": self.used,
            "profile": self.profile,
            "examples": len(self.examples[0]),
            "shapes": [tuple(x.shape[1:]) for x in self.examples],
            "largest entries": [f"{size:.3g}" for size in sizes],
            "scales": {n: f"{float(a.min()):.2g} to {float(a.max()):.2g}" for n, a in self.scales.items()},
            **options,
        }


@dataclass
class Pair:
    """What came of one pair of batches.

    Attributes:
        place: of the example that one of the two lacks.
        change: L2 norm of the change of the clipped sum, over C; None after a refusal or an error.
        refusal: class of the reason, if the library refused.
        error: any other exception.
        verdict: "held", "refused", "jump" or "failed".
        note: how the verdict was reached.
    """

    place: int
    change: float | None = None
    refusal: str | None = None
    error: str | None = None
    verdict: str = "held"
    note: str = ""


@dataclass
class Outcome:
    """A case and its pairs."""

    case: Case
    pairs: list[Pair]

    def failures(self) -> list[Pair]:
        """Return the pairs that break the guarantee or end in an error."""
        return [pair for pair in self.pairs if pair.verdict == "failed"]


def draw_case(seed: int, number: int, asked: str | None = None, *, double: bool = False) -> Case:
    """Draw the case of a seed and a number; with `double`, the same one in float64.

    Args:
        seed, number: determine the case.
        asked: name of the first part of the model; None leaves it to chance.
        double: convert model and data, both drawn in float32 before.
    """
    rng = random.Random(f"sensitivity {seed} {number}")
    torch.manual_seed(rng.getrandbits(60))
    draw, profile = Draw(rng), _weighted(rng, _PROFILES)
    if profile == "crowd" and asked is not None:
        profile = "canceling"
    crowd = draw.small = profile == "crowd"
    favored, alone = _FAVORED.get(profile, ()), profile in _FAVORED and draw.chance(0.9 if crowd else 0.7)
    first = rng.choice(favored) if asked is None and favored and draw.chance(0.6) else asked
    drawn = draw_model(draw, first, alone=alone)
    count = 2 ** rng.choice((10, 11, 12, 12, 12, 13)) if crowd else rng.choice((2, 3, 5, 8, 9, 16, 17, 24, 33, 64))
    sizes = random.Random(f"sizes {seed} {number}")  # of its own, so that older cases stay as they were drawn
    units = random.Random(f"units {seed} {number}")
    microbatch = None if crowd else rng.choice((None, None, None, 1, 2, 4, 8, 16, count, count - 1))
    if crowd and sizes.random() < 0.4:
        microbatch = count  # one pass, as an ordinary batch of a plan that expects as many
    if microbatch is not None and microbatch < count // 16 and draw.chance(0.9):
        microbatch = None
    preconditioner = _weighted(rng, _PRECONDITIONERS.get(profile, _PRECONDITIONERS["plain"]))
    if preconditioner == "none" and random.Random(f"inputs {seed} {number}").random() < _INPUTS:
        preconditioner = "inputs"  # by a generator of its own, so that older cases stay as they were drawn
    scales = _scales(draw, drawn.model, profile) if preconditioner == "fixed" else {}
    smallest = min((float(scale.min()) for scale in scales.values() if scale.numel()), default=1.0)
    bound = draw.power(-9, 6) if draw.chance(0.5) else 1.0
    if profile == "extreme" and draw.chance(0.8):
        bound = 1e-9 if smallest > 1e-9 else rng.choice((1.0, 1e-3, 1e-9))
    examples, special = draw_examples(draw, drawn, count, profile, microbatch, bound * smallest)
    if profile in ("plain", "padded", "aligned"):
        bound = _bound(draw, examples)
    losses = {"canceling": ("linear", "linear", "squared error"), "crowd": (*["linear"] * 4, "squared error")}
    loss = rng.choice(losses.get(profile, tuple(LOSSES)))
    if profile == "extreme":
        loss = rng.choice((loss, "linear", "linear", "linear times c"))
    contribution = "plain" if crowd else _weighted(rng, {"plain": 60, "BAM sam": 15, "BAM exact": 10, "SAT": 15})
    options = Options(
        engine="vmap" if not crowd and draw.chance(0.15) else "factored",
        contribution=contribution,
        radius=rng.choice((0.001, 0.02, 0.3)),
        clip=_weighted(rng, {"Flat": 60, "PerLayer": 20, "Automatic": 0 if crowd else 20}),
        max_grad_norm=bound,
        preconditioner=preconditioner,
        unit=units.choice((("eps", 1e-5), ("noise_eps", 10.0), ("noise_eps", 10.0 ** units.uniform(-3, 3)))),
        microbatch=microbatch,
        # Pass sizes follow the expected size and the memory, so one example more may start a new pass.
        memory_mb=sizes.choice((None, None, None, *((1.0, 4.0) if crowd else (0.01, 0.1)))),
        expected=max(1, min(count - 1, sizes.choice((count, count, 9 * count // 10, 1 + count // 2)))),
        loss=loss,
        public=not crowd and draw.chance(0.12),
        dtype=torch.float64 if draw.chance(0.12) or double else torch.float32,
        # By a generator of its own, so that older cases stay as they were drawn.
        bins=random.Random(f"slots {seed} {number}").choice((None, None, 1, 2, 16, 64)),
    )
    places = sorted({special, 0, count - 1, rng.randrange(count)})
    case = Case(
        seed=seed,
        number=number,
        drawn=drawn,
        options=options,
        examples=examples,
        places=sorted(rng.sample(places, min(2, len(places)))),
        profile=profile,
        used=[*dict.fromkeys([*draw.used, profile, options.engine, contribution, options.clip, *_names(options)])],
        clip=_clip(draw, options.clip, drawn.model),
        perturb=_perturbation(contribution, options.radius),
        direction={name: torch.randn(p.shape) for name, p in trainable(drawn.model).items()},
        scales=scales,
        public_examples=tame(drawn, 4),
        first=asked,
    )
    if options.dtype == torch.float64:
        drawn.model.double()
        case.examples, case.public_examples = doubled(case.examples), doubled(case.public_examples)
    return case


def _names(options: Options) -> list[str]:
    """Return the preconditioner's name, and that of its unit if it has one."""
    return [options.preconditioner, *([options.unit[0]] if options.preconditioner == "public_adam" else [])]


def _weighted(rng: random.Random, weights: Mapping[str, int]) -> str:
    """Draw a name by the weights."""
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def _perturbation(contribution: str, radius: float) -> Contribution | None:
    """Return what moves the point at which gradients are taken."""
    if contribution == "SAT":
        return SAT(radius)
    if contribution == "plain":
        return None
    return BAM(radius, "exact") if contribution == "BAM exact" else BAM(radius, "sam")


def _bound(draw: Draw, examples: Examples) -> float:
    """Draw C: any, or near the size of the data's products over at most 1e6."""
    if draw.chance(0.3):
        return draw.power(-9, 6)
    if draw.chance(0.3):
        return 1.0
    size = float(torch.nan_to_num(examples[-2], 0.0, 0.0, 0.0).abs().median()) or 1.0
    if examples[0].is_floating_point():
        size *= float(torch.nan_to_num(examples[0], 0.0, 0.0, 0.0).abs().median()) or 1.0
    return min(1e6, max(1e-9, size / draw.power(-1, 6)))


def _clip(draw: Draw, kind: str, model: nn.Module) -> Clipping:
    """Draw a rule's options."""
    if kind == "Automatic":
        return Automatic(draw.rng.choice((0.01, 1e-8, 1.0)))
    if kind == "Flat":
        return Flat()
    prefixes = sorted({name.split(".")[0] for name in trainable(model)})
    return PerLayer({prefix: draw.power(-2, 2) for prefix in prefixes})


def _scales(draw: Draw, model: nn.Module, profile: str) -> dict[str, Tensor]:
    """Draw scales A from 1e-12 to 1e12, mixed within tensors, for some of the parameters."""
    found: dict[str, Tensor] = {}
    ways = {"crowd": ("mild",), "extreme": ("mixed", "smallest", "smallest")}
    way = draw.rng.choice(ways.get(profile, ("mixed", "constant", "mild", "smallest")))
    for name, parameter in trainable(model).items():
        if draw.chance(0.1):
            continue
        if way == "mixed":
            found[name] = 10.0 ** (torch.rand(parameter.shape) * 24 - 12)
        elif way == "mild":
            found[name] = torch.randn(parameter.shape).exp()
        else:
            found[name] = torch.full(parameter.shape, 1e-12 if way == "smallest" else draw.power(-12, 12))
    return found


class Oracle:
    """The library's clipped sums for one case.

    Args:
        case: what to compute.
    """

    def __init__(self, case: Case) -> None:
        options = case.options
        self.case = case
        self.plan = pg.PrivacyPlan(
            sample_rate=1.0,
            steps=1 << 20,
            expected_batch_size=options.expected,
            noise_multiplier=1.0,
            max_grad_norm=options.max_grad_norm,
            num_examples=options.expected,
        )
        self.model, self.loss = case.drawn.model, loss_of(options.loss)
        transform: Any = None
        if options.preconditioner == "fixed":
            transform = precondition.fixed(pg.Scales(case.scales, provenance="common knowledge", source="drawn"))
        elif options.preconditioner == "public_adam":
            gradient = PublicGradient(self.model, self.loss, case.public_examples, source="drawn")
            unit: dict[str, Any] = dict([options.unit])
            transform = precondition.public_adam(gradient, keep=0.9, **unit)
        elif options.preconditioner == "inputs":
            power, ridge = ((0.35, 0.1), (0.5, 0.1), (1.0, 1e-4), (1.0, 1e-8))[case.number % 4]
            maps: dict[str, Any] = {"power": power, "ridge": ridge, "wide": 4096 if case.number % 3 else 3}
            transform = precondition.inputs(case.public_examples, source="drawn", forward=self.loss, **maps)
        self.private_grad = pg.PrivateGradient(
            self.model,
            self.loss,
            self.plan,
            perturb=case.perturb,
            precondition=transform,
            clip=case.clip,
            engine="vmap" if options.engine == "vmap" else "factored",
            microbatch_size=options.microbatch,
            memory_mb=options.memory_mb,
            norm_bins=options.bins,
        )
        self.seen: list[Mapping[str, Tensor]] = []
        self.private_grad.register_raw_observer(lambda step: self.seen.append(self._with_slots(step)))
        self.start = self.private_grad.state_dict()
        if options.contribution == "SAT":
            self.start["perturb"]["direction"] = case.direction
        self.private_grad.load_state_dict(self.start)
        if not options.public:
            self._audit()

    def _audit(self) -> None:
        """Audit on ordinary examples, as a first step may, and leave the steps between two audits to the case."""
        engine = self.private_grad._engine
        if isinstance(engine, Factored):
            perturb, first = self.private_grad._contribution, self.case.public_examples
            # In evaluation mode, which is the same without dropout, audits have less to do.
            with evaluating(self.model), perturb.at(0, trainable(self.model), dict):
                perturb.gradients(engine, first, 0, {})
            engine._schedule.calls = _LATER

    def _with_slots(self, step: RawStep) -> Mapping[str, Tensor]:
        """Return the mean gradient of a step, and its slots if there are any."""
        if step.raw_shares is None:
            return step.raw_mean
        height = self.plan.max_grad_norm / len(step.raw_shares) ** 0.5
        return {**step.raw_mean, NORMS: step.raw_shares * height}

    def batch(self, examples: Examples) -> pg.Batch:
        """Draw the batch that holds all of the examples."""
        return next(iter(self.plan.batches(TensorDataset(*examples))))

    def sum(self, examples: Examples) -> Tensor:
        """Return the clipped sum as one vector, in float64."""
        batch = self.batch(examples)
        if self.case.options.public:
            self.private_grad.load_state_dict(self.start)
            self.private_grad(batch)
            values = {name: value.double() * self.plan.divisor for name, value in self.seen.pop().items()}
        else:
            self.private_grad.load_state_dict(self.start)
            values = dict(self.private_grad._clipped_sum(batch, 0, bytes(40), trainable(self.model))[0].values)
        return torch.cat([value.double().flatten() for value in values.values()])

    def contributions(self, examples: Examples) -> Tensor:
        """Return each example's contribution, shape (B, parameters), written out one by one and clipped in float64."""
        private_grad, parameters = self.private_grad, trainable(self.model)
        private_grad.load_state_dict(self.start)
        batch, rows = self.batch(examples), list[Tensor]()
        transform = private_grad._transform(batch, 0, 0, parameters)
        size = sum(p.numel() for p in parameters.values()) + (self.case.options.bins or 0)
        with seeded(0), private_grad._contribution.at(0, parameters, dict):
            accumulator = cast("Any", None)  # only compiled steps need it
            for _, unmapped in private_grad._chunks(batch, 0, transform.inverse_scales, accumulator):
                assert unmapped is not None
                chunk = with_mapped_inputs(unmapped, cast("Any", transform.input_maps))
                for index in range(next(iter(chunk.values())).examples):
                    own: dict[str, Tensor] = {}
                    for name, factor in chunk.items():
                        own[name] = factor[index : index + 1].dense()[0].double()
                        if name in transform.inverse_scales:
                            own[name] = own[name] * transform.inverse_scales[name].double()
                    norms = {name: value.norm()[None] for name, value in own.items()}
                    weights = private_grad._clip.factors(norms, self.plan.max_grad_norm)
                    finite = all(bool(norm.isfinite()) for norm in norms.values())
                    row = torch.cat(
                        [
                            (own[name] * weights[name]).flatten()
                            if finite and name in own
                            else p.new_zeros(p.numel(), dtype=torch.float64)
                            for name, p in parameters.items()
                        ]
                    )
                    bins, length = self.case.options.bins, min(float(row.norm()), self.plan.max_grad_norm)
                    slots = [] if bins is None else poured(length, self.plan.max_grad_norm, bins)
                    rows.append(torch.cat([row, torch.tensor(slots, dtype=torch.float64)]))
        return torch.stack(rows) if rows else torch.zeros(0, size, dtype=torch.float64)


def run_case(seed: int, number: int, first: str | None = None) -> Outcome:
    """Draw a case, compare its pairs, and judge each."""
    with quiet(), seeded(0):
        case = draw_case(seed, number, first)
        pairs = [Pair(place) for place in case.places]
        try:
            private_grad = Oracle(case)
            whole = private_grad.sum(case.examples)
        except pg.PrivacyError as refusal:
            for pair in pairs:
                pair.refusal, pair.verdict = reason_of(refusal), "refused"
            return Outcome(case, pairs)
        except Exception as error:  # nothing but a refusal is allowed
            pairs[0].error, pairs[0].verdict = f"{type(error).__name__}: {error}"[:300], "failed"
            return Outcome(case, pairs[:1])
        for pair in pairs:
            _compare(private_grad, whole, pair)
        return Outcome(case, pairs)


def _compare(private_grad: Oracle, whole: Tensor, pair: Pair) -> None:
    """Fill in what the pair shows."""
    case, bound = private_grad.case, private_grad.plan.max_grad_norm
    fewer = without(case.examples, pair.place)
    try:
        change = whole - private_grad.sum(fewer)
        pair.change = float(change.norm()) / bound
    except pg.PrivacyError as refusal:
        pair.refusal, pair.verdict = reason_of(refusal), "refused"
        return
    except Exception as error:  # nothing but a refusal is allowed
        pair.error, pair.verdict = f"{type(error).__name__}: {error}"[:300], "failed"
        return
    if pair.change <= LIMIT:
        return
    pair.verdict = "failed"
    others = without((private_grad.contributions(case.examples),), pair.place)[0]
    moved = (others - private_grad.contributions(fewer)).sum(0)
    left = float((change - moved).norm()) / bound
    pair.note = f"others moved by {float(moved.norm()) / bound:.4g} C, which leaves {left:.4g} C"
    if left > LIMIT or case.options.dtype == torch.float64:
        return
    try:
        # Gradients of such scales may differ from those of single examples by more than the check allows.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factored, "require_single", lambda *_: None)
            twin = Oracle(draw_case(case.seed, case.number, case.first, double=True))
            both = twin.sum(twin.case.examples), twin.sum(without(twin.case.examples, pair.place))
        exact = float((both[0] - both[1]).norm()) / bound
    except Exception as error:  # then float64 proves nothing
        pair.note += f"; in float64: {type(error).__name__}"
        return
    pair.note += f"; in float64 {exact:.4g} C"
    pair.verdict = "jump" if exact <= LIMIT else "failed"


def reason_of(refusal: Exception) -> str:
    """Return the class of a refusal's reason: its message without names, numbers and values."""
    text = re.sub(r"'[^']*'", "'...'", str(refusal))
    text = re.sub(r", got .*", "", text, flags=re.DOTALL)
    return f"{type(refusal).__name__}: {re.sub(r'[-+]?[0-9][0-9.e+-]*', 'N', text)}"[:160]


@contextmanager
def quiet():
    """Silence warnings: of slow operations, of older interfaces, of rows that vmap takes one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Tally:
    """Counts over many cases."""

    cases: int = 0
    pairs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    largest: float = 0.0
    parts: set[str] = field(default_factory=set[str])
    jumps: list[str] = field(default_factory=list[str])

    def add(self, outcome: Outcome) -> None:
        """Count a case."""
        self.cases += 1
        for pair in outcome.pairs:
            self.verdicts[pair.verdict] += 1
            if pair.refusal is not None:
                self.refusals[pair.refusal] += 1
            if pair.change is not None:
                self.pairs += 1
                self.parts.update(outcome.case.used)
                if pair.verdict == "held":
                    self.largest = max(self.largest, pair.change)
            if pair.verdict == "jump" and len(self.jumps) < 5:
                case = outcome.case
                self.jumps.append(
                    f"case {case.number}, {pair.change:.4g} C: {', '.join(case.used)}, {case.options.loss}; {pair.note}"
                )
