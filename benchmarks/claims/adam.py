"""Checks of the papers on DP-AdamBC and on heavy-tailed classes. Most are measured before the noise: NOT private."""

import json
from collections.abc import Iterator
from functools import cache
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.claims.shared import CLASS_STEPS, STEPS, Check, Stop, Values, last, scores, slope, task_of, training
from benchmarks.defaults import ROOT
from privgrad.data import MINILM, debian_sections, debian_texts, heavy_tail
from privgrad.diagnostics import RawGradientStats, RawMoments
from privgrad.features import FrozenText, Public, TfIdf

FLOOR = 0.041  # in variances of the noise: the gamma' that the paper tuned
SIZES = (128, 64, 32, 16, 8)  # examples per class of the small heavy tail
PLACES: dict[str, dict[str, Any]] = {
    "digits": {"noise_step": 0.025, "max_grad_norm": 0.3},
    "classes": {"noise_step": 0.007},
}


def flat(values: dict[str, Tensor], correction: float) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()]).double() / correction


def moments_of(seen: RawMoments, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return m and v without noise, m and v with noise, all corrected for the start, and Phi."""
    first, second = 1 - 0.9**steps, 1 - 0.999**steps
    (noise,) = set(seen.noise_var.values())
    clean = flat(seen.raw_exp_avg, first), flat(seen.raw_exp_avg_sq, second)
    return *clean, flat(seen.exp_avg, first), flat(seen.exp_avg_sq, second), float(noise) / second


def moments(case: str, _: float, seed: int) -> Values:
    """A5, A16, A17, A18: the moments along DP-Adam, and the steps that they give."""
    task, seen, place = task_of(case), RawMoments(), dict(PLACES[case])
    stop = last(training(task, "DP-Adam", place.pop("noise_step"), seed, observe=[seen.observe], **place))
    m, v, noisy_m, noisy_v, phi = moments_of(seen, stop.step)
    roots = {
        "clean": v.clamp(min=1e-30).sqrt(),
        "released": noisy_v.sqrt(),
        "debiased": (noisy_v - phi).clamp(min=FLOOR * phi).sqrt(),
    }
    found = {
        "mean of m, clean, in noise sds": float(m.mean()) / phi**0.5,
        "mean of m, released": float(noisy_m.mean()) / phi**0.5,
        "sd of m, clean": float(m.std()) / phi**0.5,
        "sd of m, released": float(noisy_m.std()) / phi**0.5,
        "median v / Phi, clean": float(v.median()) / phi,
        "median v / Phi, released": float(noisy_v.median()) / phi,
        "sd of v / Phi, released": float(noisy_v.std()) / phi,
        "correlation of v - Phi with clean v": float(torch.corrcoef(torch.stack([noisy_v - phi, v]))[0, 1]),
        "share of v below Phi": float((noisy_v < phi).double().mean()),
        "share on the floor": float((noisy_v - phi <= FLOOR * phi).double().mean()),
    }
    for kind, root in roots.items():
        steps = (m / root).abs()
        found[f"clean m: |step| < 0.1, {kind} v"] = float((steps < 0.1).double().mean())
    for kind, root in roots.items():
        steps = ((m if kind == "clean" else noisy_m) / root).abs()
        found[f"own m: |step| < 0.1, {kind} v"] = float((steps < 0.1).double().mean())
        found[f"own m: 0.5 < |step| < 2, {kind} v"] = float(((steps > 0.5) & (steps < 2)).double().mean())
        found[f"own m: |step| > 2, {kind} v"] = float((steps > 2).double().mean())
    clean = m / roots["clean"]
    for kind in ("released", "debiased"):
        found[f"own m: correlation of the step with clean Adam's, {kind} v"] = float(
            torch.corrcoef(torch.stack([noisy_m / roots[kind], clean]))[0, 1]
        )
    return found


def betas(case: str, step: float, seed: int) -> Values:
    """A22: accuracy, and its standard deviation over the last ten of twenty evaluations."""
    task = task_of("digits")
    stops = training(task, case, step, seed, at=range(10, 201, 10), max_grad_norm=0.3)
    curve: list[float] = []
    values: Values = {}
    for stop in stops:
        values = scores(task, stop.model)
        curve.append(values["test accuracy"])
    return values | {"volatility": stdev(curve[-10:])}


def correction(case: str, step: float, seed: int) -> Values:
    """A23: DP-Adam and DP-AdamBC on digits."""
    method, norm = case.split(", C = ")
    stop = last(training(task_of("digits"), method, step, seed, schedule="cosine", max_grad_norm=float(norm)))
    return scores(task_of("digits"), stop.model)


def by_size(stop: Stop) -> Values:
    """Return the loss on the small heavy tail, and the accuracy of its most frequent class and of its rarest ones."""
    found: Any = task_of("classes").measure(stop.model)
    groups = found["raw_groups"]
    return {
        "loss": found["loss"],
        "top class": groups[0]["accuracy"],
        "middle": groups[2]["accuracy"],
        "rarest": groups[-1]["accuracy"],
        "loss of rarest": groups[-1]["loss"],
    }


def stability(case: str, step: float, seed: int) -> Values:
    """B4, B15: how much the accuracy of the most frequent class varies over the last fifth of the steps."""
    stops = training(task_of("classes"), case, step, seed, at=range(1436, 1796, 36))
    curve = [by_size(stop) for stop in stops]
    spread = {f"sd of {name} over time": stdev(row[name] for row in curve) for name in ("top class", "middle", "loss")}
    return curve[-1] | spread


@cache
def tail_moments(floor: str, sigma: float, seed: int) -> tuple[RawMoments, int]:
    """Return the moments along a training of DP-AdamBC on the small heavy tail, and its number of steps."""
    seen = RawMoments()
    task, method = task_of("classes"), f"DP-AdamBC, floor {floor}"
    return seen, last(training(task, method, 0.007, seed, observe=[seen.observe], noise_multiplier=sigma)).step


def second_moments(case: str, _: float, seed: int) -> Values:
    """B5, B6: the second moment by class, and the factors by which DP-Adam and DP-AdamBC scale a class' rows.

    At sigma 4.4 the most frequent class has the signal to noise of the paper's full problem, at the first weights.
    """
    floor, *sigma, size = case.removeprefix("floor ").removesuffix(" per class").split(", ")
    seen, steps = tail_moments(floor, float(sigma[0].split()[1]) if sigma else 10.0, seed)
    _m, clean_v, _noisy_m, noisy_v, phi = moments_of(seen, steps)
    index = SIZES.index(int(size))
    rows = slice(2**index - 1, 2 ** (index + 1) - 1)
    clean, own, least = clean_v.view(31, -1)[rows], noisy_v.view(31, -1)[rows], float(floor) * phi
    return {
        "v / Phi, clean": float(clean.mean()) / phi,
        "v / Phi, released": float(own.mean()) / phi,
        "scale of DP-Adam": float((phi / own).sqrt().mean()),
        "scale of DP-AdamBC": float((least / (own - phi).clamp(min=least)).sqrt().mean()),
        "on the floor": float((own - phi <= least).double().mean()),
    }


def class_parts(p: Tensor, x: Tensor, labels: Tensor, norm: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return by class: the norm of its gradient row, the trace of its Hessian, its clipped part, and its probability.

    `p` are the probabilities of the classes, one row per example. The clipped part of a class is the norm of the sum of
    its examples' clipped gradients, over n.
    """
    hot = F.one_hot(labels, p.shape[1]).double()
    residual, n = p - hot, len(labels)
    gradient = (residual.T @ x / n).norm(dim=1)
    hessian = (p * (1 - p)).T @ x.square().sum(1) / n
    norms = residual.norm(dim=1) * x.norm(dim=1)
    kept = residual * (norm / norms).clamp(max=1)[:, None]
    parts = torch.stack([(kept[labels == k].T @ x[labels == k]).norm() / n for k in range(p.shape[1])])
    own = (p * hot).sum(0) / hot.sum(0)
    return gradient, hessian, parts, own


def rows(case: str, _: float, seed: int) -> Values:
    """B3, B7: exponents of the class frequency in a class' gradient, Hessian and part of the clipped mean."""
    data = heavy_tail(groups=5, log_size=7, seed=seed)
    x, labels = data.train.tensors[0].double(), data.train.tensors[1]
    hot, weights = F.one_hot(labels, 31).double(), torch.zeros(31, x.shape[1], dtype=torch.float64)
    for _ in range(int(case.split()[1])):
        weights -= 0.01 * (F.softmax(x @ weights.T, 1) - hot).T @ x / len(x)
    share = hot.mean(0)
    gradient, hessian, parts, own = class_parts(F.softmax(x @ weights.T, 1), x, labels, 1.0)
    return {
        "gradient": slope(gradient, share),
        "Hessian": slope(hessian, share),
        "part of the clipped mean": slope(parts, share),
        "probability of the own class, most frequent": float(own[0]),
        "probability of the own class, rarest": float(own[-16:].mean()),
    }


def assumption(case: str, _: float, seed: int) -> Values:
    """B3: the exponents where each example's own class has a probability of 0.9, and the others share the rest."""
    groups, log_size = {"31 classes": (5, 7), "127 classes": (7, 9), "255 classes": (8, 10)}[case]
    data = heavy_tail(groups=groups, log_size=log_size, seed=seed)
    x, labels = data.train.tensors[0].double(), data.train.tensors[1]
    hot = F.one_hot(labels).double()
    p = 0.9 * hot + 0.1 / (hot.shape[1] - 1) * (1 - hot)
    gradient, hessian = class_parts(p, x, labels, 1.0)[:2]
    return {"gradient": slope(gradient, hot.mean(0)), "Hessian": slope(hessian, hot.mean(0))}


def balanced(case: str, _: float, seed: int) -> Values:
    """B13: mean accuracy over classes and over examples, from the records of heavy-tail/fig2."""
    lines = (ROOT / "results/heavy-tail-fig2/runs.jsonl").read_text().splitlines()
    key = (case, seed, "final")
    (run,) = [r for r in map(json.loads, lines) if (r["method"], r["seed"], r["phase"]) == key]
    groups = run["curve"][-1]["raw_groups"]
    count = sum(group["classes"] for group in groups)
    return {
        "mean over examples": run["test_accuracy"],
        "mean over classes": sum(group["classes"] * group["accuracy"] for group in groups) / count,
        "mean over groups": fmean(group["accuracy"] for group in groups),
    }


def less_noise(case: str, step: float, seed: int) -> Values:
    """B23: sigma = 10 and 1,795 steps against sigma = 5 and 448 steps, of one epsilon."""
    method, sigma = case.split(", sigma ")
    changed: dict[str, Any] = {"noise_multiplier": float(sigma), "steps": {"10": 1795, "5": 448}[sigma]}
    return by_size(last(training(task_of("classes"), method, step, seed, **changed)))


def unclipped(case: str, step: float, seed: int) -> Values:
    """B22: the share of gradients that a C of ten times the paper's still clips, at the paper's ratio of C to |x|.

    In the paper |x| is 55.4, and C is 1 or 10; here |x| is 16, so these are 0.289 and 2.89.
    """
    shares = list[float]()
    stats = RawGradientStats()
    task, at = task_of("classes"), range(1790, 1796)
    stops = training(task, case, step, seed, at=at, observe=[stats.observe], max_grad_norm=2.89)
    values: Values = {}
    for stop in stops:
        values, x = by_size(stop), task.train.tensors
        with torch.no_grad():
            residual = F.softmax(stop.model(x[0]), 1) - F.one_hot(x[1], 31)
        shares.append(float((residual.norm(dim=1) * x[0].norm(dim=1) < 2.89).double().mean()))
    return values | {"unclipped at the end": fmean(shares), "unclipped": 1 - stats.summary()["raw_clip_fraction"]}


@cache
def features(case: str) -> tuple[Tensor, Tensor]:
    """Return the features and classes of 520 random examples."""
    if case == "synthetic":
        data = heavy_tail(groups=8, log_size=10)
        inputs, labels = data.train.tensors
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:520]
        return inputs[chosen].double(), labels[chosen]
    if case == "sections, counts":
        bags, labels = debian_sections(limit=47_000, validation=2000).train.tensors
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:520]
        counts = torch.zeros(520, int(bags.max()) + 1, dtype=torch.float64)
        counts.scatter_add_(1, bags[chosen].long(), torch.ones(520, bags.shape[1], dtype=torch.float64))
        return counts[:, 1:], labels[chosen]
    data = debian_texts(task="sections", limit=47_000, validation=2000)
    texts, labels = data.train.tensors
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:520]
    assert data.public_inputs is not None
    words = TfIdf(Public(data.public_inputs, "texts beyond the limit"))
    made = words if case == "sections, TF-IDF" else FrozenText(MINILM, source="MiniLM, trained on public web text")
    return made(texts[chosen]).double(), labels[chosen]


