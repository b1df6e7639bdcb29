"""The documents' fenced blocks, and what the code in them takes as given.

What a block is, its info string says: `python` is run, in order, in one namespace a page; `console` is commands, run in
order in one folder a page; `toml` is an experiment; `text` is output or a message, with nothing to run; `math` is a
formula. A block with a title, as in `python title="count.py"`, is a file of this name: commands read or run it. On the
pages of docs/lessons, a `text` block right after code or commands is what these print.
"""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad import data
from privgrad.accounting.accountant import Release

ROOT = Path(__file__).parent.parent
KINDS = ("python", "console", "toml", "text", "math")
LESSONS = "docs/lessons/"
TITLED = re.compile(r'(\w+) title="([^"]+)"')
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


class Block(NamedTuple):
    """A fenced block: where it is, its info string, and its text."""

    page: str
    line: int  # of its first line
    heading: str
    kind: str
    text: str
    title: str = ""  # the name of the file that it is


def pages() -> list[str]:
    """Every document that somebody reads: by its path."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[!.]*/README.md")]
    return sorted(str(path.relative_to(ROOT)) for path in set(found))


def blocks(page: str, *kinds: str) -> list[Block]:
    """The fenced blocks of a page; all of them, or those of some kinds."""
    return [block for block in _blocks(page) if not kinds or block.kind in kinds]


def _blocks(page: str) -> Iterator[Block]:
    heading, fence, lines, first = "", None, [], 0
    for number, line in enumerate((ROOT / page).read_text().splitlines(keepends=True), start=1):
        opened = re.match(r" *(```+|~~~+) *([^`\n]*)", line)
        if fence is None and opened:
            fence, lines, first = opened, [], number + 1
        elif fence is not None and opened and opened[1] == fence[1] and not opened[2]:
            titled = TITLED.fullmatch(fence[2].strip())
            kind, title = titled.groups() if titled else (fence[2].strip(), "")
            yield Block(page, first, heading, kind, textwrap.dedent("".join(lines)), title)
            fence = None
        elif fence is not None:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.strip("# \n")
    assert fence is None, f"{page}:{first} is not closed"


def output_of(block: Block) -> str | None:
    """What a lesson says that a block prints: the `text` block right after it. None: it says nothing."""
    if not block.page.startswith(LESSONS):
        return None
    end = block.line + block.text.count("\n")  # its closing fence
    lines = (ROOT / block.page).read_text().splitlines()
    following = [other for other in blocks(block.page) if other.line > end]
    if not following or following[0].kind != "text" or any(line.strip() for line in lines[end : following[0].line - 2]):
        return None
    return following[0].text


def require_alike(shown: str, printed: str, place: str) -> None:
    """Raise unless `printed` is what a lesson shows: the same words, and numbers within half, or 0.1, of its own.

    The noise is new in each run, so that numbers differ, and the widths of tables. `...` in what is shown stands for
    anything.
    """
    shown, printed = (" ".join(re.sub(r"([━─])+", r"\1", text).split()) for text in (shown, printed))
    words = (re.escape(part).replace(r"\.\.\.", ".*?") for part in NUMBER.split(shown))
    found = re.fullmatch(f"({NUMBER.pattern})".join(words), printed)
    assert found, f"{place}: the page shows\n{shown}\nand this was printed:\n{printed}"
    for one, other in zip(NUMBER.findall(shown), found.groups(), strict=True):
        distance = abs(float(one) - float(other))
        assert distance <= max(0.1, 0.5 * float(one)), f"{place}: {other} was printed, and the page shows {one}"


Names = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Given:
    """What a page takes as given.

    names: what its python blocks know from a heading on, by heading; "" is the page's beginning.
    smaller: what is written otherwise for a test, old -> new: numbers that take hours.
    files: what is in the folder where its blocks are run, beside examples/.
    packages: without which its python blocks are skipped.
    optional: packages without which the blocks under a heading are skipped, by heading.
    check: looks at the names when all have been run, and at what was printed.
    """

    names: dict[str, Names] = field(default_factory=dict[str, Names])
    smaller: dict[str, str] = field(default_factory=dict[str, str])
    files: Callable[[], dict[str, str]] = dict[str, str]
    packages: tuple[str, ...] = ()
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    check: Callable[[dict[str, Any], str], None] = lambda names, printed: None


def _guide() -> dict[str, Any]:
    return {
        "pg": pg,
        "torch": torch,
        "make_model": make_model,
        "loss_fn": loss_fn,
        "train_set": make_data(200),
        "public_set": make_data(20),
    }


def _methods() -> dict[str, Any]:
    return _guide() | {"plan": make_plan(), "model": make_model()}


def _parts() -> dict[str, Any]:
    names = _methods()
    return names | {"optimizer": pg.optim.AdamBC(names["model"].named_parameters(), noise_step=0.01)}


def _features() -> dict[str, Any]:
    """The page's folder of photographs: light ones outdoors, dark ones indoors."""
    pillow = pytest.importorskip("PIL.Image")
    for label, name in enumerate(("indoors", "outdoors")):
        folder = Path("photographs") / name
        folder.mkdir(parents=True)
        pixels = torch.rand(60, 40, 40, 3, generator=torch.Generator().manual_seed(label)) * 155 + 100 * label
        for index, photograph in enumerate(pixels.byte().numpy()):
            pillow.fromarray(photograph).save(folder / f"{index}.png")
    return {}


