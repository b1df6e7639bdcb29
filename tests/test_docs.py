"""What the documents say is run, or looked up."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import privgrad as pg
from conftest import loss_fn, make_data, make_model
from mutants.test_mutants import MUTANTS, fault_tables
from privgrad.experiments.spec import Spec, load_spec
from privgrad.gradient.engines import Vmap
from privgrad.gradient.hooks import Hooks

ROOT = Path(__file__).parent.parent


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_quick_start_runs_as_printed(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("sklearn")
    (block,) = code_blocks("README.md")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block, names)
    assert 2.9 < float(capsys.readouterr().out) <= 3.0
    inputs, labels = names["data"].test.tensors
    assert (names["model"](inputs).argmax(1) == labels).float().mean() > 0.8


def test_the_guides_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    loop, rule, known, public, moved, groups, watched, fit, several = code_blocks("docs/guide.md")
    names: dict[str, Any] = {
        "pg": pg,
        "torch": torch,
        "model": make_model(),
        "loss_fn": loss_fn,
        "train_set": make_data(200),
        "public_set": make_data(20),
        "test_set": make_data(),
        "accuracy": lambda model, data: 0.5,
    }
    rule_names: dict[str, Any] = {"torch": torch}
    exec(rule, rule_names)
    for inputs in (torch.randn(5, 3), torch.randn(5, 2, 3)):
        scale, losses = rule_names["Scale"](3), lambda model, x: model(x).square().flatten(1).sum(1)
        factors, rows = Hooks(scale, losses)(inputs), Vmap(scale, losses)(inputs)
        torch.testing.assert_close(factors["scale"].dense(), rows["scale"].dense())
    small = {"60_000": "200", "1024": "20", "2_000": "10"}
    for old, new in small.items():
        assert old in loop
        loop = loop.replace(old, new)
    exec(loop, names)
    for block in (known, public, moved):
        exec(block, names)
        batch = next(iter(names["plan"].batches(names["train_set"])))
        assert set(names["private_grad"](batch).values) == dict(names["model"].named_parameters()).keys()
    exec(groups, names)
    names["private_grad"] = pg.PrivateGradient(names["model"], loss_fn, names["plan"])
    names["optimizer"].step(grad=names["private_grad"](next(iter(names["plan"].batches(names["train_set"])))))
    names["schedule"].step()
    names["private_grad"] = pg.PrivateGradient(names["model"], loss_fn, names["plan"])
    exec(watched, names)
    exec(fit.replace('folder="runs/mine"', 'folder="runs/mine", progress=False'), names)
    assert names["result"].curve[-1]["step"] == 10
    assert (tmp_path / "runs/mine/ledger.jsonl").exists()
    one = f'"gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1'
    exec(several.replace('"gloo"', one), names)
    dist.destroy_process_group()


def names_of_tests() -> set[str]:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))


def test_every_pitfall_has_its_row_and_every_row_tests_that_exist():
    text = (ROOT / "docs/pitfalls.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| [\d–]", line)]
    numbers = [int(number) for row in rows if (number := row[0].removeprefix("| ")) != "–"]
    assert numbers == list(range(1, 35))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row[-1])
        assert named, row
        assert set(named) <= names_of_tests(), row


def test_every_planted_fault_is_in_the_document_on_trust():
    """PYTHONPATH=tests python -c "from mutants.test_mutants import *; print(fault_tables())" prints its end."""
    text = (ROOT / "docs/trust.md").read_text()
    assert text.endswith(fault_tables())
    faults = [mutant for part in MUTANTS.values() for mutant in part]
    assert f"there are {len(faults)} faults" in text
    assert {mutant.caught_by.split(".")[1] for mutant in faults} <= names_of_tests()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path):
    assert load_spec(path).title


def test_the_guide_lists_every_option_of_a_spec():
    guide = (ROOT / "docs/guide.md").read_text()
    for table in Spec.model_fields.values():
        inner = table.annotation
        for name in getattr(inner, "model_fields", {}):
            assert f"`{name}`" in guide, name


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/guide.md",
        "docs/performance.md",
        "docs/promise.md",
        "docs/pitfalls.md",
        "docs/trust.md",
        "docs/audit.md",
        "docs/federated.md",
        "docs/flower.md",
        "docs/integrations.md",
        "docs/migration.md",
        "docs/papers/adadps.md",
        "docs/papers/bam.md",
        "docs/papers/dp-adam.md",
        "docs/papers/heavy-tail.md",
        "results/README.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "benchmarks/README.md",
    ],
)
def test_links_lead_somewhere(document: str):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
        assert ((ROOT / document).parent / target).exists(), target
