"""What the documents say is run, or looked up."""

import codeop
import functools
import re
import tomllib
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pages
import privgrad as pg
from conftest import account_by_rdp
from mutants.test_mutants import MUTANTS, fault_tables
from pages import GIVEN, KINDS, NOT_RUN, ROOT, blocks, commands
from privgrad.engine.layers import base
from privgrad.engine.layers.base import register_rule
from privgrad.engine.layers.linear import Linear as LinearRule
from privgrad_lab.load_spec import load_spec
from privgrad_lab.spec import Spec

WITH_CODE = [page for page in pages.pages() if any(not block.title for block in blocks(page, "python"))]
WITH_COMMANDS = [page for page in pages.pages() if commands(page)]


def test_every_block_is_of_a_kind_that_is_run_or_is_no_code():
    others = [
        f"{block.page}:{block.line}" for page in pages.pages() for block in blocks(page) if block.kind not in KINDS
    ]
    assert not others, f"say python, console, toml or text of {', '.join(others)}"


def test_what_the_pages_take_as_given_is_still_in_them():
    for page, given in GIVEN.items():
        text = "".join(block.text for block in blocks(page))
        assert all(old in text for old in given.smaller), page
    lines = [line for page in pages.pages() for block in blocks(page, "console") for line in block.text.splitlines()]
    assert all(any(line.startswith(start) for line in lines) for start in NOT_RUN)


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Optimal order is the largest alpha")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:'pin_memory' argument is set as true")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:`isinstance.treespec")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:The number of training batches")
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_pages_code_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does
    if page != "README.md" and not page.startswith(pages.LESSONS):  # by PLD where outputs are shown; it takes seconds
        account_by_rdp(monkeypatch)
    monkeypatch.setattr(base, "_LAYERS", dict(base._LAYERS))  # a page registers a rule
    torch.manual_seed(0)
    try:
        pages.run_python(page, lambda: capsys.readouterr().out)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_pages_commands_run(page: str, tmp_path: Path):
    pages.run_commands(page, tmp_path)


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page.startswith(pages.LESSONS)])
def test_lessons_can_be_pasted_into_the_prompt_of_python(page: str):
    """The prompt of Python 3.11 reads line by line: a blank line must end each loop, and no function may hold one."""
    for block in blocks(page, "python"):
        require_pasteable("" if block.title else block.text, f"{page}:{block.line}")


def require_pasteable(text: str, place: str) -> None:
    compile_command, lines = codeop.CommandCompiler(), list[str]()
    for line in [*text.splitlines(), ""]:
        lines.append(line)
        try:
            if compile_command("\n".join(lines), place, "single") is not None:
                lines.clear()
        except SyntaxError as error:
            raise AssertionError(f"{place}: the prompt refuses {line!r}: {error.msg}") from error
    assert not lines, f"{place}: the prompt waits for more"


@pytest.mark.parametrize(
    "text", ["for k in (1, 2):\n    pass\nprint(k)\n", "def f():\n    k = 1\n\n    return k\n", "f(\n"]
)
def test_text_that_the_prompt_refuses_is_found(text: str):
    with pytest.raises(AssertionError, match="the prompt"):
        require_pasteable(text, "page")


@pytest.mark.parametrize("page", [page for page in pages.pages() if blocks(page, "toml")])
def test_the_pages_experiments_are_valid(page: str, tmp_path: Path):
    for block in blocks(page, "toml"):
        path = tmp_path / "spec.toml"
        path.write_text(block.text if "title" in tomllib.loads(block.text) else f'title = "{page}"\n{block.text}')
        assert load_spec(path).methods


def test_the_comparison_of_all_rows_finds_a_rule_that_is_wrong_for_one_row():
    (block,) = (block for block in blocks("docs/extending.md", "python") if "Vmap(" in block.text)
    lines, _, _ = block.text.partition("def released(")
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(lines, names)
    model, (x, y) = names["model"], names["batch"]

    class Odd(torch.nn.Linear):
        pass

    @register_rule(Odd)
    class _Tripled(LinearRule):
        def factor(self, layer: Any, name: str, parameters: Any, x: torch.Tensor, grad: torch.Tensor) -> Any:
            return super().factor(layer, name, parameters, x, torch.where(x[:, :1] == 7, 3 * grad, grad))

    model[0] = Odd(5, 4)
    names["data"] = torch.utils.data.TensorDataset(x.repeat(50, 1), y.repeat(50))
    names["data"].tensors[0][1001, 0] = 7
    with pytest.raises(AssertionError, match="not close"):
        exec(lines[lines.index("batch = ") :], names)


def test_the_script_of_migration_resumes_with_the_rate_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps 13 to 17 are charged, and no checkpoint holds them."""
    monkeypatch.chdir(tmp_path)
    account_by_rdp(monkeypatch)
    (block,) = (block for block in blocks("docs/migration.md", "python") if "scheduler.last_epoch" in block.text)
    text, call, calls = block.text.replace("= 20, 120, 3.0", "= 3, 120, 3.0"), pg.PrivateGradient.__call__, count(1)

    def interrupted(private_grad: pg.PrivateGradient, batch: Any) -> Any:
        released = call(private_grad, batch)
        if next(calls) == 17:
            raise KeyboardInterrupt
        return released

    monkeypatch.setattr(pg.PrivateGradient, "__call__", interrupted)
    names: dict[str, Any] = {}
    with pytest.raises(KeyboardInterrupt):
        exec(text, names)
    names["ledger"].close()
    with warnings.catch_warnings(action="error"):
        exec(text, names)
    assert names["scheduler"].last_epoch == names["ledger"].next_step == 36
    assert names["optimizer"].param_groups[0]["lr"] == 0
    names["ledger"].close()


def test_the_guides_fit_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    account_by_rdp(monkeypatch)
    torch.manual_seed(0)
    (block,) = (block for block in blocks("docs/guide.md", "python") if "result = pg.fit(" in block.text)
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert names["result"].curve[-1]["accuracy"] > 0.8


@functools.cache
def names_of_tests() -> set[str]:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))


def test_every_pitfall_is_explained_and_names_tests_that_exist():
    _, *entries = re.split(r"^### ", (ROOT / "docs/pitfalls.md").read_text(), flags=re.MULTILINE)
    assert sorted(int(entry.split(".")[0]) for entry in entries) == list(range(1, 59))
    for entry in entries:
        named = re.findall(r"`(test_\w+)`", entry)
        assert re.search(r"^\*\*[CMU]\.\*\* .+^\*Prevented:\* ", entry, re.MULTILINE | re.DOTALL), entry
        assert named, entry
        assert set(named) <= names_of_tests(), entry


def test_every_planted_fault_is_in_the_document_on_trust():
    """PYTHONPATH=tests python -c "from mutants.test_mutants import *; print(fault_tables())" prints its end."""
    text = (ROOT / "docs/trust.md").read_text()
    assert text.endswith(fault_tables())
    faults = [mutant for part in MUTANTS.values() for mutant in part]
    assert f"there are {len(faults)} faults" in " ".join(text.split())
    assert {mutant.caught_by.split(".")[1] for mutant in faults} <= names_of_tests()


def test_every_name_in_the_glossary_is_in_the_code():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    rows = [line.rsplit(" | ", 1)[1] for line in (ROOT / "docs/glossary.md").read_text().splitlines() if " | " in line]
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    names = {name for code in codes for name in re.findall(r"[A-Za-z_]{2,}", code)}
    assert len(names) > 50
    assert sorted(name for name in names if not re.search(rf"\b{name}", source)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path):
    assert load_spec(path).title


def test_every_option_of_a_spec_is_documented():
    guide = (ROOT / "docs/experiments.md").read_text()
    for table in Spec.model_fields.values():
        inner = table.annotation
        for name in getattr(inner, "model_fields", {}):
            assert f"`{name}`" in guide, name


@pytest.mark.parametrize("page", pages.pages())
def test_links_lead_somewhere(page: str):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), target
