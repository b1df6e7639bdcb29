"""An audit of a training of yours: one run with canaries in or out by coins, and guesses by its released gradients.

Shape suffixes: B rows of a chunk, K canaries, P all entries of the parameters.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from privgrad.audit import bounds
from privgrad.audit.games import Audit
from privgrad.clip.clipping import Clipping, ClippingAccumulator, without_gradient
from privgrad.errors import expected, require_callable, require_in, require_integer
from privgrad.gradient.contribution import Contribution, Engine, MeanGradient
from privgrad.gradient.factor import Dense, Factor, Factors, examples_per_block
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import forget_training
from privgrad.parts import Parts
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.loading import Data, default_collated
from privgrad.types import LossFunction, NoisyGradient, count_examples, map_examples, part_of

Train = Callable[[PrivateGradient, Dataset[Any]], object]
_LENGTH = 1e3  # of a canary's gradient before clipping, in C: so that a lack of clipping shows
_FREE = 10_000  # weights without a canary, by which the noise is measured
_SIGNIFICANT = 6.0  # deviations by which noise of two steps is held to be related


def canaries(
    private_grad: PrivateGradient,
    train: Train,
    train_set: Data,
    added: int | Data,
    *,
    guessed: float = 0.15,
    confidence: float = 0.95,
    ledger: Ledger | str | os.PathLike[str] | None = None,
) -> Audit:
    """Audit one training: add canaries to its data, each by its own fair coin, and guess the coins from its releases.

    The sampler draws canaries as it draws all rows, and they are clipped and get noise with them. The attack knows
    everything else: weights, and the clipped sum of all other rows, which it subtracts from each released gradient.
    The score of a canary is the log-likelihood ratio of the inner products of what is left with its clipped gradient.
    The surest scores are guesses: "in" above 0, "out" below.

    Args:
        private_grad: of the training, not yet used. It is not called; a new one with the same parts is.
        train: (private_grad, train_set) -> anything: trains by the two that it is given. For example, `lambda grad,
            rows: pg.fit(grad, optimizer, rows)`. Each item of these rows is a pair (item of yours, number), which
            torch's default_collate takes if it takes yours.
        train_set: the private examples.
        added: the number of gradient canaries, at most that of the trained weights: 1,000, say. Each is a gradient
            along one weight, chosen at random, far longer than C. Or a data set of canary examples, whose items are
            like those of `train_set`; each step computes and holds the gradients of all of them.
        guessed: share of the canaries with a guess, in (0, 1].
        confidence: in (0, 1).
        ledger: of the audited training, or its path; None records in memory.
    Returns:
        An Audit with the bound "one run", which assumes nothing about the training, and one by f-DP: "gaussian" at
        rate 1, else "accountant". Each holds with the confidence. They hold so together if the training is of the
        claimed form, because both follow from the number of correct guesses.
    Raises:
        PrivacyError: a number is out of its range, or the training does not suit canaries.
    Privacy:
        NOT private: it reads what no release shows. The model gets back the weights that it had before. A copy of the
        trained one must not be released: its ledger and its statement say so, and `save` refuses it.
    Reference:
        Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846); Mahloujifar, Melis, Chaudhuri 2025 (arXiv 2410.22235).
    """
    function, plan, began = "audit.canaries", private_grad.plan, time.perf_counter()
    own = cast("Sequence[Any]", added) if hasattr(added, "__len__") else None
    number = cast(int, added) if own is None else len(own)
    require_integer(function, "the number of canaries", number, 2)
    require_in(function, "guessed", guessed, "(0, 1]")
    require_in(function, "confidence", confidence, "(0, 1)")
    require_callable(function, "train", train, "give (private_grad, train_set) -> the training")
    weights = sum(p.numel() for p in private_grad.model.parameters() if p.requires_grad)
    unsuited = {
        "a plan without delta": plan.delta is None,
        "an infinite epsilon": not private_grad.ledger.plan_facts["noise_multiplier"] or plan.simulates is not None,
        "a research seed": plan.seed is not None,
        "noise with memory": plan.correlation is not None,
        "truncated batches": plan.sampling == "truncated",
        "groups of examples": plan.group_size > 1,
        "rates of classes": isinstance(train_set, ClassRates),
        "local training": not cast(Contribution, private_grad.parts.perturb).keeps_order,
        "a preconditioner": private_grad.precondition is not None,
        "several processes": private_grad.processes.count > 1,
        "a private_grad that was used": private_grad.ledger.releases > 0,
        f"{weights} weights for {number} canaries (at most one each)": own is None and weights < number,
    }
    if got := " and ".join(name for name, is_so in unsuited.items() if is_so):
        raise expected(function, "the training", "to suit canaries", got, "docs/audit.md says which do")
    assert plan.delta is not None
    is_in: np.ndarray = np.random.default_rng().random(number) < 0.5
    scored = _Canaries(private_grad.parts, plan, number, own)
    audited = private_grad.beside(perturb=scored, ledger=ledger)
    scored.max_grad_norm = lambda: audited.max_grad_norm
    before = copy.deepcopy(audited.model.state_dict())
    try:
        if audited.ledger.releases:
            raise expected(function, "ledger", "to be new", f"{audited.ledger.releases} releases")
        train(audited, _Among(train_set, own, np.flatnonzero(is_in).tolist()))
    finally:
        audited.ledger.close()
        audited.model.load_state_dict(before)
        forget_training(audited.model, audited.ledger)
    score_K = scored.scores
    if not audited.ledger.releases or not bool(torch.isfinite(score_K).all()):
        got = f"{audited.ledger.releases} releases, and scores up to {float(score_K.max())}"
        raise expected(function, "train", "to release finite gradients by the given private_grad", got)
    surest = score_K.abs().argsort(descending=True)[: max(1, round(guessed * number))].numpy()
    counts = number, len(surest), int((is_in == (score_K.numpy() > 0))[surest].sum())
    if plan.sample_rate == 1:
        kind, found = "gaussian", bounds.epsilon_of_one_gaussian_run(*counts, plan.delta, confidence)
    else:
        steps = replace(plan.release, count=plan.steps)
        kind, found = "accountant", bounds.epsilon_of_one_training_run(*counts, steps, plan.delta, confidence)
    return Audit(
        "training with canaries",
        plan.epsilon(),
        plan.delta,
        {"one run": bounds.epsilon_of_one_run(*counts, plan.delta, confidence), kind: found},
        confidence,
        counts[1],
        {"one run": list(counts), kind: list(counts)},
        time.perf_counter() - began,
    )


class _Among(Dataset[tuple[Any, int]]):
    """The rows of a training, with number -1, and after them the canaries that are in, with theirs."""

    def __init__(self, data: Data, own: Sequence[Any] | None, numbers: list[int]) -> None:
        self._data, self._own, self._numbers = cast("Sequence[Any]", data), own, numbers

    def __len__(self) -> int:
        return len(self._data) + len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index < len(self._data):
            return self._data[index], -1
        number = self._numbers[index - len(self._data)]
        # Of a gradient canary the item counts for nothing: its gradient does not come from an example.
        return self._data[0] if self._own is None else self._own[number], number


class _Canaries(Contribution):
    """Another contribution, with canaries among its rows, whose scores it adds up. Rows are pairs as in `_Among`.

    Without examples of its own, canary k is a gradient along the entry `coordinates[k]` of all trained parameters.
    """

    keeps_order = False

    def __init__(self, parts: Parts, plan: PrivacyPlan, number: int, own: Sequence[Any] | None) -> None:
        inner = self._inner = cast(Contribution, parts.perturb)
        self._clip, self._plan, self.canaries = cast(Clipping, parts.clip), plan, number
        self._examples = None if own is None else default_collated([(own[k], k) for k in range(number)])
        self.is_public, self.privacy_unit = inner.is_public, inner.privacy_unit
        self.max_grad_norm: Callable[[], float] = lambda: plan.max_grad_norm
        self.scores = torch.zeros(number, dtype=torch.float64)
        self._coordinates = torch.zeros(0, dtype=torch.int64)
        self._before: Tensor | None = None  # what was left of the last release
        self._signs = torch.from_numpy(np.random.default_rng().choice([-1.0, 1.0], number))

    def __repr__(self) -> str:
        return f"{self.canaries} canaries next to {self._inner!r}"

    def described(self, steps: int) -> str:
        return f"{self.canaries} canaries next to {self._inner.described(steps)}"

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        losses = self._inner.losses(loss_fn)
        return lambda model, examples: losses(model, examples[0])

    def at(
        self, step: int, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient
    ) -> AbstractContextManager[None]:
        if not len(self._coordinates):
            self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
            order = torch.from_numpy(np.random.default_rng().permutation(sum(self._sizes.values())))
            self._coordinates, self._free = order[: self.canaries], order[self.canaries :][:_FREE]
        self._parameters, self._bound, self._own = parameters, self.max_grad_norm(), list[Tensor]()
        self._others = dict[str, Tensor]()  # the clipped sum of all rows that are no canaries
        return self._inner.at(step, parameters, raw_mean)

    def microbatch_size(self, engine: Engine, examples: Any, usual_size: int) -> int:
        return self._inner.microbatch_size(engine, examples, usual_size)

    def chunks(
        self, engine: Engine, examples: Any, size: int, step: int, inverse_scales: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Factors]]:
        numbers: Tensor = examples[1]
        self._own = []
        others = ClippingAccumulator(
            like=self._parameters, clip=self._clip, max_grad_norm=self._bound, expected_size=self._plan.divisor
        )
        for count, chunk in self._inner.chunks(engine, part_of(examples, numbers < 0), size, step, inverse_scales):
            others.add(chunk or without_gradient(count, self._parameters))
            yield count, chunk
            del chunk
        self._others = others.result()[0].values
        if self._examples is None:
            drawn, size = numbers[numbers >= 0].cpu(), examples_per_block(sum(self._sizes.values()))
            for start in range(0, len(drawn), size):
                yield len(drawn[start : start + size]), self._along_coordinates(drawn[start : start + size])
            return
        yield from self._inner.chunks(engine, part_of(examples, numbers >= 0), size, step, inverse_scales)
        for start in range(0, self.canaries, size):
            part = part_of(self._examples, slice(start, start + size))
            part = map_examples(lambda leaf: leaf.to(numbers.device), part)
            self._own.append(
                self._clipped(self._inner.gradients(engine, part, step, inverse_scales), count_examples(part))
            )

    def _along_coordinates(self, numbers: Tensor) -> Factors:
        """Return the gradients of some canaries."""
        start, found, chosen = 0, dict[str, Factor](), self._coordinates[numbers]
        for name, size in self._sizes.items():
            mine = ((chosen >= start) & (chosen < start + size)).nonzero()[:, 0]
            if len(mine):
                grads_BP = torch.zeros(len(numbers), size)
                grads_BP[mine, chosen[mine] - start] = (self._signs[numbers[mine]] * _LENGTH * self._bound).float()
                found[name] = Dense(grads_BP.to(self._parameters[name]).view(-1, *self._parameters[name].shape))
            start += size
        return found

    def _clipped(self, grads: Factors, rows: int) -> Tensor:
        """Return clipped gradients in one vector for each row, shape (B, P), in C."""
        grads = grads or without_gradient(rows, self._parameters)
        norms = {
            name: grads[name].norms() if name in grads else parameter.new_zeros(rows)
            for name, parameter in self._parameters.items()
        }
        factors = self._clip.factors(norms, self._bound)
        parts = [
            factors[name].float()[:, None] * grads[name].dense().flatten(1).float()
            if name in grads
            else parameter.new_zeros(rows, parameter.numel()).float()
            for name, parameter in self._parameters.items()
        ]
        return torch.cat(parts, dim=1) / self._bound

    def require_filter(self, chosen: object) -> None:
        self._inner.require_filter(chosen)

    def released(self, gradient: NoisyGradient) -> None:
        """Add to each canary's score what this step's release says about it."""
        self._inner.released(gradient)
        scale, rate = self._plan.divisor / self._bound, self._plan.sample_rate
        variance = (cast(float, gradient.noise_std) * scale) ** 2
        left_P = torch.cat(
            [
                (value.double() * scale - self._others.get(name, 0.0) / self._bound).flatten()
                for name, value in gradient.items()
            ]
        )
        left_P, before_P = left_P.cpu(), self._before
        self._before = left_P
        if self._examples is None:
            if len(self._free) >= 100:  # noise that is not as stated is taken as it is, so that it shows
                if before_P is not None:  # noise of the step before is known
                    now, known = left_P[self._free], before_P[self._free]
                    share = float(now @ known / known.square().sum())
                    if abs(share) > _SIGNIFICANT / math.sqrt(len(self._free)):
                        left_P = left_P - share * before_P
                variance = max(1e-9, float(left_P[self._free].square().mean()))
            along_K, squared_K = left_P[self._coordinates] * self._signs / variance, 1 / variance
        elif self._own:
            along_K, squared_K = _apart(torch.cat(self._own).double().cpu(), left_P, variance, rate / 2)
        else:  # no row was drawn
            return
        log_ratio_K = along_K.cpu() - squared_K / 2  # of a normal number with its canary to one without
        if rate < 1:
            log_ratio_K = torch.logaddexp(torch.tensor(math.log1p(-rate)), math.log(rate) + log_ratio_K)
        self.scores += log_ratio_K


def _apart(gradients: Tensor, left: Tensor, variance: float, mean: float) -> tuple[Tensor, Tensor]:
    """Return the inner products of each gradient with a sum and with itself, by the inverse covariance of the rest.

    The rest is the noise and the other gradients, of which each is in the sum with the probability `mean`. Shapes:
    gradients (K, P), left (P,).
    """
    spread, gram_KK = mean * (1 - mean), gradients @ gradients.mT
    # G (v G^T G + s)^-1 = (v G G^T + s)^-1 G; then Sherman and Morrison's formula takes g itself out of the covariance.
    noise_KK = variance * torch.eye(len(gram_KK), dtype=gram_KK.dtype, device=gram_KK.device)
    inverse_KK = cast(Tensor, torch.linalg.inv(spread * gram_KK + noise_KK))
    along_K = inverse_KK @ (gradients @ left - mean * gram_KK.sum(1))
    squared_K = (inverse_KK * gram_KK).sum(1)
    own_K = 1 - spread * squared_K
    return (along_K + mean * squared_K) / own_K, squared_K / own_K
