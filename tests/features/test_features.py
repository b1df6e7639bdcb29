"""Features: each row depends on itself and on public numbers; whitening, saving, and the cache."""

import copy
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import privgrad as pg
from privgrad import features as ft
from privgrad.features.extractor import Extractor
from privgrad.statement.text import statement

SIZE = 12
PUBLIC = ft.silhouettes(300, SIZE, seed=1)
WITH_KYMATIO = pytest.param("scattering", marks=pytest.mark.skipif(find_spec("kymatio") is None, reason="kymatio"))


def network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Dropout(0.5))


def frozen(norm: nn.Module | None = None, **options: Any) -> ft.Frozen:
    numbers: dict[str, Any] = {"name": "small", "source": "random weights", "tolerance": 1e-6}
    return ft.Frozen(network(nn.BatchNorm2d(6) if norm is None else norm), lambda x: 2 * x - 1, **(numbers | options))


def patches() -> ft.Patches:
    return ft.Patches(PUBLIC, size=4, filters=10, places=2)


def by_second_moment() -> ft.Whitened:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(80, 80, generator=generator, dtype=torch.float64)
    return ft.Whitened.from_second_moment(patches(), (factor @ factor.T + (factor @ factor.T).T) / 2, keep=30)


MAKERS: dict[str, Callable[[], Extractor]] = {
    "patches": patches,
    "hog": lambda: ft.Hog(places=(3, 2)),
    "scattering": lambda: ft.Scattering(),
    "frozen": frozen,
    "fourier": lambda: ft.RandomFourier(SIZE * SIZE, 40, bandwidth=5.0),
    "whitened": lambda: ft.Whitened(ft.Hog(places=(3, 2)), PUBLIC, keep=50),
    "private moment": by_second_moment,
    "joined": lambda: ft.join((ft.Whitened(patches(), PUBLIC, keep=40), 1.0), (ft.Hog(places=(2,)), 0.5), frozen()),
}
NAMES = [WITH_KYMATIO if name == "scattering" else name for name in MAKERS]


