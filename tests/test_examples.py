"""Every script of examples/ runs, says what it is, and is short."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_data_text import needs_lists, save_letter_tokenizer

import privgrad as pg
from privgrad.accounting.calibration import cache
from privgrad_lab.data.fetching import SOURCES
from scripts import example

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_says_what_it_shows_needs_and_prints(path: Path):
    text = path.read_text()
    assert text.count("\n") < 80
    told = ast.get_docstring(ast.parse(text)) or ""
    assert [line.split()[0] for line in told.splitlines() if re.match(r"\w+  ", line)] == [
        "Shows",
        "Needs",
        "Run",
        "Prints",
    ]
    assert f"examples/{path.name}" in told


def test_every_example_is_run_by_a_test():
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    for path in SCRIPTS:
        assert re.search(rf'example\("{path.stem}"|"{path.name}"|examples/{path.name}', tests), path.name


def test_images(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    assert example("image_cnn", monkeypatch)(steps=60) > 0.5


def test_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if not cache("adult").is_dir():
        pytest.skip("needs `privgrad data fetch adult`")
    assert example("tabular_adult", monkeypatch)(steps=100) > 0.78
    assert re.search(r"always no: +accuracy 0\.7\d+\nprivate: .* at epsilon \d", capsys.readouterr().out)


def test_sparse_tags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if SOURCES["debian"].found() is None:
        pytest.skip("needs `privgrad data fetch debian`")
    found = example("sparse_tags", monkeypatch)(examples=1500, steps=10)
    assert found.keys() == {"DP-SGD", "AdaDPS"}
    assert all(0 < value < 1 for value in found.values())
    assert capsys.readouterr().out.count("at epsilon") == 2


def test_a_crash(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sklearn")
    charged, result = example("resume", monkeypatch)(steps=40)
    assert charged == 20  # the update after which it was killed
    assert result.ledger.releases == 40
    assert 20 <= result.updates <= 40
    assert "the process ended with -9 (killed is -9); its ledger holds 20 releases" in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_text_with_a_pretrained_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small encoder with random weights in MiniLM's place."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    save_letter_tokenizer(tmp_path / "encoder")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=81, **sizes)).save_pretrained(tmp_path / "encoder")
    run = example("text_minilm", monkeypatch)
    assert 0 <= run(str(tmp_path / "encoder"), examples=120, steps=12, folder=str(tmp_path / "run")) <= 1
    assert (tmp_path / "run" / "ledger.jsonl").exists()


@needs_lists
def test_tags_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A small encoder with random weights in MiniLM's place."""
    transformers = pytest.importorskip("transformers")
    save_letter_tokenizer(tmp_path / "encoder")
    sizes: dict[str, int] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    transformers.BertModel(transformers.BertConfig(vocab_size=81, **sizes)).save_pretrained(tmp_path / "encoder")
    run = example("text_tags", monkeypatch)
    assert 0 < run(str(tmp_path / "encoder"), examples=700, steps=4, folder=str(tmp_path / "run")) < 1
    assert "at epsilon" in capsys.readouterr().out


LAUNCHERS = {
    "distributed.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "accelerate_loop.py": [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
    "ray_train.py": [sys.executable],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "accelerate_loop.py",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("distributed.py", "ray_train.py")),
    ],
)
def test_several_processes(tmp_path: Path, name: str):
    """Started as it says; each process accounts by RDP alone, at a few orders, which takes it no seconds."""
    pytest.importorskip("sklearn")
    pytest.importorskip("accelerate")
    if name == "ray_train.py":
        pytest.importorskip("ray.train", reason="needs Ray: pip install 'ray[train]'")
    script, job = str(EXAMPLES / name), tmp_path / "job.py"
    # Without its dashboard, Ray starts sooner: a busy machine needs longer for it than Ray waits.
    begun = "import ray\nray.init(num_cpus=2, include_dashboard=False)\n" if name == "ray_train.py" else ""
    job.write_text(
        f"import runpy\n{begun}"
        "from privgrad.accounting import composition\n"
        "in_full = composition.epsilon_of\n"
        "composition.RDP_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)\n"
        "composition.epsilon_of = lambda mechanisms, delta, _: in_full(mechanisms, delta, 'rdp')\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    # In a cache of its own: the user's must not keep a noise multiplier that RDP calibrated.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [*LAUNCHERS[name], str(job)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, (accuracy, spent) = re.findall(r"accuracy (0\.\d+) at epsilon (\d\.\d+)", done.stdout)
    assert float(accuracy) > 0.6
    assert 2.9 < float(spent) <= 3
    assert "2 processes" in done.stdout
    ledgers = [pg.Ledger(path, read_only=True).releases for path in tmp_path.glob("runs/**/ledger.jsonl")]
    assert ledgers == ([] if name == "accelerate_loop.py" else [200])
    if name == "accelerate_loop.py":
        assert done.stdout.count("step 200:") == 1  # by the first of two processes
