"""The command that attacks methods and bounds their epsilon from below, and its games on the data of an experiment.

A game guesses from one step whether a canary was among the examples.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import torch
import typer
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad import audit as auditing
from privgrad.accounting import accountant as accounting
from privgrad.audit import Game, directions, one_step
from privgrad.audit.methods import flat
from privgrad.cli.console import STDERR, AsJson, command_line, print_json, print_table, stoppable, to_json
from privgrad.data import DataSet
from privgrad.errors import expected, require_choice
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.training import fit
from privgrad_lab import runner
from privgrad_lab.build import autocast
from privgrad_lab.featuring import own
from privgrad_lab.load_spec import load_spec
from privgrad_lab.spec import MethodTable, Spec


def audit(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="Experiment: audit one step of its methods, on its data.")
    ] = None,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="Claimed epsilon; may be repeated. Default: 1, 3, 8; with a SPEC, from its noise."),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Audit only this method; may be repeated.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Audit trainings of SPEC, with canaries.")] = False,
    canaries: Annotated[int, typer.Option(help="With --training: the number of gradient canaries.")] = 1_000,
    trials: Annotated[int, typer.Option(help="Number of guesses about one step.")] = 60_000,
    confidence: Annotated[float, typer.Option(help="Probability that all bounds hold together.")] = 0.95,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for audits.jsonl and audits.md.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the library's methods, and bound epsilon from below.

    Exit code 1 if a bound exceeds its claim. NOT private with a SPEC: the output is computed from its data, and the
    models of --training must not be released.
    """
    about = f"Claims at one delta; all bounds hold together with probability {confidence:g}."
    if training:
        if spec is None or epsilon:
            got = "no SPEC" if spec is None else "--epsilon"
            raise expected("privgrad audit", "--training", "to come with a SPEC, whose epsilon is audited", got)
        count, found = trainings_of(load_spec(spec), method, canaries, confidence, out)
        about = f"NOT private: computed from the data of {spec.name}. Do not release the trained models. {about}"
    elif spec is None:
        count, found = auditing.rows(method, epsilon or (1.0, 3.0, 8.0), trials=trials, confidence=confidence)
    else:
        games = games_of(load_spec(spec), method, epsilon)
        count, each = len(games), 1 - (1 - confidence) / len(games)
        found = (auditing.distinguish(game, trials=trials, confidence=each) for game in games)
        about = f"NOT private: computed from the data of {spec.name}. Each claim is for one step at rate 1. {about}"
    about += "" if training else " A sixth of the runs chooses thresholds."
    done = _audited(count, found, out, about)
    passed = all(one.passed for one in done)
    if as_json:
        print_json({"passed": passed, "confidence": confidence, "audits": [one.as_record() for one in done]})
    else:
        print_table([one.as_row() for one in done], title="Lower bounds on epsilon", caption=about)
    raise typer.Exit(0 if passed else 1)


def _audited(count: int, found: Iterator[auditing.Audit], out: Path | None, about: str) -> list[auditing.Audit]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run = {"command": command_line(), "date": f"{date.today()}", "machine": f"{os.cpu_count()} cores"}
    head = f"{run['date']}, `{run['command']}`. {about}\n\n"
    done: list[auditing.Audit] = []
    kept = "finished audits are in the folder of --out, if it was given"
    with stoppable(lambda: kept), Progress(console=STDERR) as bar:
        task = bar.add_task("", total=count)
        for one in found:
            done.append(one)
            if out is not None:
                with (out / "audits.jsonl").open("w" if len(done) == 1 else "a") as file:
                    file.write(to_json(one.as_record() | run) + "\n")
                cells = [one.as_row(), *(each.as_row().values() for each in done)]
                titles, *rows = (f"| {' | '.join(row)} |" for row in cells)
                rule = "|---" * len(cells[0]) + "|"
                (out / "audits.md").write_text(head + "\n".join([titles, rule, *rows]) + "\n")
            bar.update(task, advance=1, description=one.name)
    return done