def images(count: int, seed: int = 0) -> Tensor:
    """Return images of many kinds, so that companions differ from a row in scale, too."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [
        drawn(ft.silhouettes(count, SIZE, seed=seed + 10)),
        drawn(ft.pink_noise(count, SIZE, seed=seed + 10)),
        torch.rand(count, 1, SIZE, SIZE, generator=generator),
        torch.zeros(count, 1, SIZE, SIZE),
        torch.ones(count, 1, SIZE, SIZE),
    ]
    return torch.cat(kinds)[torch.randperm(5 * count, generator=generator)[:count]]


def drawn(public: ft.Public) -> Tensor:
    assert isinstance(public.rows, Tensor)
    return public.rows


# The rule


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_companions(name: str):
    """150 pairs of a row and companions for each extractor: other values, number and order. 1,080 pairs in all."""
    pairs = 30 if name == "scattering" else 150  # it is slow
    extractor, generator = MAKERS[name](), torch.Generator().manual_seed(1)
    rows, others = images(150), images(150, seed=5)
    alone = torch.cat([extractor(rows[i : i + 1]) for i in range(pairs)])
    assert alone.norm(dim=1).median() > 0.1
    changes: list[float] = []
    for i in range(pairs):
        count = int(torch.randint(1, 140, (), generator=generator))
        batch = others[torch.randperm(150, generator=generator)[:count]]
        place = int(torch.randint(0, count, (), generator=generator))
        batch[place] = rows[i]
        changes.append(float((extractor(batch)[place] - alone[i]).abs().max()))
    assert max(changes) <= 1e-6 * max(1.0, float(alone.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_order_and_batch_size_change_nothing(name: str):
    extractor, rows = MAKERS[name](), images(70)
    found = extractor(rows)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    tolerance = 1e-6 * max(1.0, float(found.abs().max()))
    torch.testing.assert_close(extractor(rows[order]), found[order], rtol=0, atol=tolerance)
    for size in (5, 64, 69):
        torch.testing.assert_close(
            torch.cat([extractor(part) for part in rows.split(size)]), found, rtol=0, atol=tolerance
        )
    assert found.dtype == torch.float32
    assert not found.requires_grad
    extractor.train()
    assert not any(part.training for part in extractor.modules())
    assert torch.equal(extractor((255 * rows).byte()), extractor((255 * rows).byte().float() / 255))


class Planted(Extractor):
    """An extractor with a fault of its own."""

    def __init__(self, fault: Callable[["Planted", Tensor], Tensor]) -> None:
        super().__init__("no data", total=torch.zeros(SIZE * SIZE))
        self.fault = fault
        self.seen: dict[str, Tensor] = {}

    def features(self, rows: Any) -> Tensor:
        return self.fault(self, rows.flatten(1))


def fitted_once(self: Planted, rows: Tensor) -> Tensor:
    if not hasattr(self, "mean"):
        self.mean = rows.mean(0)
    return rows - self.mean  # pyright: ignore


def counted(self: Planted, rows: Tensor) -> Tensor:
    self.get_buffer("total").add_(rows.sum(0))
    return rows


FAULTS: dict[str, Callable[[Planted, Tensor], Tensor]] = {
    "batch mean": lambda self, rows: rows - rows.mean(0),
    "batch scale": lambda self, rows: rows / (rows.std() + 1),
    "largest of the batch": lambda self, rows: rows / rows.max().clamp(min=0.1),
    "its neighbor": lambda self, rows: rows + 1e-4 * rows.roll(1, 0),
    "the last row": lambda self, rows: rows - 1e-4 * rows[-1],
    "its place": lambda self, rows: rows + 1e-4 * torch.arange(len(rows))[:, None],
    "sorted": lambda self, rows: rows[rows.sum(1).argsort()],
    "ranks": lambda self, rows: rows.argsort(0).argsort(0).float(),
    "statistics of the rows so far": lambda self, rows: (counted(self, rows), rows - self.get_buffer("total"))[1],
    "statistics kept for later": counted,
    "fitted on the first rows": fitted_once,
    "dropout": lambda self, rows: nn.functional.dropout(rows, 0.1, training=True),
}


@pytest.mark.parametrize("first", [torch.zeros(1, 1, SIZE, SIZE), torch.ones(1, 1, SIZE, SIZE)], ids=["black", "white"])
def test_a_first_row_without_features_hides_nothing(first: Tensor):
    class Centered(ft.Hog):
        def features(self, rows: Any) -> Tensor:
            made = super().features(rows)
            return made - made.mean(0)

    with pytest.raises(pg.PrivacyError, match="to depend on that row only"):
        Centered(places=(2,))(first)


@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_refused(fault: str, count: int):
    rows = images(count, seed=3) if count > 1 else drawn(ft.silhouettes(1, SIZE))
    with pytest.raises(pg.PrivacyError, match=r"to depend on that row only|to stay as it is"):
        Planted(FAULTS[fault])(rows)


def test_batch_statistics_of_networks_are_refused_or_switched_off():
    with pytest.raises(pg.PrivacyError, match="Frozen: expected each row's features to depend on that row only"):
        frozen(nn.BatchNorm2d(6, track_running_stats=False))(images(5))
    for norm in (nn.GroupNorm(3, 6), nn.InstanceNorm2d(6)):
        frozen(norm)(images(5))
    extractor, rows = frozen(), images(40)
    before = extractor(rows)
    extractor.module.train()  # as a training loop of its owner may do
    assert torch.equal(extractor(rows), before)
    mixing = ft.Frozen(nn.Sequential(nn.Flatten(), Mixing()), name="mixing", source="no data")
    with pytest.raises(pg.PrivacyError, match="Frozen: expected each row's features to depend on that row only"):
        mixing(rows)


class Mixing(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.softmax(rows @ rows.T, dim=1) @ rows


def test_rows_fill_a_block(monkeypatch: pytest.MonkeyPatch):
    """Without equal blocks, a product of one row is rounded differently from a product of many."""
    sizes: list[int] = []
    real = ft.Hog.features
    monkeypatch.setattr(ft.Hog, "features", lambda self, rows: (sizes.append(len(rows)), real(self, rows))[1])
    ft.Hog()(images(70))
    assert set(sizes) == {32}


def test_nested_extractors_decide_block_and_tolerance():
    small = frozen(block=5, tolerance=0.5)
    sizes: list[int] = []
    small.module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    joined = ft.join(ft.Hog(), small)
    joined(images(12))
    assert set(sizes) == {5}
    noisy = Planted(lambda self, rows: rows + 1e-3 * rows.roll(1, 0))
    with pytest.raises(pg.PrivacyError, match="Joined: expected each row's features to depend on that row only"):
        ft.join(noisy, frozen())(images(3))
    assert ft.join(noisy, small)(images(3)).isfinite().all()


# Whitening and joining


def test_whitening_by_its_formula():
    extractor = ft.Hog(places=(2,))
    made = ft.Whitened(extractor, PUBLIC, power=0.4, ridge=0.2, keep=20)
    x = ft.unit_rows(extractor(PUBLIC.rows)).double()
    centered = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(x))
    values, vectors = values.flip(0)[:20], vectors.flip(1)[:, :20]
    ridge = 0.2 * (centered.square().sum() / len(x)) / x.shape[1]
    rows = images(30)
    expected = (ft.unit_rows(extractor(rows)).double() - x.mean(0)) @ (vectors * (values + ridge) ** -0.4)
    expected = ft.unit_rows(expected)
    found = made(rows).double()
    signs = (found * expected).sum(0).sign()
    torch.testing.assert_close(found * signs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(30, dtype=torch.float64))
    assert made.source == "300 synthetic silhouettes (seed 1)"


def test_fewer_public_rows_than_features():
    """The directions are those of the larger matrix."""
    rows, extractor = images(30), patches()
    made = ft.Whitened(extractor, ft.Public(PUBLIC.rows[:20], "20 silhouettes"))
    assert made.keep == 19
    x = ft.unit_rows(extractor(PUBLIC.rows[:20])).double()
    centered = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / 20)
    values, vectors = values.flip(0)[:19], vectors.flip(1)[:, :19]
    scaled = vectors * (values + 0.3 * values.sum() / 19) ** -0.375
    expected = ft.unit_rows((ft.unit_rows(extractor(rows)).double() - x.mean(0)) @ scaled)
    found = made(rows).double()
    signs = (found * expected).sum(0).sign()
    torch.testing.assert_close(found * signs, expected, rtol=0, atol=1e-4)


def test_a_private_second_moment_takes_the_place_of_public_rows(tmp_path: Path):
    extractor, rows = ft.Hog(places=(2,)), images(400)
    moment = pg.release_second_moment(
        ft.unit_rows(extractor(rows)),
        bound=1.0,
        noise_multiplier=0.01,
        num_examples=400,
        ledger=tmp_path / "moment.jsonl",
        seed=0,
    )
    made = ft.Whitened.from_second_moment(extractor, moment, power=0.5, ridge=1e-3)
    found = made(rows)
    assert made.source == "private second moment, counted on a ledger of its own"
    values = torch.linalg.eigvalsh(found.T @ found / len(found)).flip(0)
    before = ft.unit_rows(extractor(rows))
    raw = torch.linalg.eigvalsh(before.T @ before / len(rows)).flip(0)
    assert values[0] / values[20] < 0.2 * raw[0] / raw[20]
    with pytest.raises(pg.PrivacyError, match="expected moment to be a symmetric matrix"):
        ft.Whitened.from_second_moment(extractor, moment[:3])


def test_a_statement_says_that_it_does_not_count_the_release_that_features_whiten_by(tmp_path: Path):
    extractor, rows, labels = ft.Hog(places=(2,)), images(200), torch.arange(200) % 2
    numbers: dict[str, Any] = {"num_examples": 200, "delta": 1e-4}
    path = tmp_path / "moment.jsonl"
    found = ft.unit_rows(extractor(rows))
    moment = pg.release_second_moment(found, bound=1.0, noise_multiplier=2.0, ledger=path, **numbers)
    made = ft.Whitened.from_second_moment(extractor, moment, keep=8)
    numbers |= {"target_epsilon": 1.0, "steps": 5, "num_classes": 2, "progress": False}
    head = pg.fit_head(made(rows), labels, extractor=made, **numbers)
    head.save(tmp_path / "head")
    alone = (tmp_path / "head" / "statement.txt").read_text()
    assert "would satisfy differential privacy" in alone
    assert "use a private statistic of the data, a second moment. Its release is not counted here." in alone
    assert head.result is not None
    together = str(statement([pg.Ledger(path, read_only=True), head.result.ledger], delta=1e-4))
    assert "are protected by differential privacy" in together


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_rows_in_half_precision_have_norm_1(size: float):
    """Their squares overflow above norm 256; such rows silently became zeros, and the head learned nothing."""
    rows = (torch.randn(4, 384) * size).half()
    for made in (ft.unit_rows(rows), ft.join(rows, rows)):
        assert made.dtype == torch.float16
        assert torch.allclose(made.float().norm(dim=1), torch.ones(4), atol=1e-2)


def test_join():
    rows, first, second = images(5), ft.Hog(places=(2,)), patches()
    joined = ft.join((first, 1.0), (second, 0.5))
    found = joined(rows)
    width = first(rows).shape[1]
    bright = first(rows).norm(dim=1) > 0
    torch.testing.assert_close(found[bright].norm(dim=1), torch.ones(int(bright.sum())))
    share = found[bright, width:].norm(dim=1) / found[bright, :width].norm(dim=1)
    torch.testing.assert_close(share, torch.full_like(share, 0.5))
    torch.testing.assert_close(found, ft.join((first(rows), 1.0), (second(rows), 0.5)))
    torch.testing.assert_close(ft.join(first, second)(rows), ft.join(first(rows), second(rows)))
    assert joined.source == "300 synthetic silhouettes (seed 1)"
    assert ft.join(first, ft.Hog()).source == "no data"
    assert ft.join(frozen(), second).source == "random weights; 300 synthetic silhouettes (seed 1)"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("make", [ft.silhouettes, ft.pink_noise])
def test_public_images(make: Callable[..., ft.Public], channels: int):
    public = make(40, 16, channels=channels, seed=2)
    rows = drawn(public)
    assert rows.shape == (40, channels, 16, 16)
    assert rows.min() >= 0
    assert rows.max() <= 1
    assert rows.std() > 0.1
    assert torch.equal(rows, make(40, 16, channels=channels, seed=2).rows)  # pyright: ignore
    assert not torch.equal(rows, make(40, 16, channels=channels, seed=3).rows)  # pyright: ignore
    assert "(seed 2)" in public.source
    extractor = ft.join(ft.Whitened(ft.Patches(public, size=3, filters=5), public), ft.Hog(places=(2,)))
    assert extractor(rows[:7]).isfinite().all()


# Saving


@pytest.mark.parametrize("name", NAMES)
def test_saved_extractors_compute_the_same(name: str, tmp_path: Path):
    extractor, rows = MAKERS[name](), images(9)
    ft.save_extractor(extractor, tmp_path)
    loaded = ft.load_extractor(tmp_path, modules={"small": frozen()})
    assert torch.equal(loaded(rows), extractor(rows))
    assert (loaded.digest(), loaded.source, loaded.config()) == (
        extractor.digest(),
        extractor.source,
        extractor.config(),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "constants.safetensors"]


def test_an_extractor_may_be_in_several_places(tmp_path: Path):
    hog = ft.Hog(places=(2,))
    whitened, rows = ft.Whitened(hog, PUBLIC, keep=5), images(4)
    extractor = ft.join(whitened, whitened, hog)
    ft.save_extractor(extractor, tmp_path)
    assert torch.equal(ft.load_extractor(tmp_path)(rows), extractor(rows))


def test_digests_differ():
    digests = {maker().digest() for name, maker in MAKERS.items() if name != "scattering"}
    digests |= {
        ft.Hog(orientations=10).digest(),
        ft.Whitened(ft.Hog(places=(3, 2)), PUBLIC, keep=50, power=0.3).digest(),
    }
    assert len(digests) == len(MAKERS) + 1
    assert patches().digest() == patches().digest()


def test_refused_files(tmp_path: Path):
    folder, joined = tmp_path / "joined", MAKERS["joined"]()
    ft.save_extractor(joined, folder)
    config = json.loads((folder / "config.json").read_text())

    def written(**changed: Any) -> Path:
        (folder / "config.json").write_text(json.dumps(config | changed))
        return folder

    other = frozen()
    with torch.no_grad():
        other.module[0].bias.add_(1)  # pyright: ignore
    given = {"small": frozen()}
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: ft.load_extractor(folder), r"expected modules to hold the Frozen 'small', got \{\}; make it"),
        (lambda: ft.load_extractor(folder, modules={"smal": other}), r"got \{'smal': 'Frozen'\}; make it with"),
        (lambda: ft.load_extractor(folder, modules={"small": ft.Hog()}), r"got \{'small': 'Hog'\}; make it with"),
        (lambda: ft.load_extractor(folder, modules={"small": other}), "expected the digest of"),
        (lambda: ft.load_extractor(tmp_path / "none", modules=given), "an undamaged .* got FileNotFoundError"),
        (lambda: ft.load_extractor(written(format=99), modules=given), "expected the format of .* to be 1, got 99"),
        (lambda: ft.load_extractor(written(extractor={}), modules=given), "to hold an undamaged extractor"),
        (
            lambda: ft.load_extractor(written(extractor={"class": "Hogg", "options": {}}), modules=given),
            r"expected the class to be defined, got Hogg; did you mean 'Hog'\?",
        ),
        (lambda: ft.load_extractor(written(digest="0"), modules=given), "expected the digest of"),
    ]
    for call, message in wrong:
        with pytest.raises(pg.PrivacyError, match=message):
            call()
    (folder / "constants.safetensors").write_bytes((folder / "constants.safetensors").read_bytes()[:-5])
    with pytest.raises(pg.PrivacyError, match="to hold an undamaged extractor"):
        ft.load_extractor(written(), modules=given)
    with pytest.raises(pg.PrivacyError, match="expected the extractor to be rebuilt from its files"):
        ft.save_extractor(Planted(FAULTS["batch mean"]), tmp_path / "planted")


# The cache


TRIAL = 5  # calls that try the rule on the first rows


class Counting(ft.Hog):
    """Hog that counts its blocks, and can die or sleep."""

    calls = 0
    limit = 10**9

    def features(self, rows: Any) -> Tensor:
        type(self).calls += 1
        if self.calls > self.limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().features(rows)


def cached(folder: Path, rows: Any, **options: Any) -> Tensor:
    numbers: dict[str, Any] = {"block": 16, "progress": False}
    return ft.cache(options.pop("extractor", ft.Hog(places=(2,))), rows, folder, **(numbers | options))


def test_a_cache_holds_the_features(tmp_path: Path):
    rows = images(90)
    found, direct = cached(tmp_path / "a", rows), ft.Hog(places=(2,))(rows)
    assert torch.equal(found, direct)
    assert torch.equal(cached(tmp_path / "a", TensorDataset(rows, torch.zeros(90)), block=50), direct)
    assert torch.equal(cached(tmp_path / "b", Photographs(rows)), direct)
    found[0] = 7.0  # stays in memory
    assert torch.equal(cached(tmp_path / "a", rows), direct)
    half = cached(tmp_path / "half", rows, dtype=torch.float16)
    assert torch.equal(half, direct.half())
    assert torch.equal(ft.cache(ft.Hog(places=(2,)), rows, progress=False), direct)
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


class Photographs(Dataset[tuple[Tensor, int]]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index


def fill_and_die(folder: Path, rows: Tensor, limit: int) -> None:
    Counting.limit = limit
    cached(folder, rows, extractor=Counting(places=(2,)))


def test_a_killed_cache_resumes_and_loses_one_block(tmp_path: Path):
    rows = images(160)  # ten blocks
    process = multiprocessing.get_context("fork").Process(target=fill_and_die, args=(tmp_path / "c", rows, TRIAL + 6))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with (tmp_path / "c/blocks.jsonl").open("a") as log:
        log.write('{"block": 6, "da')  # killed while it wrote
    Counting.calls, Counting.limit = 0, 10**9
    found = cached(tmp_path / "c", rows, extractor=Counting(places=(2,)))
    assert Counting.calls == TRIAL + 10 - 6
    assert torch.equal(found, ft.Hog(places=(2,))(rows))
    Counting.calls = 0
    assert torch.equal(cached(tmp_path / "c", rows, extractor=Counting(places=(2,))), found)
    assert Counting.calls == 0


def test_refused_caches(tmp_path: Path):
    rows, other = images(40), images(40)
    other[20, 0, 3, 3] += 0.25 if other[20, 0, 3, 3] < 0.5 else -0.25
    whole = tmp_path / "whole"
    cached(whole, rows)
    damages: dict[str, Callable[[Path], object]] = {
        "to be undamaged": lambda folder: os.truncate(folder / "features.npy", 1000),
        "features.npy to be undamaged": lambda folder: flip(folder / "features.npy"),
        "cache.json to be undamaged": lambda folder: (folder / "cache.json").write_text("{"),
        "blocks.jsonl to be undamaged": lambda folder: (folder / "blocks.jsonl").write_text("{}\n"),
        "expected the format to be 0": lambda folder: edit(folder / "cache.json", format=0),
        "to be a cache or an empty folder": lambda folder: (folder / "cache.json").unlink(),
    }
    for index, (message, damage) in enumerate(damages.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        for path in whole.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        damage(folder)
        with pytest.raises(pg.PrivacyError, match=message):
            cached(folder, rows)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: cached(whole, other), r"expected rows 16 and following to be those of .*/whole"),
        (lambda: cached(whole, rows[:39]), "expected the number of rows to be 40"),
        (lambda: cached(whole, rows, extractor=ft.Hog(places=(3,))), "expected the extractor to be"),
        (lambda: cached(whole, rows, dtype=torch.float16), "expected the dtype to be float32"),
        (lambda: cached(tmp_path / "x", rows, dtype=torch.int8), "cache: expected dtype to be 'float32' or 'float16'"),
        (lambda: cached(tmp_path / "x", rows, block=0), "expected block to be an integer >= 1"),
        (lambda: cached(tmp_path / "x", rows[:0]), "expected the number of rows"),
        (lambda: cached(tmp_path / "y", 1e6 * torch.ones(2, 3), extractor=Large(), dtype=torch.float16), "overflows"),
    ]
    for call, message in wrong:
        with pytest.raises(pg.PrivacyError, match=message):
            call()
    assert torch.equal(cached(whole, rows), ft.Hog(places=(2,))(rows))


def test_statistics_of_private_rows_are_found(tmp_path: Path):
    private = drawn(ft.pink_noise(80, SIZE))
    fitted = ft.Whitened(ft.Hog(places=(2,)), private[:30], source="public, so they say")
    for call in (
        lambda: cached(tmp_path, private, extractor=fitted),
        lambda: ft.cache(fitted, private, progress=False),
    ):
        with pytest.raises(
            pg.PrivacyError, match="share at most 15 rows with the public rows of the extractor, got at"
        ):
            call()
    as_bytes = (private * 255).round().to(torch.uint8)
    of_bytes = ft.Whitened(ft.Hog(places=(2,)), as_bytes[:30] / 255, source="public, so they say")
    for same in (as_bytes, as_bytes.double() / 255):
        with pytest.raises(pg.PrivacyError, match="share at most 15 rows"):
            ft.cache(of_bytes, same, progress=False)
    within = ft.join(ft.Hog(), ft.Patches(private, size=3, filters=4, source="public, so they say"))
    with pytest.raises(pg.PrivacyError, match="share at most 40 rows"):
        ft.cache(within, private, progress=False)
    few = ft.Whitened(ft.Hog(places=(2,)), torch.cat([private[:10], drawn(PUBLIC)[:20]]), source="some equal by chance")
    assert torch.equal(cached(tmp_path / "few", private, extractor=few), few(private))
    assert fitted(private[:30]).shape == (30, 29)  # the features of public rows


class Large(Extractor):
    def __init__(self) -> None:
        super().__init__("no data")

    def features(self, rows: Any) -> Tensor:
        return rows


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def hold(folder: Path, ready: Any) -> None:
    from privgrad.features.caching import _opened

    with _opened(folder, ft.Hog(), 3, torch.float32):
        ready.set()
        time.sleep(60)


def test_a_second_writer_is_refused(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(pg.PrivacyError, match="to have no other writer"):
            cached(tmp_path, images(3))
    finally:
        process.kill()
        process.join()


# Arguments


def test_refused_arguments():
    rows = images(5)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: ft.Whitened(ft.Hog(), rows), "Whitened: expected source to be given for bare rows"),
        (lambda: ft.Patches(rows), "Patches: expected source to be given for bare rows"),
        (lambda: ft.Patches(PUBLIC, source="more"), "Patches: expected source to be absent next to a Public"),
        (lambda: ft.Public(rows, " "), "Public: expected source to say where"),
        (lambda: ft.Whitened(ft.Hog(), rows[:0], source="no"), r"Hog: expected rows to be a tensor \(n, ...\), or"),
        (lambda: ft.Hog()(2 * rows - 1), "Hog: expected pixels to be in .0, 1., got -1 to .*; load pixels"),
        (lambda: ft.Hog()(rows[:, 0]), "Hog: expected rows to be images"),
        (lambda: ft.Hog()(rows[:0]), r"Hog: expected rows to be a tensor \(n, ...\), or a list"),
        (lambda: ft.Whitened(ft.Hog(), PUBLIC, keep=10**4), "Whitened: expected keep to be in"),
        (lambda: ft.Whitened(ft.Hog(), PUBLIC, power=0.6), "Whitened: expected power to be in"),
        (lambda: ft.Whitened(ft.Hog(), PUBLIC, ridge=0.0), "Whitened: expected ridge"),
        (lambda: ft.join((ft.Hog(), 0.0)), "join: expected a weight"),
        (lambda: ft.silhouettes(0), "silhouettes: expected n"),
        (lambda: ft.Hog()(torch.full_like(rows, float("nan"))), "expected pixels to be in"),
    ]
    for call, message in wrong:
        with pytest.raises(pg.PrivacyError, match=message):
            call()
    with pytest.raises(TypeError):
        ft.join(ft.Hog(), rows)  # pyright: ignore


def test_a_class_of_another_module_with_a_known_name_is_refused():
    with pytest.raises(pg.PrivacyError, match="expected the class name to be new"):

        class Hog(Extractor):  # pyright: ignore
            def features(self, rows: Any) -> Tensor:
                return rows

    assert copy.deepcopy(ft.Hog())(images(2)).shape == (2, 780)


def test_the_digest_of_a_frozen_network_names_its_layers_and_its_transform():
    linear = nn.Linear(4, 3)

    def frozen(layer: nn.Module, transform: Callable[[Tensor], Tensor] | None) -> str:
        return ft.Frozen(nn.Sequential(linear, layer), transform, name="n", source="no data").digest()

    made = [
        frozen(nn.ReLU(), None),
        frozen(nn.Tanh(), None),
        frozen(nn.ReLU(), lambda x: (x - 0.5) / 0.25),
        frozen(nn.ReLU(), lambda x: (x - 0.5) / 0.5),
        frozen(nn.ReLU(), nn.Tanh()),
    ]
    assert len(set(made)) == len(made)
    assert frozen(nn.ReLU(), lambda x: (x - 0.5) / 0.25) == made[2]


def test_stored_features_are_readable_by_their_owner_alone(tmp_path: Path):
    (tmp_path / "open").mkdir(mode=0o755)
    ft.cache(ft.RandomFourier(3, 4, bandwidth=1.0), torch.rand(5, 3), tmp_path / "open", progress=False)
    assert [path.name for path in (tmp_path / "open").iterdir() if path.stat().st_mode & 0o077] == []
