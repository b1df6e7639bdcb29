"""The readers, their valid files, and how a change gets past what guards a file's outside."""

import gzip
import hashlib
import json
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from test_data_images import pack, write_cifar, write_cifar100, write_fashion, write_imagenet32
from test_data_sparse import write_imdb, write_tweets
from test_data_text import save_byte_tokenizer, write_brown, write_e2e, write_lists, write_snli, write_stackoverflow
from torch import nn

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad import data
from privgrad.accounting.mechanisms import Release, Selection, Split
from privgrad.ledger import file as ledger_file
from privgrad.statement.text import budget_statement
from privgrad.training.checkpoint import write_checkpoint
from privgrad_lab.load_spec import load_spec

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Attributes:
        write: fills a folder with valid files.
        read: reads them.
        inside: takes off what guards a file's outside (a checksum, compression), if there is such a thing.
        outside: puts it on again, so that a change reaches what lies behind.
        pattern: which of the files are changed.
        refused: whether the files are hostile, and refused as they are.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    inside: Callable[[bytes], bytes] = bytes
    outside: Callable[[bytes], bytes] = bytes
    pattern: str = "*"
    refused: bool = False


class Harm:
    """Unpickled, it would leave a file named "harm" in the folder it is read from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (Path.touch, (self.folder / "harm",))


# Specifications

_SPEC = """
title = "All that a specification can say"
paper = { "DP-SGD" = { accuracy = 0.5 } }
[data]
use = "fashion-mnist"
path = "somewhere"
validation = 1000
public = 500
standardize = true
elsewhere = { use = "mnist", path = "elsewhere", validation = 0 }
[model]
use = "mlp"
activation = "relu"
hidden = 32
depth = 2
[privacy]
target_epsilon = 3.0
delta = 1e-5
max_grad_norm = 1.0
num_examples = 58500
expected_batch_size = 512
steps = 100
sampling = "poisson"
[[methods]]
name = "DP-SGD"
optimizer = { use = "SGD", lr = [0.1, 0.5], momentum = 0.9, nesterov = true, weight_decay = 0.01 }
max_grad_norm = [0.5, 1.0]
perturb = { use = "BAM", radius = [0.01, 0.05], mode = "exact" }
[[methods]]
name = "AdaDPS"
optimizer = { use = "AdamBC", lr = 0.01, betas = [0.9, 0.99], debias_floor = 0.5, gamma_prime = 1e-8 }
precondition = { use = "public_rmsprop", alpha = 0.9, eps = 1e-5 }
public = { examples = 100, batch_size = 10 }
group_size = 4
[[methods]]
name = "counts"
optimizer = { use = "RMSpropPub", lr = 0.01 }
assumed_noise_std = 0.1
warm_start = { lr = 0.1, epochs = 1, batch_size = 10 }
[tuning]
lr = [0.01, 0.1]
seeds = [0, 1]
by = "accuracy"
extend = true
[run]
seeds = [0, 1, 2]
num_evaluations = 5
augmentation_multiplicity = 2
ema_decay = 0.99
engine = "factored"
memory_mb = 100.0
"""
_STEPS = """
title = "One grid of noise steps"
[data]
use = "digits"
validation = 200
public = 37
[model]
use = "linear"
[privacy]
noise_multiplier = 2.0
delta = 1e-4
max_grad_norm = 0.1
num_examples = 1200
expected_batch_size = 60
steps = 100
simulate = 2
[[methods]]
name = "DP-SGD"
optimizer = { use = "SGD", momentum = [0.5, 0.9] }
schedule = { decay = "cosine", warmup = 0.05 }
[[methods]]
name = "Adam"
optimizer = { use = "Adam", betas = [[0.9, 0.99], [0.5, 0.99]] }
[[methods]]
name = "AdaDPS"
optimizer = "SGD"
precondition = { use = "public_adam", keep = 0.9, schedule = "epoch", noise_eps = [0.1, 10.0] }
[[methods]]
name = "public"
optimizer = { use = "MirrorDescent", lr = [1.0, 4.0] }
max_grad_norm = [0.1, 0.2]
[[methods]]
name = "fixed"
optimizer = { use = "AdamBC", noise_step = 0.02, debias_floor = 4.0 }
[tuning]
noise_steps = [0.01, 0.04]
seeds = [100, 101]
by = "loss"
extend = true
[run]
schedule = "linear"
"""


def _write_specs(folder: Path) -> None:
    for file in (_ROOT / "examples").glob("*.toml"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "all.toml").write_text(_SPEC)
    (folder / "steps.toml").write_text(_STEPS)


def _read_specs(folder: Path) -> None:
    for file in sorted(folder.glob("*.toml")):
        load_spec(file)


# Ledgers


def _write_ledger(folder: Path) -> None:
    plan = make_plan(seed=5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=folder / "ledger.jsonl")
    for batch in plan.batches(make_data()):
        private_grad(batch)
    private_grad.ledger.close()


def _read_ledger(folder: Path) -> None:
    record = pg.Ledger(folder / "ledger.jsonl", read_only=True)
    record.epsilon(delta=1e-5, accountant="rdp")
    assert record.plan_facts["num_examples"] > 0
    assert record.plan_facts["sampling"]
    pg.Ledger(folder / "ledger.jsonl").close()


def _resealed(content: bytes) -> bytes:
    head, out = "", b""
    for line in content.split(b"\n"):
        sealed, head = ledger_file._sealed(head, line)
        out += sealed + b"\n"
    return out


def _unsealed(content: bytes) -> bytes:
    return b"\n".join(line.rpartition(ledger_file._SEAL)[0] + b"}" for line in content.splitlines())


# Budgets


def _write_budget(folder: Path) -> None:
    """Fill a budget with a commitment of every kind, recorded values, and a ledger that has begun."""
    numbers: dict[str, Any] = {"total_epsilon": 50.0, "delta": 1e-3, "num_examples": 32, "privacy_unit": "example"}
    budget = pg.Budget(folder / "budget.jsonl", **numbers)
    plan, one = make_plan(noise_multiplier=9.0), Release(30.0, 1.0)
    ledger = budget.open_ledger(folder / "ledger.jsonl", plan, name="training", by="Ada")
    pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)
    ledger.close()
    best = Selection((Release(30.0, 0.5, count=3), one), 2.0, float("inf"))
    budget.commit("groups", [Split(((one, best), (one,)))], by="Ben", place="somewhere")
    budget.commit_release("mean", one, released="mean [2], bound 1.0", is_seeded=True)
    budget.record("mean", [0.5, -1e-300])


def _read_budget(folder: Path) -> None:
    budget = pg.Budget(folder / "budget.jsonl")
    str(budget_statement(budget))
    budget.released("mean")
    budget.commit(f"number {len(budget.commitments)}", [Release(40.0, 1.0)])
    budget.open_ledger(folder / "ledger.jsonl", make_plan(noise_multiplier=9.0), name="training").close()
    assert budget.spent() <= budget.total_epsilon


# Checkpoints


def _train(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    plan = make_plan(steps=3, seed=5, delta=1e-5)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, perturb=pg.perturb.SAT(0.1))
    pg.fit(private_grad, optimizer, make_data(), output_dir=folder, ema_decay=0.9, progress=False)


def _write_hostile_checkpoint(folder: Path) -> None:
    _train(folder)
    write_checkpoint({"version": Harm(folder), "model": [Harm(folder)]}, folder / "checkpoint.pt")


def _undigested(content: bytes) -> bytes:
    return content[:-32]


def _digested(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


# Data


def _write_hostile_cifar(folder: Path) -> None:
    write_cifar(folder, count=2)
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": Harm(folder), b"labels": []}))


def _write_cifar_archive(folder: Path) -> None:
    write_cifar(folder.with_name("cifar-10-batches-py"), count=2)
    pack(folder.with_name("cifar-10-batches-py"), folder / "cifar-10-python.tar.gz")


def _write_tokenizer(folder: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *"-+.!", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def _write_snli(folder: Path) -> None:
    folder.rmdir()
    write_snli(folder)
    _write_tokenizer(folder)


def _write_ptb(folder: Path) -> None:
    for part, text in (("train", " the <unk> cat n't \n the N cat \n"), ("valid", " a cat flew \n the cat sat \n")):
        (folder / f"ptb.{part}.txt").write_text(text)
    (folder / "ptb.test.txt").write_text(" the sat the \n")


def _write_e2e(folder: Path) -> None:
    write_e2e(folder)
    save_byte_tokenizer(folder)


def _write_rows_of_amazon(folder: Path) -> None:
    write_imdb(folder, count=50)
    (folder / "train.csv").write_text('"5","good","a ""film""\\n"\n"3","so","so"\n"1","bad","film"\n')


def _write_amazon(folder: Path) -> None:
    write_imdb(folder, count=50)
    reviews = [{"overall": stars, "reviewText": "good film"} for stars in (5.0, 3.0, 1.0)]
    (folder / "reviews.json").write_text("\n".join(map(json.dumps, reviews)))


def _unzipped(content: bytes) -> bytes:
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def _zipped(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def _write_brown(folder: Path) -> None:
    folder.rmdir()
    write_brown(folder, files=4)


READERS: dict[str, Sequence[Reader]] = {
    "spec": [Reader(_write_specs, _read_specs)],
    "ledger": [Reader(_write_ledger, _read_ledger, _unsealed, _resealed)],
    "budget": [Reader(_write_budget, _read_budget, _unsealed, _resealed, pattern="*.jsonl")],
    "checkpoint": [
        Reader(_train, _train, _undigested, _digested, pattern="*.pt"),
        Reader(_write_hostile_checkpoint, _train, _undigested, _digested, pattern="*.pt", refused=True),
    ],
    "data": [
        Reader(partial(write_fashion, count=6), lambda f: data.fashion_mnist(f, validation=2), _unzipped, _zipped),
        Reader(partial(write_cifar, count=2), data.cifar10),
        Reader(write_cifar100, data.cifar100),
        Reader(partial(write_imagenet32, count=1), data.imagenet32),
        Reader(_write_hostile_cifar, data.cifar10, refused=True),
        Reader(_write_cifar_archive, data.cifar10, _unzipped, _zipped),
        Reader(_write_brown, lambda f: data.brown(f, length=5), pattern="ca*"),
        Reader(_write_ptb, lambda f: data.ptb(f, length=2)),
        Reader(_write_snli, lambda f: data.snli(f, tokenizer=f, length=8), pattern="*.jsonl"),
        Reader(_write_e2e, lambda f: data.e2e(f, tokenizer=f, length=16), pattern="*.csv"),
        Reader(write_stackoverflow, lambda f: data.stackoverflow(f, words=3, tags=2, limit=3, minimum=2)),
        Reader(write_stackoverflow, lambda f: data.stackoverflow_tags(f, words=3, tags=2, users=2)),
        Reader(write_lists, lambda f: data.debian_sections(f, words=50, length=8, validation=2), pattern="*main*"),
        Reader(write_lists, lambda f: data.debian_tags(f, words=50, length=8), pattern="*main*"),
        Reader(_write_amazon, lambda f: data.imdb(f, words=9, length=6), _unzipped, _zipped, pattern="*.gz"),
        Reader(_write_amazon, lambda f: data.imdb(f, amazon=str(f / "reviews.json")), pattern="*.json"),
        Reader(_write_rows_of_amazon, lambda f: data.imdb(f, amazon=str(f / "train.csv")), pattern="*.csv"),
        Reader(write_tweets, lambda f: data.tweets(f, words=9, length=6)),
    ],
}


class ReaderError(Exception):
    """What must not happen."""


class Target:
    """One reader with its valid files in a folder."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        folder.mkdir(parents=True)
        reader.write(folder)
        if self.read() == reader.refused:
            raise ReaderError(f"the files in {folder} were read otherwise than they should be")
        self.files = {file: file.read_bytes() for file in sorted(folder.glob(reader.pattern)) if file.is_file()}

    def change(self, change: Callable[[bytes, Sequence[bytes], random.Random], bytes], rng: random.Random) -> Path:
        """Change one file; half of the times behind what guards its outside."""
        file = rng.choice(list(self.files))
        past_guard, others = rng.random() < 0.5, [*self.files.values()]
        if past_guard:
            inner = [self.reader.inside(content) for content in others]
            content = self.reader.outside(change(self.reader.inside(self.files[file]), inner, rng))
        else:
            content = change(self.files[file], others, rng)
        file.write_bytes(content)
        return file

    def read(self) -> bool:
        """Read the files; whether that succeeded.

        Raises:
            ReaderError: anything but success or a PrivacyError that no lack of memory caused.
        """
        refused = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.reader.read(self.folder)
        except pg.PrivacyError as error:
            refused, cause = True, error.__cause__
            while cause is not None:
                if isinstance(cause, MemoryError):
                    raise ReaderError("out of memory") from error
                cause = cause.__cause__ or cause.__context__
        except Exception as error:
            raise ReaderError(f"{type(error).__name__}: {error}") from error
        if (self.folder / "harm").exists():
            raise ReaderError("a file has run code")
        return not refused

    def restore(self) -> None:
        """Put back the valid files."""
        for file, content in self.files.items():
            file.write_bytes(content)
