"""Write docs/peers.md from the records in results/peers/: `python scripts/peers_page.py`.

`make bench-accuracy` writes accuracy.jsonl there, and `make bench-peers` writes steps.jsonl.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy.run import ALL, PLAN, SEEDS, read  # noqa: E402
from privgrad.accounting.accountant import rounded_up, two_decimals_up  # noqa: E402

PAGE, RECORDS = ROOT / "docs/peers.md", ROOT / "results/peers"
Row = dict[str, Any]
LIBRARIES = {
    "privgrad": "privgrad",
    "opacus": "Opacus",
    "jax-privacy": "JAX-Privacy",
    "dp-ebm": "DP-EBM (interpret)",
    "diffprivlib": "diffprivlib",
}
TASKS = {
    "adult": "Adult: incomes of the census, epsilon 1",
    "fashion-mnist": "Fashion-MNIST: images of clothing, epsilon 3",
    "tags": "Debian tags: several of 551 for a text, epsilon 3",
    "sections": "Debian sections: one of 58 for a text, epsilon 3",
}
VARIANTS = {
    ("privgrad", "recipe"): "its recipe",
    ("privgrad", "example"): "its defaults, without features",
    ("opacus", "example"): "its example",
    ("opacus", "readme"): "settings of its README",
    ("opacus", "features"): "its settings, our features",
    ("opacus", "recipe"): "our features and settings",
    ("jax-privacy", "example"): "its example",
    ("jax-privacy", "features"): "its settings, our features",
    ("jax-privacy", "recipe"): "our features and settings",
    ("dp-ebm", "example"): "its defaults",
    ("dp-ebm", "features"): "its defaults, our bins",
    ("diffprivlib", "example"): "logistic regression, its defaults",
    ("diffprivlib", "naive-bayes"): "naive Bayes, its defaults",
    ("diffprivlib", "features"): "logistic regression, our features",
}
STEPS = {
    "ordinary": "ordinary",
    "plain": "privgrad",
    "preconditioned": "preconditioned",
    "vmap": "privgrad's vmap",
    "opacus-hooks": "Opacus hooks",
    "opacus-ghost": "Opacus ghost",
    "fastdp": "FastDP",
    "opake": "Opake",
    "jax-privacy": "JAX-Privacy",
}
INTRODUCTION = """# Other libraries

<!-- `python scripts/peers_page.py` writes this page from results/peers/. Do not edit it. -->

This page compares privgrad with other libraries: first accuracy at equal epsilon and delta, then the time and the
memory of a step. Anyone can repeat both:

```console
make bench-accuracy
make bench-peers
```

Each command installs the other libraries in environments of their own. If you stop one, run it again: it continues.
The records are in [results/peers/](../results/peers/), and `benchmarks/accuracy/` has one short
script for each library.

## Accuracy

All libraries get the same training rows, the same test rows and the same public facts. Nothing is tuned for this page.
Each row of a table is the mean over seeds, ± the standard deviation, best first. Epsilon is what the library itself
accounts, rounded up. Times are processor time on one thread: calibration of the noise, compilation, training and
prediction. They do not include our features. Some trainings ran on a GPU, several at once. They have no time, and a
time says of how many seeds it is.

Read the rows like this:

- **Its example** takes the model and the settings of an example that the library itself publishes. The head of each
  script names the example. Noise is set so that epsilon is that of the task.
- **Its settings, our features** is a linear model on the features of our [recipe](recipes.md).
- **Our features and settings** is our recipe, trained by the other library. It shows whether a difference comes from
  the library or from the recipe.
"""
UNFAIR = """## What is unfair

- **Our recipes know the tasks.** The bins of Adult were chosen with the file in view. The features of Fashion-MNIST
  and the noise step of the texts were chosen on held-out training rows. The examples of the other libraries were
  written for other data, mostly MNIST. For a comparison without this, look at "its defaults, without features".
- **Ours have pretrained features for texts.** MiniLM was trained on public web text. No example of another library gets
  it, except in the rows with our features.
