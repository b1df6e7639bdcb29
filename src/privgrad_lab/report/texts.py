"""Numbers of a report as text, for the web page and for a table on a terminal of 80 columns."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from privgrad.accounting.accountant import rounded_up, two_decimals_up
from privgrad.types import SHUFFLED
from privgrad_lab import records as recorded
from privgrad_lab.metrics import title
from privgrad_lab.records import Record
from privgrad_lab.tuner import Verdict, judge

EDGE, OPEN, PLATEAU = "⚠ edge", "⚠ open end", "plateau"
MEANINGS = {
    EDGE: "the chosen value is the smallest or the largest one tried; a better one may lie outside.",
    OPEN: "the seeds do not show that both ends of the grid are worse.",
    PLATEAU: "rates next to the chosen one are as good, within the spread over seeds.",
}


def verdicts(records: Sequence[Record]) -> dict[str, Verdict]:
    """Return the verdict on the grid of each tuned method; empty unless some method was tuned over noise steps."""
    # Older comparisons, over learning rates alone, have one seed in tuning and therefore no spread to judge by.
    tuning, key = recorded.in_phase(records, "tuning"), recorded.tuned_by(records)
    if not any(map(recorded.is_by_noise, tuning)):
        return {}
    by = "train_loss" if key == "raw_train_loss" else key.removeprefix("validation_")
    tuned = {name: runs for name, runs in recorded.by_method(tuning).items() if recorded.numbers(runs, key)}
    return {name: judge(runs, name, by) for name, runs in tuned.items()}


def judged(records: Sequence[Record], rate: str) -> dict[str, Verdict]:
    """Return the verdicts on grids of at least two rates of one kind: "noise_step" or "lr"."""
    kinds = {True: "lr", False: "noise_step"}
    found = verdicts(records).items()
    return {name: v for name, v in found if len(v.rates) > 1 and kinds[v.best.noise_step is None] == rate}


def mark(verdict: Verdict) -> str:
    """Return the short mark of a verdict, a key of MEANINGS; empty if there is nothing to note."""
    if len(verdict.rates) < 2:
        return ""
    if verdict.leads_at is not None:
        return EDGE
    if not verdict.is_inside:
        return OPEN
    return PLATEAU if verdict.low != verdict.high else ""


_EDGES = (("learning rate", "lr"), ("clipping norm", "norm"), ("radius", "radius"), ("local lr", "local_lr"))
_DASH = "–"
SIMULATED = "∞ (simulates ε): the mean gradients have the noise of a plan of this ε, in smaller batches; NOT private."
TUNED_TITLES = {
    "noise_step": "noise step u",
    "lr": "learning rate",
    "max_grad_norm": "clipping norm C",
    "radius": "radius",
    "local_lr": "local learning rate",
}


def tuned_by_text(records: Sequence[Record]) -> str:
    """Return the measurement that tuning compared, in words."""
    by = recorded.tuned_by(records).replace("raw_train_loss", "training loss (NOT PRIVATE)").replace("_", " ")
    return by.replace("accuracy", recorded.score_of(records))


def method_texts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows of `summarize` as texts, with the verdicts on grids, for the terminal and for the page."""
    rows, found = recorded.summarize(records), verdicts(records)
    is_mixed = len({row["rate"] for row in rows}) > 1
    texts: list[dict[str, Any]] = []
    for row in rows:
        verdict, text = found.get(row["method"]), row_texts(row, names_rate=is_mixed)
        if verdict is not None:
            others = " and ".join(name for name, key in _EDGES[1:] if row[f"{key}_at_edge"])
            text |= {"at_edge": others, "marks": list(filter(None, [mark(verdict)])), "grid": verdict.text}
            text["grid_warns"] = mark(verdict) in (EDGE, OPEN)
        texts.append(text)
    return texts


