"""The numbers that some pages of docs/ print are those of the records that they name."""

import itertools
import json
import math
import re
import runpy
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import privgrad as pg
from benchmarks import (
    chance,
    confidence,
    convolutions,
    defaults,
    epochs,
    images,
    random_features,
    random_fifths,
    tables,
    texts,
    trainer_texts,
    untuned,
)
from benchmarks.claims.__main__ import read, table
from benchmarks.table_sets import halves
from pages import ROOT, blocks
from privgrad import models
from privgrad.accounting import composition

CHOOSING, TUNING = (ROOT / "docs" / name for name in ("choosing-evidence.md", "tuning-evidence.md"))
HOW_MUCH_DATA = ROOT / "docs/tuning.md"
FOLDER = re.compile(r"\]\(\.\./results/([\w-]+)/\)")
# "DP-Adam 58.5 % ± 0.2", "DP-GD 2.96 ± 0.12", "AdaDPS (Adam) 0.0868"; "0.32: 63.9 %"
MEASURED = re.compile(r"(?P<name>\D.*?) (?P<mean>\d[\d.]*)(?P<percent> %)?(?: ± (?P<std>[\d.]+))?")
PERSON = r"^\| (\d+) \| ([\d.]+) \| (\d+) \|$"  # rows of a person, epsilon, k times 3
TRIED = re.compile(r"(?P<lr>[\d.]+): (?P<value>[\d.]+)(?P<percent> %)?")

# Ten passes of one example in 50.
LARGE: dict[str, Any] = {
    "sample_rate": 0.02,
    "steps": 500,
    "expected_batch_size": 1_000,
    "max_grad_norm": 1.0,
    "num_examples": 50_000,
    "delta": 1e-6,
}


class Row(NamedTuple):
    """A row of a page's table that names a folder of records."""

    folder: Path
    cells: list[str]


def rows(page: Path) -> Iterator[Row]:
    for line in page.read_text().splitlines():
        if line.startswith("|") and (found := FOLDER.search(line)):
            yield Row(ROOT / "results" / found[1], [cell.strip() for cell in line.strip("|").split("|")])


def runs(folder: Path, phase: str) -> list[dict[str, Any]]:
    lines = (folder / "runs.jsonl").read_text().splitlines()
    return [run for run in map(json.loads, lines) if run["phase"] == phase]