- **Examples are not advice.** The authors of the other libraries wrote their examples to be short. A user who tunes
  would do better with each library, and so would a user of privgrad. On Adult, DP-EBM reaches 85.8 % with a learning
  rate chosen on test rows ([choosing-evidence.md](choosing-evidence.md#adult-next-to-dp-ebm)).
- **On tags, 46.6 % needs no text.** It is the recall of five fixed tags for every text: those with the largest shares.
  Rows near it learned little more, because their settings were made for other data. On sections, the largest section
  gives 10.4 %.
- **Opacus has no example for tables.** Its row has the settings of its MNIST example, with a linear model. Its example
  for texts turns Poisson sampling off, which its accounting does not cover; here it stays on.
- **JAX-Privacy has no example for texts** that starts without a large pretrained model. Its row has the settings of its
  logistic regression on frequencies of public words. That example has noise with memory, with four bands. Its
  epsilon holds if one example is replaced by none; privgrad and Opacus add or remove one.
- **privgrad without features** trains the network of Opacus' example on images, with the batch size and the number of
  steps of a recipe of ours. C and the noise step are those that `pg.suggest` finds on synthetic images.
- **privgrad had calibrations of the noise** in a cache then, so most of its times do not include one.
- **diffprivlib promises more.** Its delta is 0. With the others, any outcome is at most e^epsilon times as likely with
  a person's data as without, plus delta.
- **DP-EBM and diffprivlib are for tables.** They do not apply to images or texts.
- **The recipe for Adult counts 24,000 people**, a public number. The other libraries count the 24,421 rows, so they
  need a little less noise.
- **Trainings have research seeds**, so that they can be repeated. Noise that can be predicted is not private.
"""


def accuracy(records: list[Row]) -> str:
    """A table for each task, and what has no record yet."""
    parts: list[str] = []
    for task in ALL:
        parts += [f"### {TASKS[task]}\n", task_table([row for row in records if row["task"] == task]), ""]
        if absent := missing(task, records):
            parts += [f"Not run yet: {'; '.join(absent)}.\n"]
    return "\n".join(parts)


def task_table(records: list[Row]) -> str:
    """One line for each library and variant, best first."""
    if not records:
        return "There are no records yet."
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in records:
        groups[row["library"], row["variant"]].append(row)
    order = sorted(groups, key=lambda key: -mean(row["score"] for row in groups[key]))
    metric = records[0]["metric"]
    lines = [f"| library | what | {metric} | epsilon | delta | time |", "|---|---|---|---|---|---|"]
    for key in order:
        rows = groups[key]
        epsilon = max(row["epsilon"] for row in rows)
        cells = [
            LIBRARIES[key[0]],
            VARIANTS[key],
            score(rows),
            two_decimals_up(epsilon),
            rounded_up(rows[0]["delta"], 3),
            time(rows),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def time(rows: list[Row]) -> str:
    """The mean of seconds on one thread, unless all trainings ran on a GPU."""
    slow = [row["cpu_seconds"] for row in rows if not row.get("gpu")]
    seeds = "" if len(slow) == len(rows) else f" ({len(slow)} of {len(rows)} seeds)"
    return f"{mean(slow):.1f} s{seeds}" if slow else "on a GPU"


def score(rows: list[Row]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    values = [100 * row["score"] for row in rows]
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    seeds = "" if len(values) == len(SEEDS) else f" ({len(values)} of {len(SEEDS)} seeds)"
    return f"{mean(values):.1f} %{spread}{seeds}"


def missing(task: str, records: list[Row]) -> list[str]:
    """The rows of a task that have no record."""
    held = {(row["library"], row["variant"]) for row in records if row["task"] == task}
    return [
        f"{LIBRARIES[library]}, {VARIANTS[library, variant]}"
        for library, variants in PLAN.items()
        for variant, tasks in variants.items()
        if task in tasks and (library, variant) not in held
    ]


def versions(records: list[Row]) -> str:
    """Versions, processor and dates of the accuracies."""
    if not records:
        return ""
    found: dict[str, set[str]] = defaultdict(set)
    for row in records:
        for name, version in row["versions"].items():
            found[name].add(version)
    names = ", ".join(f"{name} {' and '.join(sorted(held))}" for name, held in sorted(found.items()))
    fast = [row for row in records if row.get("gpu")]
    dates, cpus = sorted({row["date"] for row in records}), sorted({row["cpu"] for row in records if row not in fast})
    gpus = f"; {len(fast)} of {len(records)} trainings on {', '.join(sorted({row['gpu'] for row in fast}))}"
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = f"{'; '.join(cpus)}, one thread{gpus if fast else ''}"
    return f"Versions: {names}. Processor: {machines}. Date: {span}. Command: `make bench-accuracy`.\n"


def steps(records: list[Row]) -> str:
    """Time and memory of a step over the ordinary one, and what was not measured."""
    text = "## Time and memory of a step\n\n"
    if not records:
        return (
            text + "There are no records of `make bench-peers` yet. [performance.md](performance.md) has older ones.\n"
        )
    text += (
        "All methods of a workload take turns in one process. The numbers are ratios to an ordinary step, with\n"
        "torch's Adam and without privacy, of processor time on one thread: medians of ten rounds, of three for steps\n"
        "above 5 s. privgrad also checks the first, second, fourth, eighth step and so on, which a median leaves out;\n"
        "[models.md](models.md) has the share that checks take of a training. [performance.md](performance.md)\n"
        "explains the workloads.\n\n"
    )
    methods = [name for name in STEPS if any(row["method"] == name for row in records)]
    for field, title in {"ratio": "Time", "peak_memory_ratio": "Peak memory"}.items():
        lines = [
            f"| {title} | " + " | ".join(STEPS[name] for name in methods) + " |",
            "|---" * (len(methods) + 1) + "|",
        ]
        for workload in dict.fromkeys(row["workload"] for row in records):
            cells = {row["method"]: row for row in records if row["workload"] == workload}
            lines.append(f"| {workload} | " + " | ".join(step_cell(cells.get(name), field) for name in methods) + " |")
        text += "\n".join(lines) + "\n\n"
    if later := [row for row in records if row["machine"] != ordinary_of(row, records)["machine"]]:
        named = "; ".join(f"{row['workload']}, {STEPS.get(row['method'], row['method'])}" for row in later)
        text += f"Measured in a later run, over an ordinary step of that run: {named}.\n\n"
    skipped = [row for row in records if row["skipped"]]
    text += "A dash means that the method was not measured:\n\n" if skipped else ""
    text += "".join(
        f"- {row['workload']}, {STEPS.get(row['method'], row['method'])}: {row['skipped']}\n" for row in skipped
    )
    first, found = records[0], {f"{name} {v}" for row in records for name, v in (row.get("versions") or {}).items()}
    machine = ", ".join(f"{name} {value}" for name, value in first["machine"].items() if value is not None)
    return (
        text
        + f"\nVersions: {', '.join(sorted(found))}. Machine: {machine}. Date: {first['date']}. "
        + "Command: `make bench-peers`.\n"
    )


def ordinary_of(row: Row, records: list[Row]) -> Row:
    """The ordinary step of a row's workload."""
    return next(one for one in records if (one["workload"], one["method"]) == (row["workload"], "ordinary"))


def step_cell(row: Row | None, field: str) -> str:
    """The value of a cell: seconds and megabytes for the ordinary step, ratios for the others."""
    if row is not None and row["method"] == "ordinary":
        if field == "ratio":
            return f"{1000 * row['seconds']:.0f} ms" if row.get("seconds") else "–"
        return f"{row['peak_mb']:.0f} MiB" if row.get("peak_mb") else "–"
    value = None if row is None else row.get(field)
    return "–" if value is None else f"{value:.2f}"


def page(accuracies: list[Row], times: list[Row]) -> str:
    """The page, from the records."""
    return "\n".join([INTRODUCTION, accuracy(accuracies), versions(accuracies), UNFAIR, steps(times)])


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(read(RECORDS / "accuracy.jsonl"), read(RECORDS / "steps.jsonl")), encoding="utf-8")


if __name__ == "__main__":
    main()
