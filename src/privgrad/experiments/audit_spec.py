"""Audit games of an experiment: each guesses from one step whether a canary was among the examples.

`privgrad audit SPEC.toml` calls it. No privacy guarantee rests on this file: its games test one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad import accounting
from privgrad.accounting import Release
from privgrad.audit import Game, directions, one_step
from privgrad.audit.methods import flat
from privgrad.data import DataSet
from privgrad.errors import did_you_mean, expected
from privgrad.experiments.build import (
    make_data,
    make_model,
    preconditioner,
    public_gradient,
    require_model,
)
from privgrad.experiments.featuring import own
from privgrad.experiments.measures import losses_for
from privgrad.experiments.spec import MethodTable, Spec
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient


def games_of(spec: Spec, methods: Sequence[str] | None, epsilons: Sequence[float] | None) -> list[Game]:
    """Return a game of one step for each private method of a spec.

    The step draws all of a few training examples (sample rate 1), and a canary made from one of them. `privgrad audit`
    calls it.

    Args:
        spec: a classification of numbers or images.
        methods: names of methods; None takes all private ones.
        epsilons: the epsilons that one step shall cost, one game each; None keeps the spec's own noise.
    Raises:
        PrivacyError: a method is unknown or not private, the spec is a simulation, or the data do not allow a canary.
    Privacy:
        NOT private: the results of a game are computed from the spec's data.
    """
    if spec.privacy.simulate > 1:
        condition, remedy = "to be 1", "leave it out: a simulation claims no epsilon to audit"
        raise expected("privgrad audit", "privacy.simulate", condition, spec.privacy.simulate, remedy)
    known = {method.name: method for method in spec.methods}
    for name in methods or []:
        if name not in known:
            remedy = did_you_mean(name, list(known), "choose one of them")
            raise expected("privgrad audit", "method", f"to be one of {', '.join(known)}", repr(name), remedy)
    data = make_data(spec)
    for method in spec.methods:
        require_model(*own(spec, method, data))
    inputs, labels, *users = data.train.tensors
    if (
        users
        or not inputs.is_floating_point()
        or labels.is_floating_point()
        or labels.ndim > 1
        or data.vocabulary is not None
    ):
        got, remedy = data.name, "audit the methods without a specification, or write a privgrad.audit.Game"
        raise expected("privgrad audit", "data", "to be numbers or images with one class each", got, remedy)
    games = [
        _game(spec, known[name], data, epsilon)
        for name in methods or known
        if not known[name].non_private
        for epsilon in epsilons or [None]
    ]
    if not games:
        condition, got = "to include a private one", ", ".join(methods or known)
        raise expected("privgrad audit", "methods", condition, got, "audit a specification with a private method")
    return games


def _game(spec: Spec, method: MethodTable, data: DataSet, epsilon: float | None) -> Game:
    """Return the game of one method, at the cost `epsilon` or with the spec's own noise."""
    spec, data = own(spec, method, data)
    candidate, count, delta = spec.grid(method)[0], 8 * method.group_size, spec.privacy.delta
    method = method.with_own(candidate)
    sigma = spec.plan(None, method, candidate.max_grad_norm).noise_multiplier
    if epsilon is not None:
        sigma = accounting.calibrate_noise_multiplier(target_epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1)
    model = make_model(spec, data)
    public = public_gradient(method, model, data)

    def step(*, before_noise: bool = False) -> Callable[[Any], Tensor]:
        plan = PrivacyPlan(
            sample_rate=1.0,
            steps=10**9,
            expected_batch_size=count,
            noise_multiplier=sigma,
            max_grad_norm=candidate.max_grad_norm,
            num_examples=count,
            delta=delta,
            group_size=method.group_size,
            noise_on_grid=spec.privacy.noise_on_grid,
        )
        private_grad = PrivateGradient(
            model,
            losses_for(data, views=spec.run.augmentation_multiplicity, flip=spec.run.mirrored),
            plan,
            perturb=method.perturbation(candidate, spec.privacy.privacy_unit),
            precondition=preconditioner(method.precondition, public, model, data),
            engine=spec.run.engine,
            microbatch_size=spec.run.microbatch_size,
            memory_mb=spec.run.memory_mb,
            side_information=None if public is None else public.source,
        )
        if math.isinf(private_grad.epsilon(steps=1)):
            remedy = "name the other methods with --method"
            raise expected("privgrad audit", method.name, "to have a finite epsilon", math.inf, remedy)
        release, raw = one_step(private_grad), list[Tensor]()
        if not before_noise:
            return release
        # Not a plan without noise: scales that are measured by the noise would differ.
        private_grad.register_raw_observer(lambda seen: raw.append(flat(seen.raw_mean)))
        return lambda given: (release(given), raw.pop())[1]

    inputs, labels = (tensor[:count] for tensor in data.train.tensors)
    # The canary has scaled inputs and a wrong class; of three scales, take the one that moves the gradient most.
    strange = (labels[:1] + 1) % data.num_classes

    def with_canary(scale: float) -> Callable[[Tensor], TensorDataset]:
        canary = TensorDataset(torch.cat([inputs, -scale * inputs[:1]]), torch.cat([labels, strange]))
        return lambda included: canary if bool(included[0]) else TensorDataset(inputs, labels)

    noiseless, absent = step(before_noise=True), torch.zeros(1, dtype=torch.bool)
    makers = [with_canary(scale) for scale in (1.0, 10.0, 100.0)]
    made = max(makers, key=lambda maker: float((noiseless(maker(~absent)) - noiseless(maker(absent))).square().sum()))
    release = Release(sigma, 1.0)
    claim = accounting.epsilon([release], delta=delta)
    found = directions(noiseless, made, 1)
    return Game(f"{method.name}, step", step(), made, found, claim, delta, release)