def summary(folder: Path, name: str, metric: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds, from the table where there is one."""
    if not (folder / "table.json").exists():
        values = [run[f"test_{metric}"] for run in runs(folder, "final") if run["method"] == name]
        return statistics.mean(values), statistics.stdev(values)
    method = json.loads((folder / "table.json").read_text())[name]
    found = method if "sd" in method else (method.get("groups") or method["raw_groups"])["all"][metric]
    return found["mean"], found.get("std", found.get("sd"))


def printed(value: float, like: str) -> str:
    """The value with as many decimals as another number has."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.slow
def test_the_epsilon_of_a_person_with_several_rows_is_computed_and_more_than_k_times():
    (quick_start,) = (block.text for block in blocks("README.md", "python") if "plan.batches(" in block.text)
    options = re.search(r"for_budget\(.*\n(.*)\n\)", quick_start)
    assert options
    plan = eval(f"pg.PrivacyPlan.for_budget({options[1]})", {"pg": pg})
    page = (ROOT / "docs/before-training.md").read_text()
    found = {int(k): (float(said), int(k_times)) for k, said, k_times in re.findall(PERSON, page, re.MULTILINE)}
    assert list(found) == [1, 2, 5, 9]
    for k, (said, k_times) in found.items():
        assert said == math.ceil(100 * plan.epsilon(rows_per_person=k)) / 100  # never below
        assert k_times == 3 * k
        assert k == 1 or said > k_times
    for name in ("README.md", "docs/own-data.md", "docs/lessons/what-epsilon-means.md"):
        text = (ROOT / name).read_text()
        assert "21.17" in text
        assert not re.search(r"(?<!more than k )times\s+the\s+epsilon", text), name
    assert page.count("47.83") == 2


def test_what_choosing_says_was_measured_stands_in_the_records():
    found = list(rows(CHOOSING))
    assert len(found) > 10
    for folder, (_, _, measured, _) in found:
        means: list[float] = []
        for said in measured.split("; "):
            parts = MEASURED.fullmatch(said)
            assert parts, said
            mean, std = summary(folder, parts["name"], "accuracy" if parts["percent"] else "loss")
            scale = 100 if parts["percent"] else 1
            assert printed(scale * mean, parts["mean"]) == parts["mean"], (folder.name, said, mean)
            if parts["std"]:
                assert printed(scale * std, parts["std"]) == parts["std"], (folder.name, said, std)
            means.append((-1 if parts["percent"] else 1) * float(parts["mean"]))
        assert means == sorted(means), f"{folder.name}: best first"


# The numbers of docs/choosing.md, "baseline -> method", in their order: records, what they must have, the score.
GAINS: list[tuple[str, dict[str, Any], str]] = [
    ("fashion_mnist/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("recipes/clothing", {}, "test_accuracy"),
    ("defaults/runs", {"task": "adult", "factor": 2}, "accuracy"),
    ("recipes/adult", {}, "test_accuracy"),
    ("heavy-tail-sections/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("texts/runs", {"task": "sections", "target_epsilon": 3.0}, "score"),
    ("adadps-stackoverflow/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("texts/runs", {"task": "tags", "target_epsilon": 3.0}, "score"),
    ("fine-tuning/runs", {"part": "head", "factor": 2.0, "seed": 0}, "recall@5"),
    ("fine-tuning/runs", {"part": "lora, inputs", "factor": 0.1, "seed": 0}, "recall@5"),
    ("fashion_mnist/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("inputs-clothing/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("adadps-imdb-linear/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("adadps-imdb-linear/runs", {"method": "AdaDPS, frequencies", "phase": "final"}, "test_accuracy"),
    ("memory-sections-256/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("memory-sections-256/runs", {"method": "DP-SGD, memory", "phase": "final"}, "test_accuracy"),
    ("memory-clothing-256/runs", {"method": "DP-SGD", "phase": "final"}, "test_accuracy"),
    ("memory-clothing-256/runs", {"method": "DP-SGD, memory", "phase": "final"}, "test_accuracy"),
    ("epochs/runs", {"task": "sections", "batch": 4500, "scheme": "poisson", "phase": "final"}, "test_accuracy"),
    ("epochs/runs", {"task": "sections", "batch": 4500, "scheme": "epochs", "phase": "final"}, "test_accuracy"),
]


def test_the_gains_on_the_page_on_choosing_stand_in_the_records():
    page = (ROOT / "docs/choosing.md").read_text()
    said = [number for pair in re.findall(r"([\d.]+) % → (?:LoRA )?([\d.]+) %", page) for number in pair]
    assert len(said) == page.count(" → ") * 2 == len(GAINS)
    for number, (name, wanted, score) in zip(said, GAINS, strict=True):
        held = map(json.loads, (ROOT / f"results/{name}.jsonl").read_text().splitlines())
        scores = [100 * one[score] for one in held if wanted.items() <= one.items()]
        assert scores, (name, wanted)
        assert printed(statistics.mean(scores), number) == number, (name, wanted)
    rows = [json.loads(line) for line in (ROOT / "results/images/runs.jsonl").read_text().splitlines()]
    behind: dict[float, list[float]] = defaultdict(list)
    for name, epsilon in itertools.product(("digits", "mnist", "animals"), (3.0, 0.5)):
        of = [one for one in rows if one["set"] == name]
        (best,) = [one["accuracy"] for one in of if one["method"] == "linear-recipe"]
        mean = statistics.mean(one["accuracy"] for one in of if (one["method"], one["epsilon"]) == ("recipe", epsilon))
        behind[epsilon].append(100 * (best - mean))
    text = " ".join(page.split())
    low, high = ([math.floor(min(behind[e]) + 0.5), math.ceil(max(behind[e]))] for e in (3.0, 0.5))
    assert f"was {low[0]} to {low[1]} points behind no privacy at epsilon 3, and {high[0]} to {high[1]} at" in text
    assert not re.search(r"\d\.\d+ %", re.sub(r"[\d.]+ % → (?:LoRA )?[\d.]+ %", "", page))


def test_what_choosing_says_in_words_stands_in_its_table():
    titles = (
        "What a comparison prints|What heads on texts gained from|Scales of every few steps|Defaults without tuning|"
    )
    titles += "Fine-tuning a pretrained model|A C that moves.*?"
    own = rf"(?s)##+ ({titles})\n.*?(?=##+ |\Z)"
    text = re.sub(own, "", CHOOSING.read_text())  # other tests read these sections
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    words = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    numbers = re.findall(r"\d+\.\d+(?: %)?", words)
    assert numbers
    assert [number for number in numbers if number not in table] == []


def test_the_table_of_epochs_is_that_of_its_records_and_each_choice_was_open_to_both_schemes():
    assert f"|---|---|---|---|---|---|---|\n{epochs.table()}\n\n" in CHOOSING.read_text()
    records = epochs.read()
    for task, (_, sizes, _) in epochs.TASKS.items():
        for batch, passes in sizes.items():
            both = [epochs.of(records, task, batch, scheme) for scheme in epochs.SCHEMES]
            tried = [{run["noise_step"] for run in one if run["phase"] == "tuning"} for one in both]
            for one in both:
                finals = [run for run in one if run["phase"] == "final"]
                assert {run["noise_step"] for run in finals} <= tried[0] & tried[1], (task, batch)
                assert [run["seed"] for run in finals] == [0, 1, 2]
                assert {run["epochs"] for run in one} == {passes}
                target = epochs.TASKS[task][0]["privacy"]["target_epsilon"]
                assert all(0.99 * target < run["epsilon"] <= target for run in finals)


def test_what_scales_of_every_few_steps_cost_stands_in_the_records():
    (section,) = re.findall(r"(?s)## Scales of every few steps\n.*?(?=## )", CHOOSING.read_text())
    rows = re.findall(r"^\| ([a-zF]\S+)[ \w]* \| (\d+) \| (.* %) \|$", section, re.MULTILINE)
    files = {"digits": "digits", "Fashion-MNIST": "clothing", "tags": "tags"}
    assert len(rows) == 4
    for name, units, cells in rows:
        strong = "-strong" if units == "1" else ""
        path = ROOT / f"results/adadps-every/{files[name]}{strong}.jsonl"
        finals = [run for run in map(json.loads, path.read_text().splitlines()) if run["phase"] == "final"]
        for method, said in zip(["DP-SGD", *(f"every {k}" for k in (1, 2, 4, 8, 16))], cells.split(" | "), strict=True):
            mean = statistics.mean(100 * run["test_accuracy"] for run in finals if run["method"] == method)
            assert said == f"{mean:.1f} %", (name, units, method)


def test_the_defaults_without_tuning_stand_in_the_records():
    found = [json.loads(line) for line in (ROOT / "results/defaults/runs.jsonl").read_text().splitlines()]
    (section,) = re.findall(r"(?s)## Defaults without tuning\n.*?(?=## )", CHOOSING.read_text())
    row = r"^\| ([\w ]+), epsilon ([\d.]+).*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)( %)? \|"
    rows = re.findall(row, section, re.MULTILINE)
    assert len(rows) == 8
    for name, epsilon, step, product, measured, percent in rows:
        task = {"tags": f"tags{epsilon}", "toy regression": "toy"}.get(name, name.lower())
        runs = [run for run in found if run["task"] == task and run["factor"] == 1]
        assert len(runs) == 3
        mean = statistics.mean(100 * run["accuracy"] if percent else run["loss"] for run in runs)
        assert printed(mean, measured) == measured
        assert {run["noise_step"] for run in runs} == {float(step)}
        assert runs[0]["noise_step"] * runs[0]["input_norm"] == pytest.approx(float(product), abs=5e-3)


def test_what_a_moving_c_reaches_without_tuning_stands_in_the_records():
    (section,) = re.findall(r"(?s)## Defaults without tuning\n.*?(?=## )", CHOOSING.read_text())
    names = {"tags at epsilon 1": "tags1", "toy regression": "toy", "small CNN on clothing": "clothing"}
    rules = ("C by target fraction", "three quarters, to the end", "C by squared error")
    cell = r" (–|[\d.]+(?: %)?) \|"
    found = re.findall(
        rf"^\| ([\w ]+?)(?:,[^|]*| \([^|]*)? \|{cell}{cell}{cell} [\d.]+(?: %)? \|$", section, re.MULTILINE
    )
    assert len(found) == 7
    for name, *cells in found:
        lines = (ROOT / f"results/moving-c/{names.get(name, name)}.jsonl").read_text().splitlines()
        for rule, said in zip(rules, cells, strict=True):
            runs = [run for run in map(json.loads, lines) if (run["method"], run["phase"]) == (rule, "final")]
            assert len(runs) == (0 if said == "–" else 3)
            if runs:
                percent, number = said.endswith(" %"), said.removesuffix(" %")
                key = "test_accuracy" if percent else "raw_train_loss" if name == "toy regression" else "test_loss"
                assert printed(statistics.mean((100 if percent else 1) * run[key] for run in runs), number) == number


def test_what_the_page_on_features_says_was_measured_stands_in_the_records():
    held = [json.loads(line) for line in (ROOT / "results/features/runs.jsonl").read_text().splitlines()]
    lines = re.findall(
        r"^\| (patches.*) \| ([\d.]+) \| ([\d.]+) % ± ([\d.]+) \| (\d+), (\d+) \|$", CHOOSING.read_text(), re.M
    )
    assert len(lines) == 4
    for extractor, epsilon, *numbers in lines:
        runs = [run for run in held if run["extractor"] == extractor and round(run["epsilon"], 1) == float(epsilon)]
        accuracies = [100 * run["accuracy"] for run in runs]
        seconds = runs[0]["statistics_cpu_seconds"] + runs[0]["features_cpu_seconds"]
        training = statistics.mean(run["training_cpu_seconds"] for run in runs)
        found = [statistics.mean(accuracies), statistics.stdev(accuracies), seconds, training]
        assert [printed(value, like) for value, like in zip(found, numbers, strict=True)] == numbers
        assert len(runs) == 3
        assert all(run["measured_on"] == "test" and run["epsilon"] <= float(epsilon) for run in runs)


def test_what_heads_on_texts_have_reached_stands_in_the_records():
    held = [json.loads(line) for line in (ROOT / "results/texts/runs.jsonl").read_text().splitlines()]
    page, seen = (ROOT / "docs/features-text.md").read_text(), 0
    for task, *cells in re.findall(r"^\| (tags|sections), .*? \| .*? \| (.*?) \| (.*?) \|", page, re.M):
        for epsilon, cell in zip((3.0, 1.0), cells, strict=True):
            scores = [100 * run["score"] for run in held if (run["task"], run["target_epsilon"]) == (task, epsilon)]
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else " (one run)"
            assert cell == f"{statistics.mean(scores):.1f} %{spread}"
            seen += len(scores)
    assert seen == len(held)
    assert all(run["epsilon"] <= run["target_epsilon"] for run in held)


def test_what_a_private_step_of_trl_costs_stands_in_the_records():
    runs = [json.loads(line) for line in (ROOT / "results/bench/trl.jsonl").read_text().splitlines()]
    held = {(run["kind"], run["checkpointing"], run["round"], run["private"]): run for run in runs}
    assert len(held) == len(runs)
    assert len({key[:2] for key in held}) == 4
    found = list[str]()
    for names in (("seconds",), ("kept_mib", "peak_mib")):
        cost = {key: sum(run[name] for name in names) for key, run in held.items()}
        ratios = [cost[(*key, True)] / cost[(*key, False)] for *key, is_private in cost if is_private]
        found += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    page = " ".join((ROOT / "docs/language-models.md").read_text().split())
    said = re.findall(
        r"([\d.]+) to ([\d.]+) times the processor time .* and ([\d.]+) to ([\d.]+) times the memory", page
    )
    assert said == [tuple(found)]
    assert f"{runs[0]['parameters'] / 1e6:.0f} million" in page


def test_what_preconditioned_inputs_cost_stands_in_the_records():
    lines = map(json.loads, (ROOT / "results/bench/inputs.jsonl").read_text().splitlines())
    seconds = {(row["workload"], row["method"]): row["seconds"] for row in lines}
    (section,) = re.findall(r"(?s)## Preconditioned inputs\n.*?(?=## )", (ROOT / "docs/performance.md").read_text())
    rows = re.findall(r"^\| (W\d) \| ([\d.]+) ms \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", section, re.MULTILINE)
    assert {row[0] for row in rows} >= {"W2", "W3", "W5"}
    for workload, plain, kept, refresh, total in rows:
        first, second, third = (seconds[workload, name] for name in ("plain", "inputs", "inputs-refreshed"))
        assert printed(1000 * first, plain) == plain
        assert printed(second / first, kept) == kept
        assert printed((third - second) / first, refresh) == refresh
        assert printed((second + (third - second) / 100) / first, total) == total


def test_what_a_step_costs_stands_in_the_records():
    lines = map(json.loads, (ROOT / "results/peers/steps.jsonl").read_text().splitlines())
    records = {(row["workload"], row["method"]): row for row in lines}
    (section,) = re.findall(r"(?s)## Measured\n.*?(?=## )", (ROOT / "docs/performance.md").read_text())
    names, _, *rows = (line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|"))
    fields = {"time": "ratio", "peak memory": "peak_memory_ratio"}
    stated = [(*title.split(", "), cells) for title, *cells in rows if not title.startswith("goal")]
    assert len(stated) == 4
    for what, method, cells in stated:
        for workload, cell in zip(names[-len(cells) :], cells, strict=True):
            assert cell == f"{records[workload, method][fields[what]]:.2f}", (workload, method)
    memory = [row["peak_memory_ratio"] for row in records.values() if row["method"] in ("plain", "preconditioned")]
    for page in ("README.md", "docs/guide.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"peak memory was {min(memory):.1f} to {max(memory):.1f} times that of" in text
    plain = [records[f"W{number}", "plain"]["ratio"] for number in range(1, 8)]
    readme = " ".join((ROOT / "README.md").read_text().split())
    costs = f"{min(plain):.1f} to {max(plain):.1f} ordinary ones"
    modes = [
        [records[f"W{number}", f"opacus-{mode}"]["ratio"] for mode in ("hooks", "ghost")] for number in range(1, 8)
    ]
    fastest = [min(filter(None, both)) for both in modes if any(both)]
    assert readme.count(costs) == 2
    assert (
        f"faster mode {min(fastest):.1f} to {max(fastest):.1f} on the {'0123456'[len(fastest)]} that it trains"
        in readme
    )


MODELS = {
    "bert": "BERT",
    "gpt2": "GPT-2",
    "llama": "LLaMA",
    "timm_vit": "ViT (timm)",
    "resnet_groupnorm": "ResNet, GroupNorm",
}


def measured_on_a_gpu() -> dict[tuple[str, str], dict[str, tuple[float, float, float | None]]]:
    """For each workload and precision: seconds, ratio and ratio of memory of each method."""
    found: dict[tuple[str, str], dict[str, tuple[float, float, float | None]]] = {}
    for line in (ROOT / "results/bench/gpu.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["ratio"]:
            held = found.setdefault((row["workload"], row["dtype"]), {})
            held[row["method"]] = row["seconds"], row["ratio"], row["peak_memory_ratio"]
    for line in (ROOT / "results/bench/gpu-zoo.jsonl").read_text().splitlines():
        row = json.loads(line)
        peaks = {method: peak / row["peak_mb"]["ordinary"] for method, peak in row["peak_mb"].items()}
        found[MODELS[row["name"]], row["precision"]] = {
            method: (row["seconds"][method], ratio, peaks.get(method)) for method, ratio in row["ratio"].items()
        }
    return found


def test_what_a_step_costs_on_a_gpu_stands_in_the_records():
    records = measured_on_a_gpu()
    (section,) = re.findall(r"(?s)## On a GPU\n.*?(?=## )", (ROOT / "docs/performance.md").read_text())
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [A-Z]", line)]
    assert len(rows) == 28
    for name, *cells in rows:
        if len(cells) == 7:  # float32, and memory
            asked = [("float32", method, 1) for method in ("plain", "preconditioned", "bam", "opacus-ghost")]
            asked = [("float32", "ordinary", 0), *asked, ("float32", "plain", 2), ("float32", "opacus-ghost", 2)]
        else:
            fields = (("ordinary", 0), ("plain", 1), ("opacus-ghost", 1))
            asked = [(precision, *field) for precision in ("tf32", "bf16") for field in fields]
        for cell, (precision, method, field) in zip(cells, asked, strict=True):
            value = records.get((name, precision), {}).get(method, (None,) * 3)[field]
            stated = "–" if value is None else f"{1000 * value:.1f} ms" if field == 0 else f"{value:.2f}"
            assert cell == stated, (name, precision, method)


def test_what_the_home_page_says_of_a_gpu_stands_in_the_records():
    held = [methods for (_, precision), methods in measured_on_a_gpu().items() if precision == "float32"]
    ours = [methods["plain"][1] for methods in held]
    ghost = [methods["opacus-ghost"][1] if "opacus-ghost" in methods else None for methods in held]
    saved = [1 - other / own for own, other in zip(ours, ghost, strict=True) if other and other < 0.99 * own]
    slower = max(other / own for own, other in zip(ours, ghost, strict=True) if other)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes {min(ours):.0f} to {max(ours):.0f} ordinary ones on an H200" in text
    assert f"{100 * min(saved):.0f} to {100 * max(saved):.0f} % faster on six of fourteen workloads" in text
    assert (len(saved), len(held), round(slower), ghost.count(None)) == (6, 14, 6, 5)
    assert "six times slower on an LSTM, and fails on five" in text


def test_the_tables_of_the_papers_are_written_from_the_records():
    script = runpy.run_path(str(ROOT / "scripts/record_tables.py"))
    found = 0
    for path in sorted(script["PAGES"].glob("*.md")):
        text = path.read_text()
        found += len(script["PLACE"].findall(text))
        assert script["page"](text) == text, f"{path.name}: run scripts/record_tables.py"
    assert found >= 8


# What the text of a section says besides recorded values: standard errors, gaps, features, former records.
BESIDES = {
    "Tweets": {"0.025"},
    "Autoencoder": {"0.016"},
    "Classes of images": {"3.2", "1.5", "2.7"},
    "Federated (figure 6)": {"37.0"},
    "Accuracy (table 1)": {"4.5"},
    "Figure 3": {"3.2", "2.6"},
    "Figure 1": {"3.4", "5.6", "3.9", "1.09"},
    "A natural tail: sections of Debian packages": {"45.8", "54.1"},
}
SCORES = (
    *("test_accuracy", "validation_accuracy", "raw_clip_fraction", "test_loss", "validation_loss", "raw_train_loss"),
    *("epsilon", "simulates_epsilon", "seconds"),
)


def recorded(folder: Path) -> Iterator[float]:
    """The scores of each training, their means and deviations over seeds, and the numbers of the comparison's spec."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        last = run["curve"][-1] if run.get("curve") else {}
        groups = last.get("raw_groups") or [] if isinstance(last, dict) else []
        scores = {name: run.get(name) for name in SCORES}
        scores |= {f"{n} {name}": group[name] for n, group in enumerate(groups) for name in ("accuracy", "loss")}
        candidate = [run.get(name) for name in ("method", "phase", "noise_step", "lr", "own", "max_grad_norm")]
        alike.setdefault(json.dumps(candidate), []).append(scores)
    for trainings in alike.values():
        for name in trainings[0]:
            values = [one for s in trainings if isinstance(one := s[name], float) and math.isfinite(one)]
            percent = "accuracy" in name or "fraction" in name
            both = (statistics.fmean, statistics.stdev) if len(values) > 1 else ()
            yield from ((100 if percent else 1) * value for value in (*values, *(of(values) for of in both)))
    if (folder / "spec.json").exists():
        yield from map(float, re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", (folder / "spec.json").read_text()))


def test_what_the_papers_pages_say_of_comparisons_stands_in_the_records_of_the_section():
    seen, unknown, unused = 0, list[tuple[str, str, str]](), {name: set(held) for name, held in BESIDES.items()}
    for page in sorted((ROOT / "docs/papers").glob("*.md")):
        for section in re.split(r"(?m)^## ", page.read_text())[1:]:
            title = section.partition("\n")[0]
            names = re.findall(r"results/([\w-]+)", section) + re.findall(r"<!-- results: ([\w-]+)", section)
            folders = [ROOT / "results" / name for name in sorted(set(names))]
            files = [folder / "runs.jsonl" for folder in folders]
            held = [path.parent for path in files if path.exists() and '"test_loss"' in path.read_text()]
            if not held:
                continue
            values = [value for folder in held for value in recorded(folder)]
            table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
            words = "\n".join(line for line in section.splitlines() if not line.startswith("|"))
            words = re.sub(r"`[^`]*`|\]\([^)]*\)", "", words)
            for number in re.findall(r"(?<![\w.,-])\d+\.\d+(?![\w]|\.\d)", words):
                if number in BESIDES.get(title, ()):
                    unused[title].discard(number)
                    continue
                digits = len(number.partition(".")[2])
                is_recorded = any(f"{value:.{digits}f}" == number for value in values)
                unknown += [] if number in table or is_recorded else [(page.name, title, number)]
                seen += 1
    assert unknown == []
    assert seen > 100
    assert not any(unused.values()), unused


def test_the_page_on_models_is_written_from_the_records():
    script = runpy.run_path(str(ROOT / "scripts/models_page.py"))
    files = {path.name: script["read"](path) for path in sorted(script["RECORDS"].glob("*.jsonl"))}
    assert files
    assert script["page"](files) == script["PAGE"].read_text(), "run scripts/models_page.py"

    def without(row: dict[str, Any]) -> dict[str, Any]:
        parts, dropped = ("ratio", "failed", "peak_mb"), ("bam", "opacus-ghost")
        return row | {part: {k: v for k, v in row[part].items() if k not in dropped} for part in parts}

    one, other, third = map(without, files["cpu.jsonl"][:3])
    assert "Opacus" not in script["table"]([one, other, third])
    one["ratio"], other["failed"] = {**one["ratio"], "opacus-ghost": 2.5}, {"opacus-ghost": "an error"}
    _, _, *lines = script["table"]([one, other, third]).splitlines()
    assert [line.split(" | ")[5] for line in lines] == ["2.50", "–", "not measured"]


def rate(run: dict[str, Any]) -> float:
    """The rate that was tuned: the noise step, or else the learning rate."""
    return run["noise_step"] if run["lr"] is None else run["lr"]


def test_what_recipes_have_reached_stands_in_the_records():
    page, seen = (ROOT / "docs" / "recipes.md").read_text(), 0
    for name, cells in re.findall(r"\| \[(\w+)\.toml\]\S+ \|(.*)", page):
        if name.startswith("texts_"):
            lines = map(json.loads, (ROOT / "results/texts/runs.jsonl").read_text().splitlines())
            of = (name.removeprefix("texts_"), 3.0)
            scores = [100 * run["score"] for run in lines if (run["task"], run["target_epsilon"]) == of]
            assert f"{statistics.mean(scores):.1f} % ± {statistics.stdev(scores):.1f}" in cells
            continue
        held = [json.loads(line) for line in (ROOT / f"results/recipes/{name}.jsonl").read_text().splitlines()]
        accuracies = [100 * run["test_accuracy"] for run in held]
        told = re.search(r"([\d.]+) % ± ([\d.]+)(?:, AUC ([\d.]+))?", cells)
        assert told is not None
        assert (told[1], told[2]) == (f"{statistics.mean(accuracies):.1f}", f"{statistics.stdev(accuracies):.1f}")
        if told[3]:
            assert told[3] == f"{statistics.mean(run['metrics']['auc'] for run in held):.3f}"
        assert len(held) >= 3
        assert all(run["seed"] is None and run["epsilon"] <= float(cells.split("|")[2].split(",")[0]) for run in held)
        seen += 1
    assert seen == 6


def test_recipes_that_ran_again_reach_what_their_first_records_have():
    again = read(ROOT / "results/recipes/again.jsonl")
    for name in {one["recipe"] for one in again}:
        if name.startswith("texts_"):
            task = (name.removeprefix("texts_"), 3.0)
            held = read(ROOT / "results/texts/runs.jsonl")
            first = [one["score"] for one in held if (one["task"], one["target_epsilon"]) == task]
        else:
            first = [one["test_accuracy"] for one in read(ROOT / f"results/recipes/{name}.jsonl")]
        mean = statistics.mean(one["score"] for one in again if one["recipe"] == name)
        assert mean > statistics.mean(first) - 0.003, name


def test_what_dp_ebm_has_reached_on_adult_stands_in_the_records():
    held = [json.loads(line) for line in (ROOT / "results/recipes/adult-dp-ebm.jsonl").read_text().splitlines()]
    told = re.findall(r"\| DP-EBM .*rate ([\d.]+) \| (.*?) % ± (.*?) \| (.*?) \|", CHOOSING.read_text())
    assert len(told) == 2
    for rate, *said in told:
        own = [run for run in held if run["learning_rate"] == float(rate)]
        assert len(own) == 5
        assert all((run["epsilon"], run["delta"]) == (1.0, 1e-6) for run in own)
        accuracies = [100 * run["accuracy"] for run in own]
        found = [statistics.mean(accuracies), statistics.stdev(accuracies)]
        assert said == [*(f"{value:.1f}" for value in found), f"{statistics.mean(run['auc'] for run in own):.3f}"]


def test_what_a_wrong_noise_step_of_a_head_costs_stands_in_the_records():
    held = [json.loads(line) for line in (ROOT / "results/heads/runs.jsonl").read_text().splitlines()]
    page = TUNING.read_text()
    table = page[page.index("| noise step | income") :].splitlines()[2:7]
    columns = [("loan", "constant"), ("loan", "cosine"), ("age", "cosine"), ("hours-per-week", "cosine")]
    for line, factor in zip(table, (0.25, 0.5, 1.0, 2.0, 4.0), strict=True):
        for cell, key in zip(line.split("|")[2:], columns, strict=False):
            own = [run for run in held if (run["task"], run["decay"], run["factor"]) == (*key, factor)]
            assert cell.strip() == f"{statistics.mean(run.get('R2', run.get('accuracy')) for run in own):.3f}", line


def test_the_picture_and_the_scores_of_the_home_page_are_those_of_the_records():
    script, readme = runpy.run_path(str(ROOT / "scripts/accuracy_picture.py")), (ROOT / "README.md").read_text()
    records = script["read"]()
    assert script["PICTURE"].read_text() == script["picture"](records), "run scripts/accuracy_picture.py"
    of = [one for one in records if one["set"] == script["SET"] and one["method"] in script["LINES"]]
    assert {(one["method"], one["epsilon"], one["seed"]) for one in of} == set(
        itertools.product(script["LINES"], script["EPSILONS"], (0, 1, 2))
    )
    means, text = script["means"](records), " ".join(readme.split())
    none, best = means[script["NOT_PRIVATE"], None], means["recipe", 3.0]
    assert f"the recipe has {best:.1f} % and a model without privacy {none:.1f} %" in text
    assert f"{of[0]['train_rows']:,} digits of MNIST" in text
    assert round(means["opacus-cnn", 1.0] - means["network", 1.0]) == 2
    assert "at epsilon 1, that example is two points ahead of them" in text
    scores: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for line in (ROOT / "results/peers/accuracy.jsonl").read_text().splitlines():
        one = json.loads(line)
        scores[one["task"], one["library"], one["variant"]].append(100 * one["score"])
    columns = (("opacus", "example"), ("privgrad", "example"), ("privgrad", "recipe"), ("opacus", "recipe"))
    tasks = {"Fashion-MNIST": "fashion-mnist", "Adult": "adult", "Debian sections": "sections", "Debian tags": "tags"}
    rows = re.findall(r"^\| (Fashion-MNIST|Adult|Debian \w+).*? \| \d \| (.*) \|$", readme, re.MULTILINE)
    assert [name for name, _ in rows] == list(tasks)
    for name, cells in rows:
        assert cells.split(" | ") == [f"{statistics.mean(scores[tasks[name], *one]):.1f} %" for one in columns]
    named = [round(statistics.mean(scores["fashion-mnist", *one])) for one in (columns[2], columns[1], columns[0])]
    assert re.findall(r"Fashion-MNIST at epsilon 3: (\d+) % by .*?, (\d+) % with .* has (\d+) %", text) == [
        tuple(map(str, named))
    ]


def test_what_tuning_says_of_rates_stands_in_the_records():
    """Each value is the mean over the tuning seeds, with the best of the method's own options."""
    found = list(rows(TUNING))
    assert len(found) > 15
    for folder, cells in found:
        _, name, norm, tried = cells
        tuned = [r for r in runs(folder, "tuning") if r["method"] == name and r["max_grad_norm"] == float(norm)]
        for said in tried.split("; "):
            parts = TRIED.fullmatch(said)
            assert parts, said
            key = "validation_accuracy" if parts["percent"] else "validation_loss"
            key = "raw_train_loss" if tuned[0].get("raw_train_loss") is not None else key
            by_options: dict[str, list[float]] = {}
            for run in tuned:
                if rate(run) == float(parts["lr"]):
                    by_options.setdefault(json.dumps(run.get("own")), []).append(run[key])
            means = [statistics.mean(values) for values in by_options.values()]
            value = 100 * max(means) if parts["percent"] else min(means)
            assert printed(value, parts["value"]) == parts["value"], (folder.name, said, value)


def test_what_tuning_says_of_batches_stands_in_the_records():
    last = {
        (run["B"], run["T"]): run["acc"]
        for run in map(json.loads, (ROOT / "results/fashion_mnist-cnn/tuning.jsonl").read_text().splitlines())
        if run["lr"] == 0.001
    }
    text = " ".join(TUNING.read_text().split())
    for (batch, steps), accuracy in last.items():
        said = re.search(rf"{steps} steps of {batch:,} (?:came )?to ([\d.]+) %", text)
        assert said, (batch, steps)
        assert float(said[1]) == pytest.approx(100 * accuracy, abs=0.05)


def test_what_tuning_says_in_words_stands_in_its_table():
    lines = TUNING.read_text().splitlines()
    measured = "\n".join(line for line in lines if FOLDER.search(line))
    others = "\n".join(line for line in lines if not FOLDER.search(line))
    others = others.replace("84.8 %", "").replace("84.7 %", "")  # of the batches, see above
    assert [number for number in re.findall(r"[\d.]+ %", others) if number not in measured] == []


@pytest.mark.slow
def test_how_much_data_is_what_the_planner_says():
    """Each row's noise has the row's epsilon."""
    rows = [
        [float(cell.replace(",", "")) for cell in line.strip("| ").split("|")]
        for line in HOW_MUCH_DATA.read_text().splitlines()
        if re.fullmatch(r"(\| [\d,]+ ){4}\|", line)
    ]
    assert [row[0] for row in rows] == [1, 3, 8]
    for target, *needed in rows:
        parts = [count / parameters**0.5 for count, parameters in zip(needed, (1e4, 1e5, 1e6), strict=True)]
        assert parts[0] == pytest.approx(parts[2], rel=0.05)
        assert parts[1] == pytest.approx(parts[2], rel=0.01)
        sigma = 0.1 * parts[2] * 0.02 * 500**0.5
        plan = pg.PrivacyPlan(noise_multiplier=sigma, **LARGE)
        assert plan.epsilon() == pytest.approx(target, rel=0.02)


def test_the_code_that_says_how_much_data_prints_its_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """By RDP, which takes milliseconds, and some percent more noise."""
    real, page = composition.epsilon_of, HOW_MUCH_DATA.read_text()
    monkeypatch.setattr(composition, "epsilon_of", lambda mechanisms, delta, _: real(mechanisms, delta, "rdp"))
    (code,) = (block.text for block in blocks("docs/tuning.md", "python") if block.heading == "How much data")
    exec(code, {})
    for line in capsys.readouterr().out.splitlines():
        epsilon, *found = (float(cell.replace(",", "")) for cell in line.strip("| ").split("|"))
        (said,) = (other for other in page.splitlines() if re.match(rf"\| {epsilon:g} \| \d", other))
        wanted = [float(cell.replace(",", "")) for cell in said.strip("| ").split("|")][1:]
        assert found == pytest.approx(wanted, rel=0.12)


def test_where_noise_was_small_enough_is_what_the_plans_say():
    lengths = {
        "Fashion-MNIST": ("examples/fashion_mnist.toml", models.cnn_small(in_channels=1, num_classes=10), 1.559),
        "heavy tail": ("results/heavy-tail-fig2/spec.json", models.linear(in_features=9216, num_classes=255), 10.0),
        "digits": ("examples/digits.toml", models.mlp(in_features=64, hidden=64, num_classes=10), 4.089),
        "the autoencoder": ("results/adadps-autoencoder/spec.json", models.autoencoder(in_features=784), 1.0),
    }
    said = re.findall(r"([\d.]+) C \(([\w -]+)", HOW_MUCH_DATA.read_text())
    assert {name for _, name in said} == lengths.keys()
    for length, name in said:
        path, model, sigma = lengths[name]
        text = (ROOT / path).read_text()
        privacy = (json.loads(text) if path.endswith("json") else tomllib.loads(text))["privacy"]
        if (target := privacy.pop("target_epsilon", None)) is None:
            assert privacy["noise_multiplier"] == sigma
        else:
            rate = privacy["expected_batch_size"] / privacy["num_examples"]
            plan = pg.PrivacyPlan(noise_multiplier=sigma, sample_rate=rate, **privacy)
            assert plan.epsilon() == pytest.approx(target, rel=0.005)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        found = sigma * (parameters / privacy["steps"]) ** 0.5 / privacy["expected_batch_size"]
        assert printed(found, length) == length, name


def test_what_fine_tuning_has_reached_stands_in_the_records():
    held = [json.loads(line) for line in (ROOT / "results/fine-tuning/runs.jsonl").read_text().splitlines()]
    parts = {
        "a new head": "head",
        "the last layer and a head": "last layer",
        "biases and a head": "biases",
        "LoRA and a head": "lora",
        "LoRA and a head, inputs evened out": "lora, inputs",
        "all weights": "all",
    }
    table = re.findall(
        r"^\| (.*?) \| ([\d,]+) \| (.*? %) \| (.*? %) \| (.*? %) \| (.*? %) \| (.*? %) \| (\d+) s \|",
        CHOOSING.read_text(),
        re.M,
    )
    assert {row[0] for row in table} == set(parts)
    for name, trained, *cells, seconds in table:
        own = [run for run in held if run["part"] == parts[name]]
        first = {run["factor"]: 100 * run["recall@5"] for run in own if run["seed"] == 0}
        (second,) = [run for run in own if run["seed"] == 1]
        assert [f"{first[factor]:.1f} %" for factor in (0.1, 0.5, 1.0, 2.0)] == cells[:4]
        assert f"{100 * second['recall@5']:.1f} %" == cells[4]
        assert second["factor"] == max(first, key=lambda factor: first[factor])
        assert trained == f"{own[0]['trained_numbers']:,}"
        assert seconds == f"{statistics.median(run['cpu_seconds'] for run in own):.0f}"


def test_the_page_on_performance_prints_the_recorded_times_of_loading():
    text = (ROOT / "docs/performance.md").read_text()
    records = [json.loads(line) for line in (ROOT / "results/bench/loading.jsonl").read_text().splitlines()]
    assert len({record["draws"] for record in records}) == 1
    medians = {
        train: [
            statistics.median(r["seconds"] for r in records if (r["train"], r["workers"]) == (train, workers))
            for workers in (0, 1, 2, 4, 8)
        ]
        for train in (False, True)
    }
    for name, train in (("loading", False), ("loading and training", True)):
        assert f"| {name} | {' | '.join(f'{seconds:.1f} s' for seconds in medians[train])} |" in text
    assert f"Four workers load {medians[False][0] / medians[False][3]:.1f} times as fast as none" in text


def test_what_helps_rare_classes_stands_in_the_records():
    records = [json.loads(line) for line in (ROOT / "results/imbalance/runs.jsonl").read_text().splitlines()]
    ways = {
        "nothing": ("nothing", "argmax"),
        "decide by counts": ("nothing", "by counts"),
        "shifted loss": ("shifted loss", "argmax"),
        "weights": ("weights", "argmax"),
        "rates": ("rates", "argmax"),
        "rates by the root, by counts": ("rates to the 1/2", "by counts"),
        "shift by paid recall": ("nothing", "by paid recall"),
    }
    lines = CHOOSING.read_text().partition("## Rare classes\n")[2].splitlines()
    table = [line for line in lines if re.match(r"\| [\w ,]+ \| (0\.1|1\.5) \|", line)]
    assert len(table) == 11
    for line in table:
        name, norm, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        way, decision = ways[name]
        names = {way, f"{way}, C = {norm}"} if norm == "0.1" else {f"{way}, C = {norm}"}
        shown: list[str] = []
        for task in ("adult", "sections"):
            runs = [run for run in records if (run["task"], run["factor"]) == (task, 1.0) and run["way"] in names]
            assert len(runs) == 3, line
            assert all(run["epsilon"] <= {"adult": 1.0, "sections": 3.0}[task] for run in runs)
            for key in ("accuracy", "recall", "rare recall"):
                values = [100 * run[decision][key] for run in runs]
                shown.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
        assert cells == shown, f"| {name} | {norm} | {' | '.join(shown)} |"


VERDICTS = ("holds", "does not hold here", "false as stated", "misprinted (", "not testable here (")


def test_every_claim_of_the_papers_has_a_verdict_that_rests_on_a_test_or_on_records():
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in (ROOT / "docs/papers/claims.md").read_text().splitlines()
        if re.match(r"\| [A-D]\d+ \|", line)
    ]
    counts = {"A": 23, "B": 25, "C": 29, "D": 23}
    assert [row[0] for row in rows] == [f"{paper}{n}" for paper, count in counts.items() for n in range(1, count + 1)]
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    shown: dict[str, str] = {}
    for name, *_, ours, verdict in rows:
        assert verdict.startswith(VERDICTS), name
        named, links = set(re.findall(r"`(test_\w+)`", ours)), re.findall(r"\]\(\.\./\.\./(results/[^)]+)\)", ours)
        assert named <= tests, name
        if not verdict.startswith(("not testable", "false")):
            assert named or links, name
        checks = [link for link in links if link.startswith("results/claims/")]
        for link in checks:
            if link not in shown:
                shown[link] = table(Path(link).stem, read(ROOT / link))
        for number in re.findall(r"\d[\d.e-]* ± [\d.e-]*\d", ours) if checks else ():
            assert any(number in shown[link] for link in checks), (name, number)


@pytest.mark.parametrize("bench", [images, texts])
def test_the_tables_of_images_and_texts_are_those_of_their_records(bench: Any):
    assert f"|---|\n{untuned.means(bench.OUT, bench.METHODS)}\n\n" in CHOOSING.read_text()


def test_the_tables_of_defaults_are_those_of_their_records():
    records = read(tables.OUT)
    measured = list(dict.fromkeys(one["half"] for one in records))
    assert all(halves()[one["set"]] == one["half"] for one in records)
    for metric, half in itertools.product((None, "log_loss"), measured):
        assert f"|---|\n{tables.changes(metric, half=half)}\n\n" in CHOOSING.read_text()
    in_view = "\n".join(confidence.table_of(half) for half in ("second", "judgement", "development"))
    of_chance = chance.table_of(read(chance.OUT))
    found = (of_chance, confidence.table_of("third"), in_view, random_fifths.rows(), random_features.rows_of_page())
    for said in ("\n".join(map(tables.ranks, measured)), tables.trials(), *found):
        assert f"|---|\n{said}\n\n" in CHOOSING.read_text()
    assert [one["median"] for one in read(chance.OUT) if one["set"] is None] == [of_chance.count("\n") + 1] == [7]
    for rows in (defaults.networks(), convolutions.table(convolutions.FORMER), convolutions.table()):
        assert f"|---|\n{rows}\n\n" in CHOOSING.read_text()
    first = [one for one in read(convolutions.OUT) if (one["clip"], one["seed"]) == (1.0, 0)]
    judged = [one for one in first if one["half"] == "judged" and "20" not in one["task"]]
    best = {one["task"]: max(own["accuracy"] for own in judged if own["task"] == one["task"]) for one in judged}
    behind = [best[one["task"]] - one["accuracy"] for one in judged if one["factor"] == 1]
    assert len(behind) == 7
    assert sorted(behind)[5] == 0
    assert max(behind) == pytest.approx(0.02, abs=0.005)
    digits = [one for one in read(ROOT / "results/defaults/runs.jsonl") if one["task"] == "digits"]
    means = {f: statistics.mean(one["accuracy"] for one in digits if one["factor"] == f) for f in (0.25, 0.5, 1, 2, 4)}
    assert f" {', '.join(f'{mean:.3f}'[1:] for mean in means.values())}." in CHOOSING.read_text()
    for file in ("clipping", "clipping_digits"):
        norms = defaultdict[float, list[dict[str, float]]](list)
        for record in read(ROOT / f"results/features/{file}.jsonl"):
            norms[record["max_grad_norm"]].append(record)
        for name, shown in (("accuracy", lambda mean: f"{100 * mean:.1f} %"), ("log_loss", lambda mean: f"{mean:.3f}")):
            means = [statistics.mean(one[name] for one in norms[norm]) for norm in sorted(norms)]
            assert f"| {' | '.join([name.replace('_', ' '), *map(shown, means)])} |" in CHOOSING.read_text()


def test_the_ways_to_train_on_texts_are_those_of_the_record():
    assert trainer_texts.table() in (ROOT / "docs/integrations.md").read_text()