def _federated() -> dict[str, Any]:
    inputs, labels = make_data(3000).tensors
    writers = [f"writer {index % 1000}" for index in range(3000)]
    return {"model": make_model(), "loss_fn": loss_fn, "inputs": inputs, "labels": labels, "writers": writers}


def _flower() -> dict[str, Any]:
    return {"make_model": make_model, "loss_fn": loss_fn, "data_of": None, "registered": None}


def _nvflare() -> dict[str, Any]:
    from nvflare_job import Net

    Path("client.py").write_text("")
    return {"Net": Net, "loss_fn": loss_fn, "data": make_data()}


def _sentences() -> dict[str, Any]:
    """The page's texts of three classes, which begin with different letters, and a small encoder."""
    texts = ["abc"[k % 3] * 9 + f" text {k}" for k in range(80)]
    labels = torch.arange(80) % 3
    held = {"held_texts": texts[60:], "held_labels": labels[60:]}
    return _encoder() | held | {"texts": texts[:60], "labels": labels[:60]}


def _language_model() -> dict[str, Any]:
    from test_trl import pairs, smol, texts, tokenizer

    return {"model": smol(), "tokenizer": tokenizer(), "rows": texts(), "pairs": pairs()}


def _both_adapters_are_stated(names: dict[str, Any], printed: str) -> None:
    """Pairs kept to their budget, and the adapter of texts is published with its epsilon."""
    assert names["trainer"].epsilon <= names["budget"]["target_epsilon"]
    assert "epsilon" in Path("published/README.md").read_text()
    assert Path("published/adapter_model.safetensors").exists()


def _tickets() -> dict[str, Any]:
    """The page's tickets of 50 customers, two for most of them."""
    from test_huggingface import bert, texts

    rows = texts(96)
    tokens = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    labels = torch.tensor([row["label"] for row in rows])
    customers = [f"customer {row['row'] % 50}" for row in rows]
    return {"model": bert(), "tokens": tokens, "labels": labels, "customers": customers}


def _lightning() -> dict[str, Any]:
    from test_lightning import Classifier

    return {"plan": make_plan(steps=2), "module": Classifier(), "train_set": make_data(), "folder": "lightning"}


def _script_is_moved(names: dict[str, Any], printed: str) -> None:
    """Each epoch has its line, and both libraries release what their plans say."""
    assert re.findall(r"^epoch (\d): epsilon 2?\.?\d+, accuracy \d+\.\d%$", printed, re.MULTILINE)[:3] == [
        "1",
        "2",
        "3",
    ]
    assert names["ledger"].releases == names["ledger"].planned_steps[0] == 36
    assert 2.9 < names["statement"].numbers["epsilon"] <= 3.0
    assert pg.load(pg.fix(names["make_model"]()), "published").sections == names["statement"].sections
    assert float(printed.split()[-1]) <= 3.0
    assert names["plan"].steps == 24


def _one_ledger_covers_both_networks(names: dict[str, Any], printed: str) -> None:
    assert names["statement"].numbers["releases"] == 3
    assert pg.load(names["Generator"](), "published/generator").sections == names["statement"].sections
    assert names["private_grad"].ledger.releases == 20
    assert float(printed.split()[-1]) <= 3.0


def _each_bridge_states_what_it_trained(names: dict[str, Any], printed: str) -> None:
    of_tickets, of_lightning = map(float, re.findall(r"^\d+\.\d+(?:e-?\d+)?$", printed, re.MULTILINE)[-2:])
    for model, delta, stated in ((names["model"], 1e-3, of_tickets), (names["module"], 1e-5, of_lightning)):
        (ledger,) = pg.ledgers_of(model)
        assert ledger.releases == max(ledger.planned_steps)
        assert stated == ledger.epsilon(delta=delta)


