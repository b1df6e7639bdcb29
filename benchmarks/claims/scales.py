"""Checks of the paper on AdaDPS. What is measured on private gradients is NOT private."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.claims.shared import Check, Values, rank_correlation, scores, task_of, training
from privgrad.diagnostics import RawMoments
from privgrad.perturb.local_training import ReportedUpdate
from privgrad_lab.papers.reproduce import prepared
from privgrad_lab.papers.toy_regression import Toy, losses, problem, start

SAMPLE = 2000  # private examples whose gradients are written out in factors
WORDS = 10_001
EPOCHS, BATCH = 4, 64  # of the trainings without privacy
USERS, COHORT, ROUNDS, EXAMPLES = 1000, 100, 100, 10


@cache
def toy_of(examples: int) -> Toy:
    return Toy(**(prepared("adadps/toy") | {"examples": examples}))


@cache
def gradient_factors(task: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs x and residuals r of examples, whose gradients are the outer products: at the first weights."""
    if task == "toy":
        x, y, _ = problem(toy_of(1000))
        w = start(toy_of(1000), seed).weight.detach()[0]
        return x.double(), (x @ w - y)[:, None].double()
    bags, tags = task_of("tags3").train.tensors
    chosen = torch.randperm(len(tags), generator=torch.Generator().manual_seed(seed))[:SAMPLE]
    return of_bags(bags[chosen], tags[chosen])


