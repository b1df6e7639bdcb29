"""The report says what the records say: the numbers, the warnings, and nothing more."""

import html
import io
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from rich.console import Console

from privgrad.errors import PrivacyError
from privgrad_lab.records import summarize, tuned_names, tuned_seeds
from privgrad_lab.report import figures
from privgrad_lab.report.page import write_report
from privgrad_lab.report.paid import result_text
from privgrad_lab.report.texts import difference_texts, summary_table, total_text, trainings_text

RESULTS = Path(__file__).parents[2] / "results"
# The toy regression has records of its own kind, without a report.
TEXTS = {path.parent.name: path.read_text() for path in RESULTS.glob("*/runs.jsonl")}
COMPARISONS = sorted(name for name, text in TEXTS.items() if '"phase": "final"' in text and '"seconds"' in text)
FIXED_WARNING = "The batches had a fixed size. No computation here covers such batches."
SEED_WARNING = "A seed produced the noise. Anyone who knows the seed can remove the noise."
PLAN = {
    "sample_rate": 0.25,
    "steps": 400,
    "expected_batch_size": 256,
    "noise_multiplier": 1.875,
    "max_grad_norm": 0.5,
    "num_examples": 1024,
    "neighboring_relation": "add_or_remove_one",
    "privacy_unit": "example",
    "sampling": "poisson",
    "delta": 1e-5,
    "target_epsilon": 3.0,
    "seed": None,
}


@pytest.fixture
def drawn() -> None:
    """Asked for by tests whose plots are looked at."""


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are tested without drawing, which takes most of a report's time."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(figures, "png", lambda _: bytes(24))
        monkeypatch.setattr(figures, "svg", lambda _: bytes(24))


def tuned(records: list[dict[str, Any]], name: str = "lr") -> dict[str, list[tuple[float, float]]]:
    """Return the means over the seeds."""
    found = tuned_seeds(records, name)
    return {method: [(value, statistics.fmean(seeds)) for value, seeds in points] for method, points in found.items()}


def final(method: str = "DP-AdamBC", seed: int = 0, accuracy: float | None = 0.9, **changes: Any) -> dict[str, Any]:
    curve = [
        {"step": step, "epsilon": step / 100, "accuracy": (accuracy or 0.5) * step / 300, "loss": 1.0}
        for step in (100, 200, 299)
    ]
    record = {
        "method": method,
        "optimizer": "AdamBC",
        "lr": 0.01,
        "seed": seed,
        "phase": "final",
        "epsilon": 2.99,
        "delta": 1e-5,
        "sampling": "poisson",
        "test_accuracy": accuracy,
        "test_loss": 0.3,
        "validation_accuracy": None,
        "fraction_floored": None,
        "curve": curve,
        "seconds": 3.2,
        "examples_per_second": 12345.6,
        "raw_nonfinite_examples": 0,
    }
    return record | changes


def tuning(method: str = "DP-AdamBC", lr: float = 0.01, accuracy: float | None = 0.8, **changes: Any) -> dict[str, Any]:
    return final(method, 0, None, phase="tuning", lr=lr, test_loss=None, validation_accuracy=accuracy, **changes)


def of_noise(
    method: str = "A",
    u: float = 0.1,
    accuracy: float = 0.8,
    seed: int | None = 0,
    phase: str = "tuning",
    **changes: Any,
) -> dict[str, Any]:
    """A run of a comparison over noise steps, as the runner records it."""
    tested, validated = (accuracy, None) if phase == "final" else (None, accuracy)
    record = final(method, 0, tested) | {
        "phase": phase,
        "seed": seed,
        "lr": None,
        "noise_step": u,
        "max_grad_norm": 1.0,
    }
    record |= {"own": [], "validation_accuracy": validated, "raw_clip_fraction": 0.5, "simulates_epsilon": None}
    return record | changes


def over_grid(method: str, accuracies: dict[float, float], **changes: Any) -> list[dict[str, Any]]:
    """Two tuning runs per noise step, 0.02 apart (a spread of 0.014), and five final runs at the best noise step."""
    runs = [
        of_noise(method, u, accuracy + aside, seed, **changes)
        for u, accuracy in accuracies.items()
        for seed, aside in ((100, 0.01), (101, -0.01))
    ]
    best = max(accuracies, key=lambda u: accuracies[u])
    return runs + [of_noise(method, best, 0.9, seed, "final", **changes) for seed in range(5)]


INSIDE = {0.01: 0.7, 0.025: 0.8, 0.06: 0.7}
PLATEAU = {0.01: 0.7, 0.025: 0.8, 0.06: 0.79, 0.15: 0.7}
OPEN = {0.01: 0.7, 0.025: 0.8, 0.06: 0.79}
EDGE = {0.01: 0.7, 0.025: 0.8, 0.06: 0.9}


def printed(records: list[dict[str, Any]]) -> str:
    """What a terminal of 80 columns shows; none of its lines is wider, and none is cut."""
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(summary_table(records))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    return text


def columns(text: str) -> dict[str, list[str]]:
    """A printed table: heading -> the words in its cells."""
    lines: list[list[str]] = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in ("│", "┃")]
    heads = sum(line[:1] == "┃" for line in text.splitlines())
    rows = list(zip(*lines, strict=True))
    return {str(" ".join(" ".join(row[:heads]).split())): [*" ".join(row[heads:]).split()] for row in rows}


def write(tmp_path: Path, records: list[dict[str, Any]], **metadata: Any) -> str:
    page = write_report(records, {"title": "A title", "plan": PLAN} | metadata, tmp_path / "report")
    assert page == tmp_path / "report" / "index.html"
    return page.read_text(encoding="utf-8")