def _head_and_trainer_state_what_they_cost(names: dict[str, Any], printed: str) -> None:
    trainer, target = names["trainer"], names["budget"]["target_epsilon"]
    assert 0.98 * target < trainer.epsilon <= target
    assert printed.split()[-1] == str(trainer.epsilon)
    assert len(pg.ledgers_of(trainer.model)) == 2
    assert {"README.md", "statement.txt"} <= {path.name for path in Path("published").iterdir()}


def _quick_start_has_learned(names: dict[str, Any], printed: str) -> None:
    assert 2.9 < float(printed.split()[-1]) <= 3.0
    inputs, labels = names["data"].test.tensors
    assert (names["model"](inputs).argmax(1) == labels).float().mean() > 0.8


def _audits_pass(names: dict[str, Any], printed: str) -> None:
    assert printed
    assert set(printed.split()) == {"True"}


def _written_otherwise(path: str, numbers: dict[str, str]) -> str:
    text = (ROOT / path).read_text()
    for old, new in numbers.items():
        assert old in text
        text = text.replace(old, new)
    return text


def _own_model() -> dict[str, str]:
    """The module that `privgrad doctor` is shown, and an experiment of minutes made one of seconds."""
    steps = {
        "expected_batch_size = 2048": "expected_batch_size = 16",
        "steps = 800": "steps = 3",
        "num_evaluations = 5": "num_evaluations = 1",
    }
    fashion = _written_otherwise("examples/fashion_mnist.toml", steps)
    model = (
        "import torch\nimport torch.nn.functional as F\n\n\n"
        "def make_model():\n    return torch.nn.Linear(2, 2)\n\n\n"
        "def losses(model, batch):\n    return F.cross_entropy(model(batch[0]), batch[1], reduction='none')\n\n\n"
        "def public_batch():\n    return losses, (torch.randn(8, 2), torch.randint(2, (8,)))\n"
    )
    return {"examples/fashion_mnist.toml": fashion, "mypackage/models.py": model}


def _own_experiment() -> dict[str, str]:
    return {"mine.toml": (ROOT / "examples/digits.toml").read_text()}


def _fewer_runs() -> dict[str, str]:
    few = {"noise_steps = [0.01, 0.025, 0.06]": "noise_steps = [0.025]", "seeds = [0, 1, 2, 3, 4]": "seeds = [0]"}
    return {"examples/digits.toml": _written_otherwise("examples/digits.toml", few)}


def _experiment_of_the_page() -> dict[str, str]:
    (block,) = blocks("docs/extending.md", "toml")
    return {"mine.toml": block.text}


def _saved_head() -> dict[str, Any]:
    """The head of the recipe that the page trains first, with fewer steps."""
    images, labels = data.digits(standardize=False).train.tensors
    facts: dict[str, Any] = {
        "num_classes": 10,
        "source": "no data",
        "target_epsilon": 3.0,
        "delta": 1e-5,
        "num_examples": 1437,
    }
    head = pg.fit_head(images.flatten(1), labels, **facts, steps=2, progress=False)
    head.model.input_dims = 3
    head.save("runs/digits/head")
    return _features()


def _image_is_read_as_by_the_loader(names: dict[str, Any], printed: str) -> None:
    facts: dict[str, Any] = {"classes": ["indoors", "outdoors"], "size": 8, "channels": 1, "standardize": False}
    images = data.image_folder("photographs", unit="row", **facts).train.tensors[0]
    assert (images == names["image"] / 255).flatten(1).all(1).sum() == 1


def _own_data() -> dict[str, str]:
    """The page's experiment, and the file that its first block writes, with fewer patients."""
    block, *_ = blocks("docs/data-reference.md", "toml")
    rows = [
        f"p{p},{18 + p % 70},north,{90 + (p + k) % 70},{('no', 'yes')[(p + k) % 2]}"
        for p in range(2000)
        for k in (1, 2)
    ]
    return {"visits.toml": block.text, "visits.csv": "\n".join(["patient,age,ward,pressure,returned", *rows])}


def _visits_are_learned(names: dict[str, Any], printed: str) -> None:
    assert names["visits"].input_shape == (17,)
    assert float(printed.split()[-7]) > 0.7


def _budget() -> dict[str, str]:
    """The budget's file that the commands show."""
    with tempfile.TemporaryDirectory() as folder:
        budget = pg.Budget(
            Path(folder) / "budget.jsonl", total_epsilon=4.0, delta=1e-5, num_examples=50, privacy_unit="example"
        )
        budget.commit("mean of the columns", [Release(40.0, 1.0)])
        return {"budget.jsonl": budget.path.read_text()}