def rate_title(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how the rates of `summarize` rows were given: "u" (noise step), "lr", or "rate" if both occur."""
    kinds = {{"noise_step": "u", "lr": "lr"}[row["rate"]] for row in rows}
    return kinds.pop() if len(kinds) == 1 else "rate"


def row_texts(row: Mapping[str, Any], *, names_rate: bool = False) -> dict[str, Any]:
    """Return one row of `summarize` as texts; with `names_rate`, the rate with its name."""
    others = {"C": row["max_grad_norm"] if row["norm_at_edge"] is not None else None}
    others |= {name: row[key] for name, key in _EDGES[2:]} | {"bands": row["bands"] if row["bands"] != 1 else None}
    rate, measured = row[row["rate"]], row["noise_step"] if row["rate"] == "lr" else None
    name = f"{rate_title([row])} " if names_rate else ""
    tuned = {name: f"{name} {value:g}" for name, value in others.items() if value is not None}
    ends = {"C" if key == "norm" else name for name, key in _EDGES if row[f"{key}_at_edge"]}
    cost, simulated = epsilon_text(row["epsilon"]), row["simulates_epsilon"]
    if recorded.is_finite(simulated):
        cost = f"∞ (simulates {epsilon_text(simulated)})"
    reached = _spread_text(row["test_accuracy_mean"], row["test_accuracy_std"], row["score"])
    metrics = {title(name): _spread_text(found["mean"], found["std"]) for name, found in row["metrics"].items()}
    metrics |= {} if row["test_accuracy_mean"] is None else {row["score"]: reached}
    loss = _spread_text(row["test_loss_mean"], row["test_loss_std"])
    score = row["score"] if row["lead"]["metric"] == row["score"] else ""  # as `number_text` takes it
    return {
        "method": row["method"],
        "lead": {**metrics, "loss": loss}.get(row["lead"]["metric"], reached),
        "loss": loss,
        "metrics": {name: text for name, text in metrics.items() if name != row["lead"]["metric"]},
        "score": score,
        "difference": difference_texts(row["difference"], score),
        "epsilon": cost if row["seeds"] else _DASH,
        "uncovered": row["sampling"] == SHUFFLED,
        "rate": f"{name}{rate:g}" if rate is not None else ("several" if row["seeds"] else _DASH),
        "measured": "" if measured is None else f"u {measured:.2g}, measured",
        "others": list(tuned.values()),
        "tuned": [line for name, one in tuned.items() for line in (one, *[EDGE] * (name in ends))],
        "own": row["own"].split(", ") if row["own"] else [],
        "at_edge": " and ".join(name for name, key in _EDGES if row[f"{key}_at_edge"]),
        "marks": [EDGE] if row["lr_at_edge"] else [],
        "grid": "",
        "grid_warns": False,
        "seeds": str(row["seeds"]),
        "clipped": _share_text(row["raw_clip_fraction"]),
        "few_clipped": row["raw_least_clipped"] is not None and row["raw_least_clipped"] < recorded.FEW_CLIPPED,
        "floored": _share_text(row["fraction_floored"]),
        "seconds": f"{row['seconds']:.1f}" if recorded.is_finite(row["seconds"]) else _DASH,
    }


def number_text(value: float, score: str = "", unit: str = " %") -> str:
    """Return a number as text: a score of this name, or a difference of two, in percent unless it is R2."""
    if score not in ("", "R2"):
        return f"{100 * value:.1f}{unit}"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.1f}"  # an error in the units of a label may be large


def difference_texts(found: Mapping[str, Any] | None, score: str = "") -> list[str]:
    """Return a difference of two methods, its interval and its verdict; an empty list for None."""
    if found is None:
        return []
    ends = [number_text(one, score, "") for one in (found["mean"], *found["interval"])]
    if found["verdict"] != "level":  # the interval has no 0, and shows none
        exact = (one * (1 if score in ("", "R2") else 100) for one in (found["mean"], *found["interval"]))
        ends = [text if text.strip("-0.") else f"{one:.1g}" for text, one in zip(ends, exact, strict=True)]
    return [ends[0], f"({ends[1]} to {ends[2]})", found["verdict"]]


def interval_text(ends: Sequence[float] | None, score: str = "") -> str:
    """Return a confidence interval of a score, or of another metric, as text."""
    return "no interval" if ends is None else f"95 % interval {' to '.join(number_text(e, score, '') for e in ends)}"


def _share_text(share: float | None) -> str:
    """Return a share in percent as text; a small one with a decimal, so that it is not rounded up to FEW_CLIPPED."""
    if share is None or not math.isfinite(share):
        return _DASH
    return f"{100 * share:.1f} %" if 0 < share < recorded.FEW_CLIPPED else f"{100 * share:.0f} %"


def group_title(group: Mapping[str, float]) -> str:
    """Return the title of a group of classes: their number, and the number of examples of each."""
    sizes = f"{group['from']:g}" if group["from"] == group["to"] else f"{group['from']:g} to {group['to']:g}"
    return f"{group['classes']:g} × {sizes} examples"


def trainings_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of trainings, and each method's, of the rows of `summarize`; empty for a single training."""
    counts = {row["method"]: row["trainings"] for row in rows}
    total = f"{sum(counts.values())} trainings"
    total += ", tuning included" if any(row["tuning_trainings"] for row in rows) else ""
    if sum(counts.values()) < 2 or len(counts) == 1:
        return "" if sum(counts.values()) < 2 else f"{total}."
    if len(set(counts.values())) == 1:
        return f"{total}: {next(iter(counts.values()))} for each method."
    if len(counts) <= 4:
        return f"{total}, not equally many: {', '.join(f'{count} ({name})' for name, count in counts.items())}."
    return f"{total}, not equally many: between {min(counts.values())} and {max(counts.values())} for each method."


def _spread_text(mean: float | None, std: float | None, score: str = "") -> str:
    if mean is None or not math.isfinite(mean):
        return _DASH if mean is None else "not finite"
    text = number_text(mean, score)
    return text if std is None else f"{text} ± {number_text(std, score, '')}"


def epsilon_text(epsilon: float | None) -> str:
    """Return epsilon rounded up, never down, to two decimals (two digits if it is below 0.1)."""
    if epsilon is None or not math.isfinite(epsilon):
        return "not private"
    return "over 1000000" if epsilon > 1e6 else two_decimals_up(epsilon)


def private_text(name: str, reached: str, epsilon: float) -> str:
    """Return the result of a private training in words: "A private model with 94.0 % accuracy at epsilon 3", say."""
    what = f"{reached} {name}" if reached.endswith("%") else f"{name} {reached}"
    return f"A private model with {what} at epsilon {rounded_up(epsilon, 3)}"


def differences_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the differences of `summarize` rows are, in one sentence; "" without any."""
    found = next((row["difference"] for row in rows if row["difference"] is not None), None)
    what = "paired by seed, with 95 % intervals (t). Level: the interval holds 0."
    return "" if found is None else f"Differences are to {found['to']}, {what}"


def edge_text(rows: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on compared methods whose tuned value is at an end of its grid; "" without a verdict on any."""
    names = [text["method"] for text in texts if EDGE in text["marks"] + text["tuned"]]
    is_told = names and any(row["difference"] is not None for row in rows)
    return f"At the edge of its grid: {', '.join(names)}. Verdicts hold for this grid only." if is_told else ""


def below_text(records: Sequence[Record], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on methods without noise that are worse than private ones; "" without any."""
    sign = -1 if recorded.is_cost(recorded.leading(records)) else 1
    ranked = [(sign * row["lead"]["mean"], row) for row in rows if recorded.is_finite(row["lead"]["mean"])]
    texts = [
        f"{one['method']} is worse than {other['method']}: it is not tuned well enough to be a reference."
        for (mean, one), (least, other) in itertools.product(ranked, ranked)
        if one["non_private"] and not other["non_private"] and mean < least
    ]
    return " ".join(texts)


def open_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the methods of `summarize` rows that train without noise; "" without any."""
    names = " and ".join(row["method"] for row in rows if row["non_private"])
    return f"{names}: trained without noise, so its results may reveal the data. No ε here counts it." if names else ""


def total_text(total: Mapping[str, Any], *, tuned: bool) -> str:
    """Describe the total cost of all trainings on the same data, from `metadata_of`, in one or two sentences."""
    runs, cost = total["runs"], epsilon_text(total["value"])
    if cost == "not private":
        simulated = {"all": "they simulate a plan", "tuning": "tuning simulates the plan"}
        who = simulated.get(total.get("simulated") or "")
        why = f": {who} in smaller batches" if who else ""
        return f"{runs} trainings used the same data; together they have no finite ε{why}."
    given = "" if total.get("covered", True) else " if batches had been Poisson samples, which they were not"
    if runs == 1:
        return f"Only this training is counted here: it cost ε = {cost}{given}."
    tuning = ", tuning included" if tuned else ""
    save = ", except the choice of learning rates: training losses without noise chose them, and no ε covers that"
    what = f"{runs} trainings{' with noise' if total.get('others') else ''}"
    return (
        f"These {what} used the same data: together they cost ε = {cost}{tuning}{given}. This, not the ε of "
        f"one training, is the price of everything reported here{save if total.get('by_training_loss') else ''}."
    )


def constants_text(records: Sequence[Record]) -> str:
    """Return what models without inputs would reach, in one or two sentences; "" if that is not recorded."""
    finals = recorded.in_phase(records, "final")
    shares = {share for record in finals if (share := record.get("most_frequent_class")) is not None}
    texts = [f"The most frequent class alone has accuracy {100 * shares.pop():.1f} %."] if len(shares) == 1 else []
    texts += ["Chance has AUC 0.5."] if texts and recorded.lead_of(records) == "AUC" else []
    for constant in sorted({record["class_shares_loss"] for record in finals if "class_shares_loss" in record})[:1]:
        worse = [record for record in finals if (record["test_loss"] or 0.0) > constant]
        names = sorted({record["method"] for record in worse})
        several = len({record["method"] for record in finals}) > 1
        texts += [losses_text(constant, names if several else [], of_head=any(map(clips_hard, worse)))] if worse else []
    return " ".join([*texts, *dict.fromkeys(filter(None, map(below_mean_text, finals)))])


def below_mean_text(record: Mapping[str, Any]) -> str:
    """Return a sentence for a number or a count that is predicted worse than by the labels' mean; "" otherwise."""
    found = record.get("metrics") or {}
    deviance = found.get("sklearn.metrics:mean_poisson_deviance", 0.0)
    is_worse = found.get("r2", 0.0) < 0 or deviance > record.get("mean_deviance", math.inf)
    return f"{record['method']} is worse than always saying the mean of the test labels." if is_worse else ""


def clips_hard(record: Mapping[str, Any]) -> bool:
    """Return whether a run trained a head with so small a C that its probabilities cannot follow."""
    return record.get("head") is not None and (record.get("max_grad_norm") or 1.0) < 1.0


def losses_text(constant: float, methods: Sequence[str] = (), *, of_head: bool) -> str:
    """Return a sentence for a test loss (of `methods`, if there are several) above that of the class shares."""
    of = f" of {', '.join(methods)}" if methods else ""
    text = f"The class shares alone would have a smaller loss, {constant:.3f}: the probabilities{of} are far off"
    advice = " On public data, or at the cost of another training, try max_grad_norm = 1 (docs/before-training.md)."
    return f"{text}, even if they rank well.{advice if of_head else ''}"


_LEAST_ROOM = 16  # for the names of methods, if they are as long; with less room, other columns become narrower


def summary_table(records: Iterable[Record]) -> Table:
    """Return the rows of `summarize` as a table for a terminal of 80 columns, NOT private as the records."""
    records = list(records)
    rows, texts = recorded.summarize(records), method_texts(records)
    title = rate_title(rows)
    columns = {
        "method": [row["method"] for row in texts],
        recorded.lead_of(records): ["\n".join([row["lead"], *row["difference"][:0:-1]]) for row in texts],
        "loss": [row["loss"] for row in texts],
        "metrics": ["\n".join(f"{k} {v}" for k, v in row["metrics"].items()) for row in texts],
        "ε": [row["epsilon"] + ("\n⚠ not covered" if row["uncovered"] else "") for row in texts],
        title: ["\n".join([row["rate"], *row["marks"], *row["tuned"], *row["own"]]) for row in texts],
        "seeds": [row["seeds"] for row in texts],
        "clipped": [row["clipped"] + ("\n⚠ low" if row["few_clipped"] else "") for row in texts],
        "floored": [row["floored"] for row in texts],
    }
    if len({row["seeds"] for row in rows}) == 1:  # the caption has it
        del columns["seeds"]
    for name in ("clipped", "floored", "metrics"):
        if set(columns[name]) <= {"–", ""}:
            del columns[name]
    columns = _narrowed(columns, title)
    widths, for_names = _widths(columns)
    longest = max((len(name) for name in columns["method"]), default=0)
    # Text, not str: rich must not read a method's name as markup.
    caption = Text(_caption(records, rows, texts), style="table.caption")
    table = Table(caption=caption, caption_justify="left")
    table.add_column("method", width=max(min(longest, for_names), len("method")), overflow="fold")
    for name, width in zip(list(columns)[1:], widths, strict=True):
        table.add_column(name, justify="right", width=width)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _narrowed(columns: dict[str, list[str]], title: str) -> dict[str, list[str]]:
    """Return the columns, with numbers on more lines where there is too little room for the names of methods."""

    def fits() -> bool:
        return _widths(columns)[1] >= min(max(map(len, columns["method"]), default=0), _LEAST_ROOM)

    if not fits() and {"clipped", "floored"} <= columns.keys():  # one below the other
        both = zip(columns.pop("clipped"), columns.pop("floored"), strict=True)
        columns["clipped\nfloored"] = ["\n".join((one.replace("\n⚠ low", " ⚠"), other)) for one, other in both]
    for name in [*(name for name in columns if name not in ("method", "metrics", title)), "metrics", title]:
        if not fits() and name in columns:  # a spread, a metric or a tuned value has a line of its own
            breaks = r"() (?=±|\(|to )|(?<=not|ver) |(?<=simulates) "
            breaks = r"^(mean absolute error|[\w@]+) " if name in ("metrics", title) else breaks
            columns[name] = [re.sub(breaks, r"\1\n", cell, flags=re.MULTILINE) for cell in columns[name]]
    return columns


def _widths(columns: Mapping[str, Sequence[str]]) -> tuple[list[int], int]:
    lines = [[line for cell in (name, *cells) for line in cell.split("\n")] for name, cells in columns.items()]
    widths = [max(map(len, column)) for column in lines[1:]]
    return widths, 80 - sum(widths) - 3 * len(columns) - 1


def _caption(records: Sequence[Record], rows: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]) -> str:
    counts = {row["seeds"] for row in rows}
    one = "One seed." if any(record.get("seed") is not None for record in records) else "One training."
    spread = f"± one standard deviation over {f'{min(counts)} seeds' if len(counts) == 1 else 'seeds'}."
    seeds = ({0: "", 1: one} if len(counts) == 1 else {}).get(next(iter(counts), 0), spread)
    marks = [one for row in texts for one in row["marks"] + row["tuned"]]
    low = "; ⚠: below 2 %, lower C" if any(row["few_clipped"] for row in texts) else ""
    clipped = f"clipped: share of gradients longer than C in the last tenth of the steps, NOT private{low}."
    lines = (
        f"{seeds} Measured on {recorded.measured_on(records)} examples, without privacy for these.".lstrip(),
        *(constants_text(records), differences_text(rows), edge_text(rows, texts)),
        *(open_text(rows), below_text(records, rows)),
        SIMULATED if recorded.simulated_epsilon(records) is not None else "",
        "u: noise step." if any(row["rate"] == "noise_step" for row in rows) else "",
        f"Tuned by {tuned_by_text(records)}." if recorded.in_phase(records, "tuning") else "",
        clipped if any(row["clipped"] != "–" for row in texts) else "",
        *(f"{one}: {said}" for one, said in MEANINGS.items() if one in marks),
        trainings_text(rows),
    )
    return "\n".join(filter(None, lines))