def words(page: str) -> str:
    """What a reader sees: no tags, no styles, single spaces."""
    body = re.sub(r"<style>.*?</style>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def cells(page: str) -> dict[str, list[str]]:
    """The result table: method -> its cells."""
    table = page.split('<table class="results">')[1].split("</table>")[0]
    rows = [[words(cell) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", row)] for row in table.split("<tr>")[2:]]
    return {row[0]: row[1:] for row in rows}


class Attributes(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, name, value or "") for name, value in attrs]

    def values(self, *names: str) -> list[str]:
        return [value for _, name, value in self.found if name in names]


def pixels(path: Path) -> Any:
    image = pytest.importorskip("PIL.Image").open(path)
    image.load()
    return image


def test_summarize_reduces_the_final_runs_by_hand() -> None:
    accuracies = [0.90, 0.92, 0.97]
    records = [tuning("B", 0.1), tuning("B", 0.01), final("A", 0, 0.5, lr=0.3)]
    records += [
        final("B", seed, accuracy, epsilon=2.9 + seed / 100, fraction_floored=0.3 * seed, test_loss=0.1 * seed)
        for seed, accuracy in enumerate(accuracies)
    ]
    b, a = summarize(records)
    assert (b["method"], b["lr"], b["seeds"], b["sampling"]) == ("B", 0.01, 3, "poisson")
    assert b["test_accuracy_mean"] == pytest.approx(0.93)
    assert b["test_accuracy_std"] == pytest.approx(statistics.stdev(accuracies))
    assert b["test_loss_mean"] == pytest.approx(0.1)
    assert b["test_loss_std"] == pytest.approx(0.1)
    assert b["epsilon"] == pytest.approx(2.92)
    assert b["fraction_floored"] == pytest.approx(0.3)
    assert b["seconds"] == pytest.approx(3.2)
    assert (a["method"], a["seeds"], a["test_accuracy_std"], a["fraction_floored"]) == ("A", 1, None, None)


@pytest.mark.parametrize(
    ("tried", "chosen", "edge"),
    [
        ([0.1, 0.01, 0.001], 0.01, False),
        ([0.1, 0.01, 0.001], 0.1, True),
        ([0.1, 0.01, 0.001], 0.001, True),
        ([0.01, 0.01], 0.01, None),
        ([], 0.01, None),
    ],
)
def test_a_rate_at_the_edge_of_the_grid_is_marked(
    tmp_path: Path, tried: list[float], chosen: float, edge: bool | None
) -> None:
    records = [tuning(lr=lr) for lr in tried] + [final(lr=chosen)]
    assert summarize(records)[0]["lr_at_edge"] is edge
    assert ("⚠ learning rate at the edge" in words(write(tmp_path, records))) is bool(edge)
    assert (tmp_path / "report" / "tuning.png").exists() is (len(set(tried)) > 1)


def test_a_clipping_norm_at_the_edge_is_marked_and_each_value_shows_its_best(tmp_path: Path) -> None:
    accuracies = {(0.1, 0.01): 0.5, (0.1, 0.1): 0.6, (1.0, 0.01): 0.9, (1.0, 0.1): 0.7, (1.0, 1.0): 0.2}
    records = [tuning(lr=lr, accuracy=a, max_grad_norm=norm) for (norm, lr), a in accuracies.items()]
    records.append(tuning(lr=0.01, accuracy=0.8, max_grad_norm=1.0))  # another seed: a mean, not a maximum
    records.append(final(lr=0.01, max_grad_norm=1.0))
    row = summarize(records)[0]
    assert (row["max_grad_norm"], row["norm_at_edge"], row["lr_at_edge"]) == (1.0, True, True)
    assert tuned(records)["DP-AdamBC"] == [(0.01, pytest.approx(0.85)), (0.1, 0.7), (1.0, 0.2)]
    assert tuned(records, "max_grad_norm")["DP-AdamBC"] == [(0.1, 0.6), (1.0, pytest.approx(0.85))]
    assert tuned_names(records) == ["lr", "max_grad_norm"]
    page = words(write(tmp_path, records))
    assert "⚠ learning rate and clipping norm at the edge" in page
    assert "against learning rate and clipping norm C; rings mark" in page
    assert cells((tmp_path / "report/index.html").read_text())["DP-AdamBC"][3].startswith("0.01 C 1 ")


def test_of_losses_the_smallest_is_best() -> None:
    records = [
        tuning(lr=0.1, accuracy=None, validation_loss=loss, max_grad_norm=norm) for norm, loss in ((1, 0.3), (2, 0.5))
    ]
    assert tuned(records)["DP-AdamBC"] == [(0.1, 0.3)]


def test_what_is_measured_on_training_examples_says_so(tmp_path: Path) -> None:
    page = words(write(tmp_path, [final(measured_on="training")]))
    assert "reaches a training accuracy" in page
    assert "were measured without noise on the training examples. They are not private" in page
    assert "test accuracy" not in page.lower()
    assert "held-out" not in page


def test_a_method_with_a_lost_number_gets_no_mean_and_no_epsilon() -> None:
    lost = final("A", 1, None, epsilon=None)
    row = summarize([final("A", 0, 0.99), lost])[0]
    assert (row["test_accuracy_mean"], row["test_accuracy_std"], row["epsilon"]) == (None, None, None)


def test_a_report_about_users_speaks_of_users(tmp_path: Path) -> None:
    plan = PLAN | {"privacy_unit": "user", "perturbation": "w minus its weights after an epoch"}
    records = [tuning(lr=lr, score="recall@5", local_lr=lr) for lr in (0.1, 0.01)]
    page = words(write(tmp_path, [*records, final(score="recall@5", local_lr=0.01)], plan=plan))
    told = page.split("Specification")[0]
    for fact in (
        "reaches a test recall@5 of 90.0 %",
        "Test recall@5",
        "in which one person was added or removed",
        "The unit of protection is one person with all data of this person.",
        "declared to have 1,024 people or more",
        "Expected cohort size B 256",
        "Rounds T 400",
        "Training users n",
        "Clipping norm C, of a user’s update",
        "A user contributes w minus its weights",
        "Validation recall@5 in tuning against learning rate and local learning rate",
    ):
        assert fact in told
    assert not re.search(r"accurac|\bbatch|\bsteps?\b|one example", told, flags=re.IGNORECASE)


def test_a_report_about_people_says_that_their_gradients_are_clipped(tmp_path: Path) -> None:
    """People whose rows privgrad has grouped train nothing themselves."""
    plan = PLAN | {"privacy_unit": "user", "perturbation": "at the weights"}
    told = words(write(tmp_path, over_grid("A", INSIDE), plan=plan)).split("Specification")[0]
    for fact in (
        "in which one person was added or removed",
        "The unit of protection is one person with all data of this person.",
        "declared to have 1,024 people or more",
        "Expected batch size B 256",
        "Steps T 400",
        "Training people n",
        "Clipping norm C, of a person’s gradient",
    ):
        assert fact in told
    assert not re.search(r"users?|cohort|rounds?|updates?", told, flags=re.IGNORECASE)


def test_the_page_shows_the_numbers_of_summarize(tmp_path: Path) -> None:
    records = [final("A", seed, 0.90 + seed / 100, fraction_floored=0.93) for seed in range(3)]
    records += [final("B", seed, 0.70 + seed / 50, lr=1e-3) for seed in range(3)] + [tuning("C")]
    table = cells(write(tmp_path, records))
    for row in summarize(records)[:2]:
        accuracy, _, loss, epsilon, lr, seeds, _, seconds = table[row["method"]]
        assert accuracy == f"{100 * row['test_accuracy_mean']:.1f} % ± {100 * row['test_accuracy_std']:.1f}"
        assert loss == f"{row['test_loss_mean']:.3f} ± {row['test_loss_std']:.3f}"
        assert (float(epsilon), float(lr), int(seeds)) == (row["epsilon"], row["lr"], row["seeds"])
        assert float(seconds) == pytest.approx(row["seconds"])
    assert [table[name][6] for name in "AB"] == ["93 %", "–"]
    assert table["C"] == ["–", "–", "–", "–", "–", "0", "–", "–"]


def test_the_terminal_table_is_whole_at_80_columns() -> None:
    """Whatever the names and numbers: no column vanishes, no number is cut, no line is wider."""
    several = {"max_grad_norm": 0.316, "radius": 0.02, "local_lr": 31.6}
    records = [
        tuning("AdaDPS, by rank, momentum", lr, score="recall@5", **several | {"max_grad_norm": norm})
        for lr, norm in ((3.2e-05, 0.316), (1e-4, 1.0))
    ]
    records += [
        final("AdaDPS, by rank, momentum", seed, accuracy, lr=3.2e-05, test_loss=loss, fraction_floored=1.0, **several)
        for seed, accuracy, loss in ((0, 0.99, 12.345), (1, 0.5, 1234.5))
    ]
    records += [
        final("Averyveryverylongnamewithoutanyspaces", epsilon=float("inf"), accuracy=float("nan")),
        final("fixed", sampling="fixed", epsilon=1e9),
        final("memory", bands=16),
    ]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(summary_table(records))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    held = {word for line in text.splitlines() for cell in re.split("[│┃]", line) for word in cell.split()}
    numbers = "74.5 % 34.6 623.423 864.194 1000000 3.2e-05 0.316 0.02 31.6 100 not finite private covered edge floored"
    assert held >= {*numbers.split(), "recall@5", "seeds", "bands", "16"}


def test_the_total_is_told_in_words() -> None:
    total = {"value": 41.2, "runs": 42, "covered": True, "by_training_loss": False}
    assert total_text(total, tuned=True).startswith(
        "These 42 trainings used the same data: together they cost ε = 41.20, tuning included. This,"
    )
    assert "no ε covers that" in total_text(total | {"by_training_loss": True}, tuned=True)
    assert "which they were not" in total_text(total | {"covered": False}, tuned=False)
    assert total_text(total | {"runs": 1}, tuned=False) == "Only this training is counted here: it cost ε = 41.20."


def test_the_terminal_table_has_every_method_and_reads_no_markup() -> None:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(summary_table([final("[red]A[/red]", 0, 0.912), final("[red]A[/red]", 1, 0.912), final("B", 0, 0.5)]))
    text = console.export_text()
    assert "[red]A[/red]" in text
    assert "91.2 % ± 0.0" in text
    assert "50.0 %" in text


@pytest.mark.parametrize(
    ("epsilon", "shown", "stated"),
    [
        (2.99, "2.99", "2.99"),
        (2.991, "3.00", "2.991"),
        (3, "3.00", "3"),
        (0.00312, "0.0032", "0.00312"),
        (1e9, "over 1000000", "1e+09"),
    ],
)
def test_epsilon_is_never_rounded_down(tmp_path: Path, epsilon: float, shown: str, stated: str) -> None:
    page = write(tmp_path, [final(epsilon=epsilon)])
    assert cells(page)["DP-AdamBC"][2] == shown
    assert f"are protected by differential privacy with epsilon = {stated} and delta = 0.00001." in words(page)


@pytest.mark.parametrize("epsilon", [None, float("inf"), float("nan")])
def test_a_run_without_finite_epsilon_gets_no_guarantee(tmp_path: Path, epsilon: float | None) -> None:
    text = words(write(tmp_path, [final("A"), final("B", epsilon=epsilon)]))
    assert "At least one of these trainings protects nobody: its epsilon is infinite." in text
    assert "are protected by" not in text
    assert "not a comparison at equal privacy" in text
    assert cells((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))["B"][2] == "not private"


def test_simulations_show_both_epsilons_and_no_guarantee(tmp_path: Path) -> None:
    simulation: dict[str, Any] = {"epsilon": float("inf"), "simulates_epsilon": 2.991}
    records = [final("A", **simulation), final("B", epsilon=float("inf"), simulates_epsilon=float("inf"))]
    plan = PLAN | {"target_epsilon": None, "expected_batch_size": 16, "simulates": PLAN}
    total = {"value": float("inf"), "runs": 2, "covered": True, "by_training_loss": False, "simulated": "all"}
    page = write(tmp_path, records, plan=plan, total_epsilon=total)
    assert [cells(page)[name][2] for name in "AB"] == ["∞ (simulates 3.00)", "not private"]
    text = words(page)
    assert "These trainings simulate a plan in smaller batches. They are not private" in text
    assert "the final trainings have ε = ∞" in text
    assert "(16 in place of 256 on average)" in text
    assert "would have ε at most 3.00 at δ = 1e-5" in text
    assert "Simulated plan B = 256, q = 0.25, σ = 1.875" in text
    assert "no finite ε: they simulate a plan in smaller batches." in text
    assert "are protected by" not in text
    assert "which protects nobody" in text
    assert "ε spent" not in text
    assert "target_epsilon" not in text
    figure = figures.accuracy_figure(records)
    assert [ax.get_xlabel() for ax in figure.axes[:2]] == ["step", "step"]
    assert all(len(ax.lines) == 2 for ax in figure.axes[:2])
    assert "simulat" not in words(write(tmp_path, [final()]))


def test_the_terminal_table_of_simulations_is_whole_at_80_columns() -> None:
    records = [
        final(
            "AdaDPS, by rank, momentum",
            seed,
            0.9 - seed / 10,
            epsilon=float("inf"),
            simulates_epsilon=12.3,
            radius=0.02,
        )
        for seed in range(2)
    ]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(summary_table(records))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    held = {word for line in text.splitlines() for cell in re.split("[│┃]", line) for word in cell.split()}
    assert held >= {"∞", "(simulates", "12.30)", "85.0", "±", "7.1"}


def headline(tmp_path: Path, records: list[dict[str, Any]]) -> str:
    match = re.search(r'<p class="headline">(.*?)</p>', write(tmp_path, records), flags=re.DOTALL)
    assert match
    return html.unescape(match[1])


def test_headline_names_a_winner_only_beyond_the_spread(tmp_path: Path) -> None:
    narrow = [final("A", i, a) for i, a in enumerate((0.79, 0.80, 0.81))]
    far = [final("B", i, a) for i, a in enumerate((0.89, 0.90, 0.91))]
    near = [final("C", i, a) for i, a in enumerate((0.885, 0.895, 0.905))]
    clear = headline(tmp_path, narrow + far)
    assert clear.startswith("B has the best mean test accuracy, 90.0 % ± 1.0 over 3 seeds")
    assert clear.endswith(": by these seeds, the lead may be chance.".replace(":", ";"))  # all differ by the same
    far[0]["test_accuracy"], near[0]["test_accuracy"] = 0.888, 0.889
    clear = headline(tmp_path, narrow + far)
    assert clear.endswith(": better than A, by 95 % intervals over paired seeds.")
    close = headline(tmp_path, narrow + near + far)
    assert close.endswith(": level with C, by 95 % intervals over paired seeds.")
    assert "better" not in close


def test_headline_looks_at_the_wider_of_the_two_spreads(tmp_path: Path) -> None:
    tight = [final("A", i, a) for i, a in enumerate((0.899, 0.900, 0.901))]
    wide = [final("B", i, a) for i, a in enumerate((0.70, 0.85, 0.99))]
    assert "level with B" in headline(tmp_path, tight + wide)


def test_headline_claims_nothing_from_one_seed(tmp_path: Path) -> None:
    pair = [final("A", 0, 0.9), final("B", 0, 0.5)]
    assert "90.0 % over one seed; by these seeds, the lead may be chance." in headline(tmp_path, pair)
    assert "no other method" in headline(tmp_path, pair[:1])
    assert "none is best" in headline(tmp_path, [final("A", 0, None)])


def test_differences_are_of_paired_seeds() -> None:
    """The seeds differ by 10 points, and the methods by one: only pairs show it."""
    accuracies = {"A": [0.60, 0.70, 0.80, 0.90], "B": [0.61, 0.71, 0.809, 0.911], "C": [0.65, 0.65, 0.85, 0.85]}
    records = [final(name, seed, one) for name, ones in accuracies.items() for seed, one in enumerate(ones)]
    a, b, c = (row["difference"] for row in summarize(records))
    assert a is None
    gaps = [0.01, 0.01, 0.009, 0.011]
    half = 3.182446 * statistics.stdev(gaps) / 2  # Student's t with three degrees of freedom, at 97.5 %
    assert (b["to"], b["verdict"], c["verdict"]) == ("A", "better", "level")
    assert b["interval"] == pytest.approx([0.01 - half, 0.01 + half], rel=1e-5)
    losses = [
        record | {"score": None, "test_accuracy": None, "test_loss": record["test_accuracy"]} for record in records
    ]
    assert summarize(losses)[1]["difference"]["verdict"] == "worse"
    assert [row["difference"] for row in summarize([final("A"), final("B")])] == [None, None]  # one seed
    lost = [final("A", seed, 0.9) for seed in (0, 1)] + [final("B", 0, 0.8), final("B", 1, None)]
    assert summarize(lost)[1]["difference"] is None
    for record in records:
        record["metrics"] = {"auc": 1 - record["test_accuracy"]}
    (_, row, _), (lead, *_) = summarize(records), [row["difference"] for row in summarize(records)][1:]
    assert list(row["differences"]) == ["test_accuracy", "test_loss", "auc"]
    assert row["differences"]["auc"] == lead
    assert (lead["verdict"], row["differences"]["test_accuracy"]) == ("worse", b)
    assert row["differences"]["test_loss"]["verdict"] == "level"
    for record in records:
        del record["metrics"]
    told = " ".join(printed(records).split())
    assert "Differences are to A, paired by seed, with 95 % intervals (t)." in told
    assert "better" in columns(printed(records))["accuracy"]


def test_the_metric_asked_for_first_leads(tmp_path: Path) -> None:
    record = final("M", metrics={"auc": 0.753, "accuracy": 0.9}, score="accuracy") | {"seed": None}
    record["test_interval"] = [0.7, 0.8]
    assert (
        headline(tmp_path, [record]) == "A private model with AUC 0.753 at epsilon 2.99 (95 % interval 0.700 to 0.800)."
    )
    assert cells((tmp_path / "report/index.html").read_text())["M"][:3] == ["0.753", "0.300", "90.0 %"]
    assert list(columns(printed([record])))[:2] == ["method", "AUC"]
    told = "The most frequent class alone has accuracy 94.3 %. Chance has AUC 0.5."
    assert told in " ".join(printed([record | {"most_frequent_class": 0.943}]).split())
    assert "Chance" not in printed([final("M", most_frequent_class=0.943)])
    first = record | {"metrics": {"accuracy": 0.9, "auc": 0.753}}
    assert "with 90.0 % accuracy" in headline(tmp_path, [first])
    ranked = [final("A", metrics={"squared_error": 0.2}), final("B", metrics={"squared_error": 0.1})]
    assert headline(tmp_path, ranked).startswith("B has the lowest mean test squared_error, 0.100")


def test_a_method_without_noise_is_no_part_of_the_statement(tmp_path: Path) -> None:
    records = [final(name, seed, 0.8 + seed / 100) for name in "AB" for seed in range(3)]
    records += [final("open", seed, 0.99, epsilon=None, non_private=True) for seed in range(3)]
    page = words(write(tmp_path, records))
    assert "not a comparison at equal privacy" not in page
    assert "protects nobody" not in page
    assert page.split("Results")[0].count("open") == 0
    assert "open: trained without noise, so its results may reveal the data. No ε here counts it." in page
    assert cells((tmp_path / "report/index.html").read_text())["open"][3] == "not private"
    assert summarize(records)[2]["difference"] is None
    axes: Any = figures.accuracy_figure(records).axes
    (during, _) = axes
    assert [list(line.get_ydata()) for line in during.lines if line.get_linestyle() == "--"] == [
        pytest.approx([0.99, 0.99])
    ]


def of_seeds(name: str, accuracy: float, **changes: Any) -> list[dict[str, Any]]:
    return [final(name, seed, accuracy + seed / 1000, **changes) for seed in range(3)]


@pytest.mark.parametrize(
    ("accuracy", "seeds", "told"), [(0.7, 3, True), (0.8, 3, False), (0.7999, 3, True), (0.7, 1, True), (0.9, 1, False)]
)
def test_a_method_without_noise_that_is_worse_than_a_private_one_is_no_reference(
    tmp_path: Path, accuracy: float, seeds: int, told: bool
) -> None:
    records = [*of_seeds("A", 0.8)[:seeds], *of_seeds("open", accuracy, epsilon=None, non_private=True)[:seeds]]
    said = "open is worse than A: it is not tuned well enough to be a reference."
    assert (said in words(write(tmp_path, records))) is told
    assert (said in " ".join(printed(records).split())) is told
    for record in records:  # of a loss, the larger one is worse
        record |= {"score": None, "test_loss": 1 - record["test_accuracy"], "test_accuracy": None}
    assert (said in " ".join(printed(records).split())) is told


def test_a_verdict_other_than_level_shows_no_zero() -> None:
    found = {"to": "A", "mean": -0.0003, "interval": [-0.0004, -0.00021], "verdict": "worse"}
    assert difference_texts(found) == ["-0.0003", "(-0.0004 to -0.0002)", "worse"]
    assert difference_texts(found, "accuracy") == ["-0.03", "(-0.04 to -0.02)", "worse"]
    wide = found | {"mean": 0.02, "interval": [0.0001, 0.04], "verdict": "better"}
    assert difference_texts(wide, "R2") == ["0.020", "(0.0001 to 0.040)", "better"]
    level = found | {"interval": [-0.0009, 0.0003], "verdict": "level"}
    assert difference_texts(level) == ["-0.000", "(-0.001 to 0.000)", "level"]


def test_a_verdict_on_a_method_at_the_edge_holds_for_its_grid_only(tmp_path: Path) -> None:
    said = "At the edge of its grid: A. Verdicts hold for this grid only."
    better = [run | {"test_accuracy": 0.95 + run["seed"] / 1000} for run in over_grid("B", INSIDE)]
    for grid in (EDGE, INSIDE):
        records = over_grid("A", grid) + [run for run in better if run["phase"] == "final"]
        page = words(write(tmp_path, records))
        assert (said in page) is (grid is EDGE)
        assert (said in headline(tmp_path, records)) is (grid is EDGE)
        assert " ".join(printed(records).split()).count(said) == (grid is EDGE)
    assert said not in printed(over_grid("A", EDGE))  # no verdict


def test_the_mark_of_an_edge_stands_below_the_value_that_is_there() -> None:
    assert columns(printed(over_grid("A", EDGE, radius=0.02)))["u"] == ["0.06", "⚠", "edge", "radius", "0.02"]
    runs = [run | {"radius": 0.04, "validation_accuracy": 0.1} for run in over_grid("A", INSIDE)[:-5]]
    found = columns(printed(over_grid("A", INSIDE, radius=0.02) + runs))["u"]
    assert found == ["0.025", "radius", "0.02", "⚠", "edge"]


@pytest.mark.parametrize(
    ("r2", "deviance", "mean", "is_worse"),
    [(-0.098, None, None, True), (0.1, None, None, False), (0.1, 2.0, 1.9, True), (0.1, 1.8, 1.9, False)],
)
def test_numbers_that_the_mean_predicts_better_are_named(
    tmp_path: Path, r2: float, deviance: float | None, mean: float | None, is_worse: bool
) -> None:
    counted: dict[str, Any] = {} if deviance is None else {"sklearn.metrics:mean_poisson_deviance": deviance}
    constant: dict[str, Any] = {} if mean is None else {"mean_deviance": mean}
    record = final("head", accuracy=r2, score="r2", metrics={"r2": r2, "absolute_error": 1.0, **counted}, **constant)
    said = "head is worse than always saying the mean of the test labels"
    assert (said in " ".join(printed([record]).split())) is is_worse
    assert (said in words(write(tmp_path, [record]))) is is_worse
    outcome: dict[str, Any] = {"noise_step": None, "own": [], "method": "head", "r2": r2, "loss": 1.0, "metrics": {}}
    outcome |= {"privacy_unit": "user", "epsilon": 3.0, "delta": 1e-5, "way": "none"}
    assert (f". {said}. Total" in result_text(outcome, [record])) is is_worse


def test_a_single_point_is_no_plot(tmp_path: Path) -> None:
    page = write(tmp_path, [final(curve=final()["curve"][-1:])])
    assert "<img" not in page
    assert cells(page).keys() == {"DP-AdamBC"}
    assert "Seeds" not in words(page)


def test_unequal_budgets_are_said(tmp_path: Path) -> None:
    said = "not a comparison at equal privacy"
    assert said in words(write(tmp_path, [final("A"), final("B", epsilon=8.0)]))
    assert said not in words(write(tmp_path, [final("A"), final("B", epsilon=2.991)]))


def test_the_privacy_statement_holds_every_fact_of_the_plan(tmp_path: Path) -> None:
    page = write(tmp_path, [final()], total_epsilon={"value": 41.2, "runs": 42})
    text = words(page).split("Privacy statement")[1].split("Settings")[0]
    for fact in (
        "The rows in the training data are protected by differential privacy with epsilon = 41.2 and delta =",
        "on data in which one row was added or removed",
        "The unit of protection is one row",
        "declared to have 1,024 rows or more",
        "Noise multiplier 1.875, clipping norm 0.5, sampling rate 0.25",
        "These 42 trainings used the same data: together they cost ε = 41.20. This,",
        "NOT PRIVATE Accuracies, losses and curves, in validation and test, were measured without noise",
    ):
        assert fact in text
    each = words(write(tmp_path, [tuning(), final()]))
    assert "with epsilon = 2.99 and delta = 0.00001, by each final training alone." in each
    assert each.count("about one final training alone. All of them together protect less.") == 2
    tuned = [tuning(lr=0.01), tuning(lr=0.1), final()]
    text = words(write(tmp_path, tuned, total_epsilon={"value": 41.2, "runs": 42}))
    assert "NOT PRIVATE for the held-out examples: no ε covers them. Mean ±" in text
    for caption in ("Test accuracy and loss against ε spent", "Validation accuracy in tuning against"):
        assert f"NOT PRIVATE for the held-out examples. {caption}" in text
    assert "These 42 trainings used the same data: together they cost ε = 41.20, tuning included" in text


@pytest.mark.parametrize("total", [None, {"value": None, "runs": None}, {"value": float("inf"), "runs": 2}])
def test_a_missing_total_is_not_passed_over(tmp_path: Path, total: dict[str, Any] | None) -> None:
    text = words(write(tmp_path, [tuning(), final()], total_epsilon=total))
    assert "2 trainings used the same data" in text
    assert ("was not computed" in text) is (total is None)
    assert ("no finite ε" in text) is (total is not None)


@pytest.mark.parametrize(
    ("in_run", "in_plan", "warned"),
    [("poisson", "poisson", False), ("fixed", "poisson", True), ("poisson", "fixed", True), ("fixed", None, True)],
)
def test_fixed_sampling_is_warned_of_exactly_when_used(
    tmp_path: Path, in_run: str, in_plan: str | None, warned: bool
) -> None:
    page = write(tmp_path, [final("A", sampling=in_run)], plan=PLAN | {"sampling": in_plan})
    text = words(page)
    assert (FIXED_WARNING in text) is warned
    assert ("⚠ not covered" in text) is warned
    assert ("would satisfy" in text) is warned
    assert ("are protected by" in text) is not warned
    assert page.count('class="warning"') == int(warned)


def test_what_nobody_recorded_is_said(tmp_path: Path) -> None:
    record = final()
    del record["sampling"]
    said = "How batches were drawn is not recorded. Epsilon assumes random sizes (Poisson sampling)."
    assert said in words(write(tmp_path, [record], plan={}))
    assert said not in words(write(tmp_path, [record]))


@pytest.mark.parametrize(("seed", "warned"), [(None, False), (0, True), (7, True)])
def test_a_research_seed_is_warned_of_exactly_when_used(tmp_path: Path, seed: int | None, warned: bool) -> None:
    page = write(tmp_path, [final(seed=3)], plan=PLAN | {"seed": seed})
    assert (SEED_WARNING in words(page)) is warned
    assert page.count('class="warning"') == int(warned)


@pytest.mark.parametrize(("counts", "said"), [((0, 0), None), ((1, 0), "1 example"), ((1200, 34), "1,234 example")])
def test_nonfinite_contributions_are_counted_over_all_runs(
    tmp_path: Path, counts: tuple[int, int], said: str | None
) -> None:
    records = [tuning(raw_nonfinite_examples=counts[0]), final(raw_nonfinite_examples=counts[1])]
    text = words(write(tmp_path, records))
    assert ("non-finite" in text) is (said is not None)
    assert said is None or f"NOT PRIVATE {said}" in text


def test_the_page_needs_no_network_and_runs_no_script(tmp_path: Path) -> None:
    page = write(tmp_path, [tuning(lr=0.1), tuning(), final()], command="privgrad compare a.toml")
    attributes = Attributes(page)
    assert "http://" not in page
    assert "https://" not in page
    links = attributes.values("src", "href", "srcset")
    assert len(links) == 5
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"<script|@import|url\(|javascript:", page)


def test_every_image_has_an_alternative_text_and_scrolling_boxes_take_the_keyboard(tmp_path: Path) -> None:
    page = write(tmp_path, [tuning(lr=0.1), tuning(), final(accuracy=0.912)], command="privgrad compare a.toml")
    attributes = Attributes(page)
    texts = attributes.values("alt")
    assert len(texts) == 2 == sum(name == "src" for _, name, _ in attributes.found)
    assert texts[0] == "Plots of test accuracy and loss against ε spent, one line per method."
    assert "DP-AdamBC 0.01" in texts[1]
    assert attributes.values("tabindex") == ["0", "0"]
    assert "@media print" in page


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\" onload='x' {{ 7*7 }} $\\frac{$"
    page = write(
        tmp_path,
        [tuning(evil, 0.1, optimizer=evil), tuning(evil, 0.01), final(evil, optimizer=evil), final("_hidden", 0, 0.8)],
        title=evil,
        command=evil,
        data=evil,
        machine=evil,
        versions={evil: evil},
        plan=PLAN | {"neighboring_relation": evil, "privacy_unit": evil, evil: evil},
    )
    assert "<script" not in page
    assert not Attributes(page).values("onload")
    assert evil in words(page.replace("&lt;", "‹").replace("&gt;", "›")).replace("‹", "<").replace("›", ">")


def test_the_plots_are_pictures_with_something_on_them(tmp_path: Path, drawn: None) -> None:
    records = [tuning(name, lr) for name in "AB" for lr in (0.1, 0.01, 0.001)]
    records += [final(name, seed, 0.9 + seed / 100) for name in "AB" for seed in range(3)]
    write(tmp_path, records)
    for name in ("accuracy.png", "tuning.png"):
        image = pixels(tmp_path / "report" / name)
        assert image.format == "PNG"
        assert min(image.size) > 500
        colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= {color for _, color in colors}


def test_one_private_training_has_its_interval_and_its_model(tmp_path: Path) -> None:
    record = final("M", accuracy=0.9) | {"seed": None, "test_interval": [0.85, 0.935]}
    page = write_report([record], {"model": 'load it by privgrad.Head.load("h")'}, tmp_path)
    text = words(page.read_text(encoding="utf-8"))
    assert "A private model with 90.0 % accuracy at epsilon 2.99 (95 % interval 85.0 to 93.5)." in text
    assert "Results" in text.split("Privacy statement")[0]
    assert 'Model load it by privgrad.Head.load("h")' in text
    assert printed([record]).count("One training.") == 1


def test_the_smallest_report_is_one_run_and_an_empty_metadata(tmp_path: Path) -> None:
    record = {"method": "M", "phase": "final", "lr": 0.1, "epsilon": 1.0, "delta": 1e-6, "test_accuracy": 0.5}
    page = write_report(iter([record]), {}, tmp_path / "deep" / "folder").read_text(encoding="utf-8")
    assert "A private model with 50.0 % accuracy at epsilon 1." in words(page)
    assert "The rows in the training data are protected by differential privacy with epsilon = 1" in words(page)
    assert "Mean ± one standard deviation over seeds" not in words(page)
    assert "not recorded" in page
    assert "None" not in page.split("</style>")[1]
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == ["index.html"]


@pytest.mark.parametrize(
    "records",
    [
        [final(curve=[])],
        [final(curve=[{"step": 1, "epsilon": 0.1, "accuracy": 0.5, "loss": 1.0}])],
        [final(seed=0), final(seed=1, curve=[])],
        [final(accuracy=None), final(seed=1, accuracy=float("nan"), test_loss=float("inf"))],
        [tuning(lr=0.1, accuracy=None), tuning(lr=1.0, accuracy=float("nan")), final()],
        [final(f"a rather long name of method number {i}", s, 0.5) for i in range(20) for s in range(2)],
        [final("手法 😀", lr=0.1), final("手法 😀", 1, lr=0.2), final("", 0)],
    ],
)
def test_odd_records_still_make_a_report(tmp_path: Path, drawn: None, records: list[dict[str, Any]]) -> None:
    table = cells(write(tmp_path, records))
    assert list(table) == list(dict.fromkeys(record["method"] for record in records))
    plots = [tmp_path / "report" / f"{name}.png" for name in ("accuracy", "seeds")]
    finals = [record for record in records if record["phase"] == "final"]
    several = [min(len(run["curve"]) for run in finals) > 1, len(finals) > len(table)]
    assert [path.exists() for path in plots] == several
    assert all(pixels(path).size[0] > 500 for path in plots if path.exists())


def test_a_second_report_leaves_no_plot_of_the_first(tmp_path: Path) -> None:
    write(tmp_path, [tuning(lr=0.1), tuning(), final()])
    write(tmp_path, [final()])
    assert not (tmp_path / "report" / "tuning.png").exists()


@pytest.mark.parametrize("records", [[], [tuning()]])
def test_no_final_run_raises_and_writes_nothing(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    with pytest.raises(PrivacyError, match=r'^write_report: expected records to hold a run with phase "final", got'):
        write_report(records, {}, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_side_information_is_recorded_and_marked_when_not_covered(tmp_path: Path):
    records = [
        final("public", side_information="public data: volunteers"),
        final("derived", side_information="private-derived: counts of the records"),
        final("none", side_information=None),
    ]
    page = html.unescape(write_report(records, {"plan": PLAN}, tmp_path).read_text())
    assert "public: public data: volunteers" in page
    told = page[page.index("derived: private-derived: counts of the records") :]
    assert told.index("NOT COVERED BY ε") < 80
    assert page.count("NOT COVERED BY ε") == 1
    assert "Side information" not in write_report([final()], {"plan": PLAN}, tmp_path).read_text()


def test_noise_steps_own_values_and_trainings_are_summarized() -> None:
    records = over_grid("A", INSIDE, own=[["betas", [0.5, 0.999]]]) + over_grid("B", INSIDE, own=[["momentum", 0.9]])
    records += [tuning("C", 0.1), tuning("C", 0.2), final("C", noise_step=0.031)]
    a, b, c = summarize(records)
    assert [row["rate"] for row in (a, b, c)] == ["noise_step", "noise_step", "lr"]
    assert (a["lr"], a["noise_step"], a["own"], b["own"]) == (None, 0.025, "betas 0.5 0.999", "momentum 0.9")
    assert (a["raw_clip_fraction"], a["raw_least_clipped"]) == (0.5, 0.5)
    assert [(row["trainings"], row["tuning_trainings"]) for row in (a, b, c)] == [(11, 6), (11, 6), (3, 2)]
    assert [row["lr_at_edge"] for row in (a, b, c)] == [None, None, False]
    # The final runs differ in their own values: none is shown.
    assert summarize([final("D", own=[["eps", 1.0]]), final("D", 1, own=[["eps", 2.0]])])[0]["own"] == ""
    # The same training, recorded for tuning and as final: tuning by training loss.
    once = tuning("E", raw_train_loss=0.25)
    again = once | {"phase": "final", "test_accuracy": 0.5}
    assert summarize([once, again])[0]["trainings"] == 1
    assert summarize([once, again | {"seed": 1}])[0]["trainings"] == 2


def test_trainings_are_counted_in_words() -> None:
    def said(**counts: int) -> str:
        rows = [{"method": name, "trainings": count, "tuning_trainings": count - 1} for name, count in counts.items()]
        return trainings_text(rows)

    assert said(A=14, B=14) == "28 trainings, tuning included: 14 for each method."
    assert said(A=14, B=13) == "27 trainings, tuning included, not equally many: 14 (A), 13 (B)."
    assert said(A=9, B=5, C=5, D=5, E=5).endswith("not equally many: between 5 and 9 for each method.")
    assert said(A=3) == "3 trainings, tuning included."
    assert said(A=1) == ""
    assert said(A=1, B=1) == "2 trainings: 1 for each method."


def test_each_value_shows_its_best_own_values_and_all_seeds_of_them() -> None:
    records = [
        of_noise("A", u, accuracy + aside, seed, own=[["momentum", own]])
        for (u, own), accuracy in {(0.01, 0.5): 0.6, (0.01, 0.9): 0.7, (0.02, 0.5): 0.8, (0.02, 0.9): 0.5}.items()
        for seed, aside in ((100, 0.0), (101, 0.02))
    ]
    assert tuned(records, "noise_step")["A"] == [(0.01, pytest.approx(0.71)), (0.02, pytest.approx(0.81))]
    assert tuned_seeds(records, "noise_step")["A"][1] == (0.02, [0.8, pytest.approx(0.82)])
    assert tuned_names(records) == ["noise_step"]
    # A run that diverged takes its values with it: a mean over the other seeds would flatter them.
    lost = of_noise("A", 0.02, float("nan"), 102, own=[["momentum", 0.5]])
    assert tuned([*records, lost], "noise_step")["A"] == [(0.01, pytest.approx(0.71)), (0.02, pytest.approx(0.51))]
    # A noise step that was measured with a learning rate was not tuned.
    assert tuned([tuning("B", 0.1, noise_step=0.3)], "noise_step") == {"B": []}


@pytest.mark.parametrize(
    ("grid", "mark", "told", "warns"),
    [
        (INSIDE, "", ["inside 0.01 to 0.06"], False),
        (PLATEAU, "plateau", ["inside 0.01 to 0.15", "plateau 0.025 to 0.06"], False),
        (OPEN, "⚠ open end", ["⚠ not shown to be inside 0.01 to 0.06; plateau 0.025 to 0.06"], True),
        (EDGE, "⚠ edge", ["⚠ best at the upper edge of 0.01 to 0.06"], True),
        ({0.01: 0.9, 0.025: 0.8, 0.06: 0.7}, "⚠ edge", ["⚠ best at the lower edge of 0.01 to 0.06"], True),
        ({0.025: 0.8}, "", ["one value tried"], False),
    ],
)
def test_the_verdict_on_a_grid_is_a_mark_and_words(
    tmp_path: Path, grid: dict[float, float], mark: str, told: list[str], warns: bool
) -> None:
    records = over_grid("A", grid)
    text = printed(records)
    table = text.split("±")[0] + "".join(line for line in text.splitlines(keepends=True) if line.startswith("│"))
    for other in ("plateau", "⚠ open end", "⚠ edge"):
        assert (other in table) is (f"{other}:" in text) is (other == mark)
    page = write(tmp_path, records)
    cell = cells(page)["A"][3]
    assert cell == " ".join([f"{max(grid, key=lambda u: grid[u]):g}", *told])
    assert ('class="mark">⚠' in page) is warns
    assert ("Plateau: rates that" in words(page)) is ("plateau" in told[-1])
    assert ("a better rate may lie outside the grid" in words(page)) is warns
    # Over learning rates, with one seed in tuning, the mark is for the edge, as before.
    old = [tuning(lr=u, accuracy=a, max_grad_norm=1.0) for u, a in grid.items()]
    old = printed([*old, final(lr=max(grid, key=lambda u: grid[u]), max_grad_norm=1.0)])
    assert "plateau" not in old
    assert "open end" not in old


def test_a_clipping_norm_at_the_edge_is_marked_next_to_a_verdict(tmp_path: Path) -> None:
    records = over_grid("A", INSIDE) + [
        run | {"max_grad_norm": 2.0, "validation_accuracy": 0.1} for run in over_grid("A", INSIDE)[:-5]
    ]
    assert "⚠ edge" in printed(records)
    assert cells(write(tmp_path, records))["A"][3] == "0.025 C 1 inside 0.01 to 0.06 ⚠ clipping norm at the edge"


def test_the_terminal_shows_noise_steps_and_drops_equal_seeds() -> None:
    text = printed(over_grid("A", INSIDE, own=[["momentum", 0.9]]) + over_grid("B", INSIDE))
    assert list(columns(text)) == ["method", "accuracy", "loss", "ε", "u", "clipped"]
    assert columns(text)["u"] == ["0.025", "momentum", "0.9", "0.025"]
    assert columns(text)["clipped"] == ["50", "%"] * 2
    told = " ".join(text.split("┘")[1].split())
    assert told.startswith("± one standard deviation over 5 seeds. Measured on test examples")
    assert "clipped: share of gradients longer than C in the last tenth of the steps, NOT private. " in told
    assert "u: noise step. Tuned by validation accuracy. " in told
    assert "Tuned by" not in printed([final(accuracy=0.853)])
    assert told.endswith("22 trainings, tuning included: 11 for each method.")


def test_the_share_of_the_most_frequent_class_is_in_caption_and_headline(tmp_path: Path) -> None:
    records = [final(accuracy=0.853, most_frequent_class=0.848)]
    assert "The most frequent class alone has accuracy 84.8 %." in " ".join(printed(records).split())
    assert "The most frequent class alone has accuracy 84.8 %." in write(tmp_path, records)
    assert "most frequent" not in printed([final(accuracy=0.853)])


def test_a_loss_above_that_of_the_class_shares_is_named_with_its_remedy(tmp_path: Path) -> None:
    told = "The class shares alone would have a smaller loss, 0.569: the probabilities are far off, even if they rank"
    bad, good = final(test_loss=0.81, class_shares_loss=0.5691), final("B", test_loss=0.5, class_shares_loss=0.5691)
    assert told in " ".join(printed([bad]).split())
    price = "On public data, or at the cost of another training, try max_grad_norm = 1"
    assert "max_grad_norm = 1" not in write(tmp_path, [bad])  # a network
    assert price in write(tmp_path, [bad | {"head": "head", "max_grad_norm": 0.1}])
    assert "max_grad_norm = 1" not in write(tmp_path, [bad | {"head": "head", "max_grad_norm": 1.0}])
    assert "the probabilities of DP-AdamBC are far off" in " ".join(printed([bad, good]).split())
    assert "class shares" not in printed([good])
    outcome: dict[str, Any] = {"noise_step": None, "own": [], "method": "head", "accuracy": None, "metrics": {}}
    outcome |= {"privacy_unit": "user", "epsilon": 3.0, "delta": 1e-5, "way": "none", "class_shares_loss": 0.5691}
    assert told in result_text(outcome | {"loss": 0.81}, [bad | {"score": None}])
    good |= {"score": None}
    told = "A private model with loss 0.500 at epsilon 3. Trained by head. Total"
    assert told in result_text(outcome | {"loss": 0.5}, [good])


def test_a_private_headline_says_whether_the_most_frequent_class_does_as_well() -> None:
    outcome: dict[str, Any] = {"noise_step": None, "own": [], "method": "head", "accuracy": 0.853, "metrics": {}}
    outcome |= {"interval": [0.84, 0.866], "privacy_unit": "user", "epsilon": 3.0, "delta": 1e-5, "way": "trials"}
    trials = [
        {"phase": "tuning", "method": "head", "tuning_score": score, "score_noise_std": 0.003}
        for score in (0.883, 0.882)
    ]
    records = [*trials, final(accuracy=0.853)]
    text = result_text(outcome | {"most_frequent_class": 0.848}, records)
    assert ". On the test part: accuracy 85.3 % (95 % interval 84.0 to 86.6); the most" in text
    assert "; the most frequent class alone has accuracy 84.8 %, which is inside the interval" in text
    assert "differ by less than their noise, so the choice may be chance." in text
    text = result_text(outcome | {"most_frequent_class": 0.7}, [trials[0], records[-1]])
    assert "inside the interval" not in text
    assert "chance" not in text
    ranked = outcome | {"metrics": {"auc": 0.7}, "intervals": {"auc": [0.6, 0.8]}}
    text = result_text(ranked, [final(accuracy=0.853, metrics={"auc": 0.7})])
    assert "; AUC 0.700 (95 % interval 0.600 to 0.800); chance has AUC 0.5. Total" in text


def test_a_mix_of_rates_is_named_and_unequal_seeds_have_a_column() -> None:
    records = [*over_grid("A", INSIDE), final("B", lr=0.1, noise_step=0.031, max_grad_norm=1.0)]
    text = printed(records)
    assert columns(text)["rate"] == ["u", "0.025", "lr", "0.1"]
    assert columns(text)["seeds"] == ["5", "1"]
    told = " ".join(text.split("┘")[1].split())
    assert told.startswith("± one standard deviation over seeds.")
    assert told.endswith("12 trainings, tuning included, not equally many: 11 (A), 1 (B).")
    assert printed([final(lr=0.1)]).count("One seed.") == 1
    assert "trainings" not in printed([final(lr=0.1)])
    assert "clipped" not in printed([final(lr=0.1)])
    assert list(columns(printed([final("A"), final("B", lr=0.2)])))[-1] == "lr"


def test_the_fullest_terminal_table_is_whole_at_80_columns() -> None:
    records: list[dict[str, Any]] = []
    for name in ("AdaDPS, by rank, momentum", "[red]Averyveryverylongnamewithoutanyspaces[/red]"):
        records += over_grid(
            name,
            EDGE,
            own=[["momentum_decay", 0.004], ["debias_floor", 0.316]],
            max_grad_norm=0.316,
            radius=0.02,
            epsilon=float("inf"),
            simulates_epsilon=12.3,
            fraction_floored=1.0,
            raw_clip_fraction=0.0112,
            test_loss=1234.5,
        )
    records += [final("C", lr=3.2e-05, max_grad_norm=1.0, sampling="fixed", epsilon=1e9)]
    held = columns(printed(records))
    assert list(held) == ["method", "accuracy", "loss", "ε", "rate", "seeds", "clipped floored"]
    assert "".join(held["method"]).startswith("AdaDPS,byrank,momentum[red]Averyveryverylongname")
    assert held["rate"][:9] == ["u", "0.06", "⚠", "edge", "radius", "0.02", "momentum_decay", "0.004", "debias_floor"]
    assert held["rate"][-2:] == ["lr", "3.2e-05"]
    assert held["clipped floored"] == ["1.1", "%", "⚠", "100", "%"] * 2 + ["–"] * 2


@pytest.mark.parametrize(("share", "shown", "few"), [(0.0, "0 %", 1), (0.0199, "2.0 %", 1), (0.02, "2 %", 0)])
def test_few_clipped_gradients_are_warned_of(tmp_path: Path, share: float, shown: str, few: int) -> None:
    records = over_grid("A", INSIDE, raw_clip_fraction=share) + over_grid("B", INSIDE)
    page = write(tmp_path, records)
    assert cells(page)["A"][-2].startswith(shown)
    assert ("⚠ lower C" in cells(page)["A"][-2]) is bool(few)
    assert cells(page)["B"][-2] == "50 %"
    assert page.count('class="warning"') == few
    said = "⚠ Lower C: the noise is made for norms that do not occur. In a final training of A, fewer than 2 %"
    assert (said in words(page)) is bool(few)
    assert ("⚠ low" in printed(records)) is bool(few)


def test_one_seed_that_clips_few_gradients_is_enough_for_a_warning(tmp_path: Path) -> None:
    records = over_grid("A", INSIDE)
    records[-1]["raw_clip_fraction"] = 0.01
    page = words(write(tmp_path, records))
    assert "Lower C: the noise is made for norms that do not occur. In a final training of A, fewer than" in page
    assert "40 % ⚠ lower C" in page


def test_the_share_clipped_is_marked_not_private(tmp_path: Path) -> None:
    page = words(write(tmp_path, over_grid("A", INSIDE)))
    assert "Noise step u NOT PRIVATE Clipped Seconds" in page
    assert "NOT PRIVATE Clipped: share of gradients that were longer than C" in page
    assert "no ε covers it" in page
    statement = page.split("Privacy statement")[1]
    assert "NOT PRIVATE The share of clipped gradients was computed before the noise, and no ε" in statement
    local = over_grid("A", INSIDE, local_lr=0.1)
    users = words(write(tmp_path, local, plan=PLAN | {"privacy_unit": "user"}))
    assert "share of updates that were longer than C in the last tenth of the rounds" in users


def test_a_private_run_shows_no_raw_number(tmp_path: Path) -> None:
    """Not even if the record holds one."""
    run = of_noise("A", 0.1, 0.9, None, "final", raw_nonfinite_examples=7, raw_clip_fraction=0.0112, lr=None)
    layer = {"1": {"raw_signal_to_noise": 0.1, "noise_share": 0.9}}
    curve = [point | {"raw_layers": layer, "raw_clip_fraction": 0.0312} for point in run["curve"]]
    for seed, shown in ((0, True), (None, False)):
        records = [run | {"seed": seed, "curve": curve if seed is None else run["curve"]}]
        page = words(write(tmp_path, records))
        for said in ("Clipped", "clipped gradients", "lower C", "1.1 %", "non-finite"):
            assert (said in page) is shown, said
        assert "Diagnostics" not in page
        assert ("clipped" in printed(records)) is shown
        assert (summarize(records)[0]["raw_clip_fraction"] is not None) is shown


def test_the_page_shows_noise_steps_own_values_and_trainings(tmp_path: Path) -> None:
    records = over_grid("A", INSIDE, own=[["momentum", 0.9]], options={"momentum": 0.9, "nesterov": True})
    page = write(tmp_path, records + over_grid("B", INSIDE))
    assert cells(page)["A"][4] == "0.025 momentum 0.9 inside 0.01 to 0.06"
    told = words(page)
    assert "over 5 seeds" in told
    assert "On floor" not in told
    assert "22 trainings, tuning included: 11 for each method. Trainings Tuning Final All" in told
    assert "A 6 5 11 B 6 5 11 Total 12 10 22" in told
    assert "A: AdamBC (momentum 0.9, nesterov True)" in told
    assert "Validation accuracy in tuning against noise step u; rings mark" in told
    assert "Each point is the best result over all other tuned values, own options included." in told
    assert "A 0.025, momentum 0.9 (inside 0.01 to 0.06); B 0.025 (inside" in Attributes(page).values("alt")[2]
    mixed = write(tmp_path, [*records, final("B", lr=0.1, noise_step=0.0312, max_grad_norm=1.0)])
    assert cells(mixed)["A"][3].startswith("u 0.025 momentum 0.9")
    assert cells(mixed)["B"][3] == "lr 0.1 u 0.031, measured"
    assert "Rate Seeds" in words(mixed)
    assert "11 (A), 1 (B)" in words(mixed)
    assert "Trainings Tuning" not in words(write(tmp_path, [final(), final(seed=1)]))


def test_a_training_that_served_twice_counts_once(tmp_path: Path) -> None:
    runs = [tuning(lr=lr, accuracy=None, raw_train_loss=lr) | {"seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    finals = [run | {"phase": "final", "test_accuracy": 0.5, "test_loss": 0.5} for run in runs[:2]]
    page = words(write(tmp_path, runs + finals))
    assert "4 trainings, tuning included." in page
    assert "DP-AdamBC 4 2 4 A tuning training that also served as a final one counts once" in page


def test_settings_name_the_schedule_once(tmp_path: Path) -> None:
    plan = PLAN | {"schedule": "cosine", "ema_decay": "none", "augmentation_multiplicity": 1}
    page = words(write(tmp_path, [final()], plan=plan))
    assert "Learning rate over the steps cosine" in page
    assert "Views of each image 1 Decay of the evaluated weight average none" in page
    assert "ema_decay" not in page


@pytest.mark.parametrize("narrow", [False, True])
def test_the_tuning_plot_shows_seeds_rings_plateaus_and_open_ends(narrow: bool) -> None:
    own = {"own": [["momentum", 0.9]]}
    records = over_grid("A", PLATEAU, **own) + over_grid("B", OPEN)
    records += [run | {"validation_accuracy": run["validation_accuracy"] - 0.3, "own": []} for run in records[:8]]
    axes: Any = figures.tuning_figure(records, narrow=narrow).axes
    above, below = axes
    assert (above.get_xscale(), below.get_xscale()) == ("log", "log")
    assert above.get_xlim() == below.get_xlim()
    assert [label.get_text() for label in above.get_xticklabels()] == ["0.01", "0.025", "0.06", "0.15"]
    assert [list(line.get_ydata()) for line in above.lines] == [
        pytest.approx(list(g.values())) for g in (PLATEAU, OPEN)
    ]
    seeds_a, ring_a, seeds_b, ring_b = (points.get_offsets() for points in above.collections)
    assert sorted(y for _, y in seeds_a) == pytest.approx(
        sorted(a + d for a in PLATEAU.values() for d in (-0.01, 0.01))
    )
    assert (len(seeds_b), len(ring_a), len(ring_b)) == (6, 1, 1)
    assert list(ring_a[0]) == pytest.approx([0.025, 0.8])
    assert len({round(float(x), 6) for x, _ in seeds_a} & {round(float(x), 6) for x, _ in seeds_b}) == 0
    drawn = [(line.get_marker(), [float(x) for x in line.get_xdata()]) for line in below.lines]
    assert [xs for _, xs in drawn if len(xs) == 2] == [[0.025, 0.06]] * 2  # the plateaus
    assert [(marker, xs) for marker, xs in drawn if marker in ("<", ">")] == [(">", [0.06])]
    assert [label.get_text() for label in below.get_yticklabels()] == ["A", "B"]


def test_the_tuning_plot_of_learning_rates_and_many_values_is_readable() -> None:
    records = over_grid("A", {0.001 * 2**k: 0.5 + k / 100 for k in range(9)})
    records += [run | {"method": "B", "noise_step": None, "lr": run["noise_step"]} for run in records]
    figure = figures.tuning_figure(records)
    assert [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes] == [
        "Noise step u",
        "As good as the best",
        "Learning rate",
        "As good as the best",
    ]
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert {"0.001", "0.003", "0.01", "0.1"} <= set(shown)
    # Learning rates alone, with one seed: nothing to judge by.
    old = [tuning(lr=lr) for lr in (0.1, 0.01)] + [final()]
    assert len(figures.tuning_figure(old).axes) == 1


@pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=[pytest.mark.slow] if index % 12 else []) for index, name in enumerate(COMPARISONS)],
)
def test_the_records_of_the_repository_make_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    def made(draw: Any) -> bytes:
        draw()
        return bytes(24)

    monkeypatch.setattr(figures, "png", made)
    monkeypatch.setattr(figures, "svg", made)
    records = [json.loads(line) for line in (RESULTS / folder / "runs.jsonl").read_text().splitlines()]
    page = write(tmp_path, records)
    assert list(cells(page)) == list(dict.fromkeys(record["method"] for record in records))
    assert not any("several" in cell for row in cells(page).values() for cell in row)
    assert columns(printed(records))