def _ledger() -> dict[str, str]:
    """The ledger that the command shows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        plan = make_plan(delta=1e-3)
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)
        for batch in plan.batches(make_data()):
            private_grad(batch)
        private_grad.ledger.close()
        return {"runs/digits/ledger.jsonl": path.read_text()}


def _the_page_publishes_the_same_model(names: dict[str, Any], printed: str) -> None:
    assert "are protected by differential privacy with epsilon = " in printed
    assert torch.equal(names["served"](names["images"]), names["model"](names["images"]))


def _search_has_learned(names: dict[str, Any], printed: str) -> None:
    assert names["search"].score(names["people"][2400:], names["votes"][2400:]) > 0.9
    assert "epsilon = 3" in printed


def _recipe() -> dict[str, str]:
    """The recipe that the page names, with fewer steps."""
    name = "examples/recipes/digits_private.toml"
    return {name: (ROOT / name).read_text().replace("steps = 200", "steps = 3")}


def _encoder() -> dict[str, Any]:
    """A small encoder with random weights, in the folder `encoder`."""
    import transformers
    from test_data_text import save_letter_tokenizer

    save_letter_tokenizer(Path("encoder"))
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    transformers.BertModel(transformers.BertConfig(vocab_size=81, **sizes)).save_pretrained("encoder")
    return {}


def _recipe_here() -> dict[str, Any]:
    write_files("docs/private-tuning.md", Path())
    return {}


GIVEN = {
    "README.md": Given(packages=("sklearn",), check=_quick_start_has_learned),
    "docs/commands.md": Given(
        smaller={"privgrad reproduce heavy-tail/fig2 ": "privgrad reproduce heavy-tail/fig2 --smoke "}, files=_own_model
    ),
    "docs/own-data.md": Given(packages=("pandas", "sklearn")),
    "docs/papers/README.md": Given(packages=("sklearn",)),
    "docs/audit.md": Given(
        smaller={
            "privgrad audit  ": "privgrad audit --trials 2000 --method vmap --epsilon 3  ",
            "privgrad audit mine.toml  ": "privgrad audit mine.toml --trials 600  ",
        },
        files=_own_experiment,
        check=_audits_pass,
    ),
    "docs/budget.md": Given(smaller={"steps = 1000 / 50_000, 100": "steps = 1000 / 50_000, 10"}, files=_budget),
    "docs/private-tuning.md": Given(names={"": _recipe_here}, files=_recipe),
    "docs/deploy.md": Given(
        files=_ledger,
        optional={"ONNX": ("onnx", "onnxruntime", "onnxscript")},
        check=_the_page_publishes_the_same_model,
    ),
    "docs/extending.md": Given(files=_experiment_of_the_page),
    "docs/features.md": Given(
        names={"From a folder of photographs to a private model": _features},
        smaller={"2000": "200", "keep=1024": "keep=100", "1500": "80"},
    ),
    "docs/features-text.md": Given(
        names={"": _encoder},
        smaller={'"sentence-transformers/all-MiniLM-L6-v2"': '"encoder"', "max_length=128": "max_length=32"},
        packages=("sklearn", "transformers"),
    ),
    "docs/recipes.md": Given(
        names={"The saved head": _saved_head}, packages=("sklearn",), check=_image_is_read_as_by_the_loader
    ),
    "docs/scikit-learn.md": Given(packages=("pandas", "sklearn"), check=_search_has_learned),
    "docs/federated.md": Given(names={"": _federated}, smaller={"rounds=100": "rounds=3"}),
    "docs/federations.md": Given(),
    "docs/flower.md": Given(names={"": _flower}, packages=("flwr",)),
    "docs/nvflare.md": Given(names={"": _nvflare}, smaller={"/secure": "secure"}, packages=("nvflare",)),
    "docs/guide.md": Given(
        names={"": _guide},
        smaller={"60_000": "200", "expected_batch_size=1024": "expected_batch_size=20", "2_000": "10"},
    ),
    "docs/optimizers.md": Given(names={"": _parts}),
    "docs/processes.md": Given(names={"": _parts}),
    "docs/data-reference.md": Given(files=_own_data, check=_visits_are_learned),
    "docs/images-and-texts.md": Given(packages=("sklearn",)),
    "docs/loop.md": Given(packages=("sklearn",)),
    "docs/methods.md": Given(names={"": _methods}),
    "docs/hugging-face.md": Given(
        names={"": _sentences},
        smaller={'"minilm"': '"encoder"', "2000": "60", "1e-4": "1e-2", '"trained", ': '"trained", use_cpu=True, '},
        packages=("accelerate", "peft", "transformers"),
        check=_head_and_trainer_state_what_they_cost,
    ),
    "docs/language-models.md": Given(
        names={"": _language_model, "Pairs of answers": _language_model},
        smaller={"2000": "24", "1e-4": "1e-2", "max_length=64": "max_length=8, use_cpu=True, bf16=False, report_to=[]"},
        packages=("accelerate", "peft", "trl"),
        check=_both_adapters_are_stated,
    ),
    "docs/integrations.md": Given(
        names={"Several texts per person": _tickets, "Lightning": _lightning},
        packages=("accelerate", "lightning", "peft", "transformers"),
        check=_each_bridge_states_what_it_trained,
    ),
    "docs/migration.md": Given(
        smaller={"EPOCHS, BATCH_SIZE, STOP_AT = 20": "EPOCHS, BATCH_SIZE, STOP_AT = 3"},
        packages=("opacus", "sklearn"),
        check=_script_is_moved,
    ),
    "docs/two-optimizers.md": Given(
        smaller={"steps=800": "steps=3"}, packages=("sklearn",), check=_one_ledger_covers_both_networks
    ),
    "docs/tuning.md": Given(smaller={"(512, 800), (1024, 400), (4096, 100)": "(4096, 100),"}, files=_fewer_runs),
}

# Commands that are not run from the documents: how they begin, and why not.
NOT_RUN = {
    "flwr run": "needs Ray; test_flower_sites runs it",
    "flower-super": "servers, with certificates; flower_job starts them without",
    "privgrad data fetch": "needs the network; test_data_fetching.py fetches from a server of its own",
    "make ": "what starts these tests, or takes longer than they do",
    "python -m benchmarks": "measures time, which no test does",
    "benchmarks/gpu_": "needs the network, or a GPU",
    "pip install": "changes the environment; test_packaging.py installs into one of its own",
}


def given(page: str) -> Given:
    return GIVEN.get(page, Given())


def smaller(block: Block) -> str:
    """The block's text with what is too large for a test written otherwise."""
    text = block.text
    for old, new in given(block.page).smaller.items():
        text = text.replace(old, new)
    return text