def alignment(case: str, _: float, seed: int) -> Values:
    """B20: cosines of the inputs of a linear model, which at zero weights decide those of its gradients.

    Within a class the cosine of two gradients is that of the inputs. Across classes it is minus that over c - 1.
    """
    x, labels = features(case)
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:260]
    unit = F.normalize(x[chosen], dim=1)
    cosines, same = unit @ unit.T, labels[chosen][:, None] == labels[chosen]
    others = ~torch.eye(len(chosen), dtype=torch.bool)
    return {
        "inputs within a class": float(cosines[same & others].mean()),
        "inputs across classes": float(cosines[~same].mean()),
        "gradients across classes": -float(cosines[~same].mean()) / (255 if case == "synthetic" else 58 - 1),
    }


def floors_by_size() -> Iterator[str]:
    for floor in ("0.041", "1", "0.041, sigma 4.4"):
        for size in SIZES:
            yield f"floor {floor}, {size} per class"


TAIL = ("DP-GD", "DP-GDM", "DP-Adam", "DP-AdamBC, floor 0.041", "DP-AdamBC, floor 1")
CHECKS = {
    "moments": Check("A5, A16, A17, A18", moments, ("digits", "classes")),
    "betas": Check(
        "A22",
        betas,
        (
            "DP-Adam",
            "DP-Adam, betas .5 .75",
            "DP-Adam, betas .9 .99",
            "DP-Adam, betas .99 .9999",
            "DP-AdamBC, floor 1",
        ),
        (0.004, *STEPS),
        best="validation loss",
        compared="test accuracy",
    ),
    "correction": Check(
        "A20, A23",
        correction,
        (
            *("DP-Adam, C = 1", "DP-AdamBC, floor 0.041, C = 1"),
            *("DP-Adam, C = 0.3", "DP-AdamBC, floor 1, C = 0.3"),
        ),
        STEPS,
        tuple(range(10)),
        best="validation loss",
        compared="test accuracy",
        group=2,
    ),
    "stability": Check("B1, B4, B15", stability, TAIL, CLASS_STEPS, best="loss", compared="loss"),
    "second-moments": Check("B5, B6", second_moments, tuple(floors_by_size())),
    "rows": Check("B3, B7", rows, ("step 0", "step 10", "step 100", "step 300")),
    "assumption": Check("B3", assumption, ("31 classes", "127 classes", "255 classes")),
    "balanced": Check("B13", balanced, ("DP-GD", "DP-GDM", "DP-Adam", "DP-AdamBC", "DP-AdamBC, floor 0.041")),
    "less-noise": Check(
        "B23",
        less_noise,
        tuple(f"{one}, sigma {sigma}" for sigma in ("10", "5") for one in ("DP-Adam", "DP-AdamBC, floor 1")),
        (0.007, 0.014),
        tuple(range(6)),
        best="loss",
        compared="loss of rarest",
        group=2,
    ),
    "unclipped": Check("B22", unclipped, ("DP-GDM",), (0.007,)),
    "alignment": Check("B20", alignment, ("synthetic", "sections, counts", "sections, TF-IDF", "sections, MiniLM")),
}  # fmt: skip