def of_bags(bags: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean word counts without padding, and the residuals of softmax regression at zero weights."""
    x = torch.zeros(len(bags), WORDS)
    x.scatter_add_(1, bags.long(), (bags > 0).float())
    shares = tags / tags.sum(1, keepdim=True)
    return x[:, 1:] / x.sum(1, keepdim=True).clamp(min=1), 1 / tags.shape[1] - shares


def scales_of(case: str, noise_std: float) -> Tensor:
    """Return the scales A (inputs, outputs), or (inputs, 1), with 1 as the largest."""
    if case.startswith("toy"):
        return problem(toy_of(1000))[2].double()[:, None] / 1.001
    kind = case.split(", ")[1]
    if kind.startswith("power"):
        bags = task_of("tags3").public_batch[0]
        counts = torch.bincount(bags.flatten().long(), minlength=WORDS)[1:] + 0.1
        return (counts / counts.max())[:, None] ** float(kind.split()[1])
    x, r = of_bags(*task_of("tags3").public_batch)
    root = (x.T @ r / len(x)).abs()
    scales = root + 1e-5 if case.endswith("eps 1e-5") else 1 + root / (10 * noise_std)
    return scales / scales.max()


def theory(case: str, _: float, seed: int) -> Values:
    """C5, C6: the terms of theorems 2 and 3, as multiples of those without scales.

    C is the median norm of the gradients g / A in the noise term, and the largest one in the bound, which assumes that
    nothing is clipped. The bound is the one at the best rate, up to a factor: the root of |A|_1 (E|g|^2 + noise).
    """
    x, r = gradient_factors(case.split(", ")[0], seed)
    plan = task_of("tags3").plan(0) if case.startswith("tags") else None
    sigma, batch = (plan.noise_multiplier, plan.expected_batch_size) if plan else (0.7, 8)
    scales = scales_of(case, 0.0 if plan is None else sigma * 0.03 / batch).to(x.dtype).expand(x.shape[1], r.shape[1])
    mean = x.T @ r / len(x)

    def terms(a: Tensor) -> Values:
        norms = ((x.square() @ a.reciprocal().square()) * r.square()).sum(1).sqrt()
        lengths = ((x.square() @ a.reciprocal()) * r.square()).sum(1)  # squared, in the norm of 1 / A
        signal = (mean.square() / a).sum()
        total = float(a.double().sum())
        noise = (sigma / batch) ** 2 * total
        own = float(signal + lengths.mean() / batch)
        return {
            "median norm": float(norms.median()),
            "noise": float(norms.median()) ** 2 * noise,
            "signal": float(signal),
            "bound": (total * (own + float(norms.max()) ** 2 * noise)) ** 0.5,
        }

    plain, scaled = terms(torch.ones_like(scales)), terms(scales)
    ratio = {key: scaled[key] / plain[key] for key in plain}
    return {
        "mean of A": float(scales.double().mean()),
        "median norm of g / A": ratio["median norm"],
        "noise at one C": float(scales.double().mean()),
        "noise at one clipped share": ratio["noise"],
        "signal": ratio["signal"],
        "signal / noise": ratio["signal"] / ratio["noise"],
        "bound": ratio["bound"],
    }


@cache
def second_moments(seed: int) -> dict[str, Tensor]:
    """Return v after 100 steps on the tags, of a random 100,000 coordinates: clean, released and public."""
    task, seen, public = task_of("tags3"), RawMoments(betas=(0.9, 0.9)), dict[str, Tensor]()
    stops = training(task, "DP-GDM", 0.25, seed, at=range(81, 101), observe=[seen.observe], max_grad_norm=0.03)
    for stop in stops:
        (parameter,) = stop.model.parameters()
        (gradient,) = torch.autograd.grad(task.loss_fn(stop.model, task.public_batch).mean(), [parameter])
        old = public.get("v", torch.zeros_like(gradient))
        public["v"] = 0.9 * old + 0.1 * gradient.square()
        if stop.step == 100:
            break
    ((name, clean),) = seen.raw_exp_avg_sq.items()
    noise = seen.noise_var[name]
    held = clean[1:].flatten() > 0  # the first row is the padding
    chosen = held.nonzero()[:, 0][torch.randperm(int(held.sum()), generator=torch.Generator().manual_seed(seed))]
    released = seen.exp_avg_sq[name][1:].flatten()[chosen[:100_000]].double()
    return {
        "clean": clean[1:].flatten()[chosen[:100_000]].double(),
        "released": released,
        "public": public["v"][1:].flatten()[chosen[:100_000]].double(),
        "noise": torch.as_tensor(noise),
    }


def order(case: str, _: float, seed: int) -> Values:
    """C9: the rank correlation of a second moment with that of the clipped mean before its noise."""
    found = second_moments(seed)
    return {
        "rank correlation with clean v": rank_correlation(found[case], found["clean"]),
        "median v / Phi": float(found[case].median() / found["noise"]),
        "median clean v / Phi": float(found["clean"].median() / found["noise"]),
    }


def rates(case: str, rate: float, seed: int) -> Values:
    """C23: SGD, Adam and AdaS without privacy on tweets, by the rate. AdaS divides by word frequencies."""
    task = task_of("tweets")
    model, rows = task.model(seed), task.train.tensors
    kind: Any = torch.optim.Adam if case == "Adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=rate)
    weight = dict(model.named_parameters())["weight"]
    counts = torch.zeros(len(weight)).scatter_add_(0, rows[0][:, 0].flatten().long(), rows[0][:, 1].flatten().float())
    scales = (counts / counts.max()).clamp(min=1e-4)[:, None] if case == "AdaS" else torch.ones(1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(rows[1]), generator=generator).split(BATCH):
            optimizer.zero_grad()
            task.loss_fn(model, tuple(row[chosen] for row in rows)).mean().backward()
            assert weight.grad is not None
            weight.grad.div_(scales)
            optimizer.step()
    return scores(task, model)


def placement(case: str, step: float, seed: int) -> Values:
    """C28: users train a linear model on their own examples; scales divide each local gradient, or the update."""
    place, rate = case.split(", local rate ")
    item = toy_of(USERS * EXAMPLES)
    x, y, scales = problem(item)
    model = start(item, seed)
    plan = pg.PrivacyPlan.for_users(
        num_users=USERS,
        expected_cohort_size=COHORT,
        rounds=ROUNDS,
        max_update_norm=0.01,
        delta=1e-3,
        noise_multiplier=1.0,
        seed=seed,
    )
    private_grad = pg.PrivateGradient(model, losses, plan, perturb=ReportedUpdate())
    optimizer = pg.optim.SGD(model.named_parameters(), noise_step=step)
    x_UM, y_UM, local = x.view(USERS, EXAMPLES, -1), y.view(USERS, EXAMPLES), scales if place == "local" else 1.0
    for cohort in plan.batches(TensorDataset(torch.arange(USERS))):
        users = cohort.examples[0]
        w_U = model.weight.detach().expand(len(users), -1).clone()
        for part in torch.arange(EXAMPLES).split(2):
            own = x_UM[users][:, part]
            residual = (own @ w_U[:, :, None])[..., 0] - y_UM[users][:, part]
            w_U -= float(rate) * (residual[:, None] @ own)[:, 0] / len(part) / local
        update = model.weight.detach() - w_U
        update = update / scales if place == "server" else update
        optimizer.step(grad=private_grad(pg.Batch({"weight": update[:, None]}, len(users), cohort.sampling)))
    return {"training loss": float(losses(model, (x, y)).mean()), "largest weight": float(model.weight.abs().max())}


TERMS = (
    "toy, frequencies",
    "tags, power 0.1",
    "tags, power 0.25",
    "tags, power 0.5",
    "tags, power 1",
    "tags, public, noise_eps 10",
    "tags, public, eps 1e-5",
)
PLACED = tuple(f"{place}, local rate {rate}" for place in ("none", "local", "server") for rate in ("0.0003", "0.003"))
CHECKS = {
    "theory": Check("C5, C6", theory, TERMS),
    "order": Check("C9", order, ("released", "public")),
    "rates": Check(
        "C23", rates, ("SGD", "Adam", "AdaS"), (0.01, 0.1, 1.0, 3.0, 10.0, 100.0, 1000.0), best="validation loss"
    ),
    "placement": Check("C28", placement, PLACED, (0.002, 0.006, 0.02, 0.06), best="training loss"),
}