def run_python(page: str, printed: Callable[[], str]) -> None:
    """Run a page's python blocks where we are; `printed` tells what they have printed."""
    for package in given(page).packages:
        pytest.importorskip(package)
    names: dict[str, Any] = {"__name__": "__main__"}
    heading, missing = "", dict(given(page).names)
    names |= missing.pop("", dict)()
    said = ""
    for block in (block for block in blocks(page, "python") if not block.title):
        if block.heading != heading and block.heading in missing:
            names |= missing.pop(block.heading)()
        heading = block.heading
        if not all(map(find_spec, given(page).optional.get(heading, ()))):
            continue
        code = compile("\n" * (block.line - 1) + smaller(block), page, "exec")  # lines in errors are those of the page
        exec(code, names)
        now, shown = printed(), output_of(block)
        said += now
        if shown is not None:
            require_alike(shown, now, f"{page}:{block.line}")
    assert not missing, f"no python block under {', '.join(missing)}"
    given(page).check(names, said)


def commands(page: str) -> list[str]:
    """The lines of a page's console blocks that are run, in order."""
    return [line for block in blocks(page, "console") for line in lines_of(block)]


def lines_of(block: Block) -> list[str]:
    """The lines of a console block that are run; a line that ends in a backslash goes on."""
    text = smaller(block).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith(tuple(NOT_RUN))]


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page's blocks take as given, and those that its titled blocks are."""
    titled = {block.title: smaller(block) for block in blocks(page) if block.title}
    for name, text in (titled | given(page).files()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def run_commands(page: str, folder: Path, binaries: Path = Path(sys.executable).parent) -> None:
    """Run a page's commands by the shell, in a folder that holds what they take as given."""
    for path in (*(ROOT / "examples").iterdir(), *(ROOT / "examples/recipes").iterdir()):
        if path.is_file():
            here = folder / path.relative_to(ROOT)
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_text(path.read_text())
    write_files(page, folder)
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    for block in blocks(page, "console"):
        printed = ""
        for line in lines_of(block):
            done = subprocess.run(
                ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{page}: {line}\n{done.stdout}{done.stderr}"
            printed += done.stdout
        if (shown := output_of(block)) is not None:
            require_alike(shown, printed, f"{page}:{block.line}")