def games_of(spec: Spec, methods: Sequence[str] | None, epsilons: Sequence[float] | None) -> list[Game]:
    """Return a game of one step for each private method of a spec, or for the named ones.

    The step draws all of a few training examples (sample rate 1), and a canary made from one of them. There is a game
    for each of the epsilons that one step shall cost; None keeps the spec's own noise. The results are NOT private.
    """
    if spec.privacy.simulate > 1:
        raise expected("privgrad audit", "privacy.simulate", "to be 1", spec.privacy.simulate, "leave it out")
    chosen, data = _chosen(spec, methods), runner.checked_data(spec)
    inputs, labels, *users = data.train.tensors
    is_numbers = inputs.is_floating_point() and data.vocabulary is None
    has_classes = labels.ndim == 1 and not labels.is_floating_point()
    if users or not (is_numbers and has_classes):
        remedy = "audit the methods without a specification, or write a privgrad.audit.Game"
        raise expected("privgrad audit", "data", "to be numbers or images with one class each", data.name, remedy)
    return [_game(spec, method, data, epsilon) for method in chosen for epsilon in epsilons or [None]]


def trainings_of(
    spec: Spec, methods: Sequence[str] | None, canaries: int, confidence: float, out: Path | None
) -> tuple[int, Iterator[auditing.Audit]]:
    """Return how many private methods, or named ones, a spec has, and an audit of one training of each, by canaries."""
    chosen, data = _chosen(spec, methods), runner.checked_data(spec)
    each = 1 - (1 - confidence) / len(chosen)

    def training(method: MethodTable) -> auditing.Audit:
        made, own_data = _prepared(spec, method, data)
        options: Any = {"scheduler": spec.schedule_of(method), "progress": False}
        ledger = None if out is None else out / f"ledger-{quote(method.name, safe=' ')}.jsonl"

        def train(private_grad: PrivateGradient, rows: Any) -> None:
            with autocast(spec):
                fit(private_grad, made.optimizer, rows, **options)

        found = auditing.canaries(made.private_grad, train, own_data.train, canaries, confidence=each, ledger=ledger)
        return replace(found, name=f"{method.name}, one training")

    return len(chosen), map(training, chosen)


def _prepared(spec: Spec, method: MethodTable, data: DataSet) -> tuple[runner.Prepared, DataSet]:
    """Return what a method trains by, and on. Options that are tuned have their first value."""
    spec, data = own(spec, method, data)
    return runner.prepare(spec, runner.Run(method, spec.grid(method)[0], None, "final"), data), data


def _chosen(spec: Spec, methods: Sequence[str] | None) -> list[MethodTable]:
    known = {method.name: method for method in spec.methods}
    for name in methods or []:
        require_choice("privgrad audit", "method", name, list(known))
    if not (chosen := [known[name] for name in methods or known if not known[name].non_private]):
        raise expected("privgrad audit", "methods", "to include a private one", ", ".join(methods or known))
    return chosen


def _game(spec: Spec, method: MethodTable, data: DataSet, epsilon: float | None) -> Game:
    (prepared, data), delta = _prepared(spec, method, data), spec.privacy.delta
    sigma, count = prepared.plan.noise_multiplier, 8 * prepared.plan.group_size
    if epsilon is not None:
        sigma = accounting.calibrate_noise_multiplier(target_epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1)
    plan = PrivacyPlan(
        sample_rate=1.0,
        steps=10**9,
        expected_batch_size=count,
        noise_multiplier=sigma,
        max_grad_norm=prepared.plan.max_grad_norm,
        num_examples=count,
        delta=delta,
        group_size=prepared.plan.group_size,
        noise_on_grid=prepared.plan.noise_on_grid,
    )

    def step(*, before_noise: bool = False) -> Callable[[Any], Tensor]:
        private_grad = prepared.private_grad.beside(plan=plan)
        if math.isinf(private_grad.epsilon(steps=1)):
            raise expected("privgrad audit", method.name, "to have a finite epsilon", math.inf, "choose --method")
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
    release = accounting.Release(sigma, 1.0)
    claim = accounting.epsilon([release], delta=delta)
    found = directions(noiseless, made, 1)
    return Game(f"{method.name}, step", step(), made, found, claim, delta, release)
