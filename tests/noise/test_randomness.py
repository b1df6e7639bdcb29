"""The noise's stream as a cipher, as normals and as a secret.

`PYTHONPATH=src:tests:tests/noise python -m test_randomness 100000000` measures that many normals of each kind.
"""

import base64
import json
import logging
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from scipy.special import ndtr
from test_noise import normals

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan, seed_of
from privgrad import rng
from privgrad.rng import BLOCK, RandomSource, Stream, box_muller

# NIST SP 800-38A, F.5.5: CTR-AES256.Encrypt.
NIST_KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
NIST_COUNTER = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
NIST_PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
NIST_CIPHER = bytes.fromhex(
    "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
)
KINDS = {"float32": (np.float32, False), "float64": (np.float64, False), "float64 dense": (np.float64, True)}
FROZEN: dict[str, Any] = {
    "id": "4cb96b3f5484ba16",
    "words": [5686353122477604725, 2414320340019439518],
    "float32": [-0.07989908009767532, -0.9802853465080261, 0.10953531414270401],
    "float64": [-0.9328647600076634, -0.3116191778552275, -1.589823613746261],
    "float64 dense": [-0.9328647600076634, -0.3116191778552275, -1.589823613746261],
}
ERROR = 1e-6  # two-sided probability that a right stream fails one of the statistical checks below


# The cipher


def test_the_key_stream_is_aes_256_in_counter_mode_as_nist_publishes_it():
    step, counter = (int.from_bytes(half, "big") for half in (NIST_COUNTER[:8], NIST_COUNTER[8:]))
    assert Stream(NIST_KEY)._key_stream(step, counter).update(NIST_PLAIN) == NIST_CIPHER


def test_words_are_the_encrypted_step_and_counter():
    """Against the block cipher alone: word pair i of a step is AES(key, step || i)."""
    blocks = b"".join((77).to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(5))
    expected = Cipher(algorithms.AES(NIST_KEY), modes.ECB()).encryptor().update(blocks)
    assert Stream(NIST_KEY).uint64(77, 10).tobytes() == expected


def test_streams_of_a_research_seed_are_frozen():
    """A change of these is a change of every seeded result."""
    stream = RandomSource(7).stream("noise")
    assert stream.public_id == FROZEN["id"]
    assert stream.uint64(3, 2).tolist() == FROZEN["words"]
    for kind, (dtype, dense) in KINDS.items():
        draw = stream.normal_blocks(3, dtype, dense=dense)
        found = [float(draw(0, 4)[0]), float(draw(0, 4)[2]), float(draw(2, 4)[1])]
        np.testing.assert_allclose(found, FROZEN[kind], rtol=2e-6 if dtype == np.float32 else 1e-13)


# The normals


@pytest.mark.parametrize("kind", KINDS)
def test_normals_are_box_muller_of_the_words(kind: str):
    """Each of 2,000 against the formula in Python's own floats, from words that the block cipher gives."""
    (dtype, dense), count, block = KINDS[kind], 2000, 3
    pairs, size = count // 2, np.dtype(dtype).itemsize

    def words(counter: int, length: int) -> bytes:
        units = range(counter, counter + length // 16 + 1)
        blocks = b"".join((5).to_bytes(8, "big") + unit.to_bytes(8, "big") for unit in units)
        return Cipher(algorithms.AES(NIST_KEY), modes.ECB()).encryptor().update(blocks)[:length]

    data = words(block * 8 * BLOCK // 16, (8 + size) * pairs)
    radii = np.abs(np.frombuffer(data[: 8 * pairs], np.int64).astype(object))
    turns = np.frombuffer(data[8 * pairs :], f"i{size}")
    tails = np.frombuffer(words(2**63 + block * 2 * BLOCK // 16, 4 * pairs), np.uint32).astype(object)
    halves = [(int(tail) + 0.5) / 2**32 for tail in tails] if dense else [0.5] * pairs
    lengths = [math.sqrt(-2 * math.log((r + half) / 2**63)) for r, half in zip(radii, halves, strict=True)]
    angles = [math.pi * (int(turn) + 0.5) / 2 ** (8 * size - 1) for turn in turns]
    expected = [r * f(a) for f in (math.cos, math.sin) for r, a in zip(lengths, angles, strict=True)]
    found = Stream(NIST_KEY).normal_blocks(5, dtype, dense=dense)(block, count)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 if dtype == np.float32 else 2e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_no_normal_is_zero_and_short_radii_are_exact(kind: str):
    """Where u rounds to 1, against 50 digits: words at and near both ends of their range, and angles at zero."""
    dtype, dense = KINDS[kind]
    gaps = [0, 1, 2, 3, 511, 512, 513, 2**30, 2**37, 2**38 - 1, 2**38, 2**39, 2**40 + 1, 2**44, 2**48 - 1, 2**49]
    words = [end for gap in gaps for end in (2**63 - max(gap, 1), gap - 2**63)]
    turns, tails = [0, -1, 1], np.array([0, 2**31, 2**32 - 1], np.uint32)
    z, bits = np.full(2 * len(words) * len(turns), np.nan, dtype), 8 * np.dtype(dtype).itemsize
    box_muller(
        np.repeat(np.array(words, np.int64), len(turns)),
        np.tile(np.array(turns, f"i{bits // 8}"), len(words)),
        z,
        np.tile(tails, len(words)) if dense else None,
    )
    expected: list[float] = []
    with mpmath.workdps(50):
        for word in words:
            for tail in tails.tolist():
                half = mpmath.mpf(tail + 0.5) / 2**32 if dense else mpmath.mpf(0.5)
                u = (abs(word) + half) / mpmath.mpf(2) ** 63
                expected.append(float(mpmath.sqrt(abs(2 * mpmath.log(u)))))  # abs: u is above 1 for -2^63 alone
    cosines, sines = z[: len(expected)].astype(np.float64), z[len(expected) :].astype(np.float64)
    angles = math.pi * (np.tile(turns, len(words)) + 0.5) / 2.0 ** (bits - 1)
    # Above 2^-7 float32 takes the logarithm of what it has rounded.
    close = np.array(expected) < 2.0**-7
    assert close.sum() == 14 * 6
    np.testing.assert_allclose(cosines[close], np.array(expected)[close], rtol=1e-6 if bits == 32 else 1e-14)
    np.testing.assert_allclose(cosines, expected, rtol=1e-3 if bits == 32 else 1e-12)
    np.testing.assert_allclose(sines, cosines * np.sin(angles), rtol=1e-6)
    assert (z != 0).all()


def smallest_radii(dtype: Any, count: int) -> np.ndarray:
    """-log u of words whose u is within 2^-21 of 1, over 2^-21: uniform in [0, 1] if radii are right."""
    generator = np.random.default_rng(seed_of(24))
    words = (2**63 - 1 - generator.integers(0, 2**42, count)).astype(np.int64)
    turns, z = np.zeros(count, f"i{np.dtype(dtype).itemsize}"), np.empty(2 * count, dtype)
    box_muller(words * generator.choice([-1, 1], count), turns, z)
    return z[:count].astype(np.float64) ** 2 / 2 * 2.0**21


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_smallest_radii_come_as_often_as_they_should(dtype: Any):
    """Half of them were below what float32 could tell from zero."""
    found = smallest_radii(dtype, 200_000)
    assert (found > 0).all()
    assert stats.kstest(found, "uniform").pvalue > ERROR
    for limit in (1e-4, 1e-3, 2.0**-4, 2.0**-3):  # 2^-4: where a radius in float32 was zero
        low, high = stats.binom.interval(1 - ERROR, len(found), limit)
        assert low <= (found < limit).sum() <= high


def test_that_measurement_rejects_an_atom_at_zero(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rng, "_mend_short", lambda *_: None)
    with pytest.raises(AssertionError):
        test_the_smallest_radii_come_as_often_as_they_should(np.float32)


def test_dense_normals_take_further_digits_of_the_radius(monkeypatch: pytest.MonkeyPatch):
    """With all other words zero, the radius is that of the tail's own words; which reaches 11.5."""
    counters: list[int] = []

    def key_stream(_: Stream, step: int, counter: int) -> Any:
        counters.append(counter)
        key = NIST_KEY if counter >= 1 << 63 else None
        plain = modes.CTR(step.to_bytes(8, "big") + counter.to_bytes(8, "big"))
        return Cipher(algorithms.AES(key), plain).encryptor() if key else Zeros()

    class Zeros:
        def update_into(self, zeros: memoryview, out: memoryview) -> None:
            out[: len(zeros)] = bytes(len(zeros))

    monkeypatch.setattr(Stream, "_key_stream", key_stream)
    z = Stream(NIST_KEY).normal_blocks(5, np.float64, dense=True)(2, 2000)
    first = (1 << 63) + 2 * BLOCK * 2 // 16
    assert counters == [2 * BLOCK * 8 // 16, first]
    units = b"".join((5).to_bytes(8, "big") + (first + i).to_bytes(8, "big") for i in range(250))
    tails = np.frombuffer(Cipher(algorithms.AES(NIST_KEY), modes.ECB()).encryptor().update(units), np.uint32)
    expected = [math.sqrt(-2 * math.log((int(tail) + 0.5) / 2**95)) for tail in tails]
    np.testing.assert_allclose(z[:1000], expected, rtol=1e-15)
    assert 0 < np.abs(z[1000:]).max() < 1e-17
    extreme = np.empty(4)
    box_muller(np.zeros(2, np.int64), np.zeros(2, np.int64), extreme, np.array([0, 2**32 - 1], np.uint32))
    assert extreme[0] == pytest.approx(math.sqrt(192 * math.log(2)))
    assert extreme[1] == pytest.approx(math.sqrt(126 * math.log(2)))


def measured(stream: Stream, kind: str, count: int, bins: int = 1 << 14) -> dict[str, Any]:
    """Moments, counts beyond thresholds and counts in equally likely bins, of so many normals."""
    dtype, dense = KINDS[kind]
    draw, sums, edges = stream.normal_blocks(0, dtype, dense=dense), np.zeros(4), np.zeros(bins, np.int64)
    beyond, largest = dict.fromkeys((3, 4, 5, 6), 0), 0.0
    for start in range(0, count, BLOCK):
        z = draw(start // BLOCK, min(BLOCK, count - start)).astype(np.float64)
        power = np.ones_like(z)
        for order in range(4):
            power *= z
            sums[order] += power.sum()
        edges += np.bincount((ndtr(z) * bins).astype(np.int64).clip(max=bins - 1), minlength=bins)
        np.abs(z, out=z)
        largest = max(largest, float(z.max()))
        beyond = {limit: found + int((z > limit).sum()) for limit, found in beyond.items()}
    deviations = np.cumsum(edges)[:-1] / count - np.arange(1, bins) / bins
    return {
        "kind": kind,
        "count": count,
        "moments": (sums / count).tolist(),
        "moments_in_standard_errors": ((sums / count - MOMENTS) / np.sqrt(SPREADS / count)).tolist(),
        "beyond": beyond,
        "beyond_expected": {limit: float(2 * stats.norm.sf(limit) * count) for limit in beyond},
        "largest": largest,
        "chi_square": (chi_square := float(((edges - count / bins) ** 2 / (count / bins)).sum())),
        "chi_square_p": float(stats.chi2.sf(chi_square, bins - 1)),
        "kolmogorov_smirnov": (distance := float(np.abs(deviations).max())),  # over the bins' edges
        "kolmogorov_smirnov_p": float(stats.kstwobign.sf(distance * math.sqrt(count))),
    }


def test_float32_normals_are_distributed_as_those_of_float64():
    """On the same words, so that no chance is in it: distribution functions differ by less than five in a million."""
    generator, bins, pairs = np.random.default_rng(0), 1 << 14, 1_000_000
    words = generator.integers(-(2**63), 2**63, pairs, np.int64, endpoint=False)
    turns = generator.integers(-(2**31), 2**31, pairs, np.int32, endpoint=False)
    narrow, wide = np.empty(2 * pairs, np.float32), np.empty(2 * pairs)
    box_muller(words.copy(), turns, narrow)
    box_muller(words.copy(), turns.astype(np.int64) << 32, wide)
    counts = [np.bincount((ndtr(z.astype(np.float64)) * bins).astype(np.int64), minlength=bins) for z in (narrow, wide)]
    assert np.abs(np.cumsum(counts[0] - counts[1])).max() / (2 * pairs) < 5e-6


MOMENTS, SPREADS = np.array([0.0, 1.0, 0.0, 3.0]), np.array([1.0, 2.0, 15.0, 96.0])  # of z to z^4: mean, variance


def require_normal(found: dict[str, Any]) -> None:
    assert np.abs(found["moments_in_standard_errors"]).max() < stats.norm.isf(ERROR / 2)
    for limit, seen in found["beyond"].items():
        low, high = stats.binom.interval(1 - ERROR, found["count"], 2 * stats.norm.sf(limit))
        assert low <= seen <= high, limit
    assert ERROR / 2 < found["chi_square_p"] < 1 - ERROR / 2
    assert found["kolmogorov_smirnov_p"] > ERROR


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_normals(kind: str):
    require_normal(measured(RandomSource(seed_of(21)).stream(kind), kind, 1_000_000))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_million_normals(kind: str):
    require_normal(measured(RandomSource(seed_of(22)).stream(kind), kind, 100_000_000))


@pytest.mark.parametrize("twin", [lambda z: 1.005 * z, lambda z: z + 0.01, lambda z: np.clip(z, -4, 4), np.round])
def test_the_measurement_rejects_what_is_not_normal(twin: Callable[[Any], Any]):
    class Twin(Stream):
        def normal_blocks(self, step: int, dtype: Any, **options: Any) -> Any:
            draw = super().normal_blocks(step, dtype, **options)
            return lambda block, count: twin(draw(block, count))

    with pytest.raises(AssertionError):
        require_normal(measured(Twin(NIST_KEY), "float64", 1_000_000))


def test_names_steps_blocks_and_dtypes_are_uncorrelated():
    """Correlations of values, magnitudes and signs of 200,000; error probability 1e-6 for all of them together."""
    source, count = RandomSource(seed_of(23)), 200_000

    def block(name: str, step: int, dtype: Any, index: int, dense: bool = False) -> np.ndarray:
        return source.stream(name).normal_blocks(step, dtype, dense=dense)(index, count).astype(np.float64)

    draws = [block("noise", 0, np.float32, 0), block("noise", 1, np.float32, 0), block("noise", 1 << 32, np.float32, 0)]
    draws += [block(name, 0, np.float32, 0) for name in ("dropout", "groups", "sampling", "noise ")]
    draws += [
        block("noise", 0, np.float32, 1),
        block("noise", 0, np.float64, 2),
        block("noise", 0, np.float64, 3, True),
    ]
    draws += [normals(RandomSource().stream("noise"), 0, count).numpy()]
    assert largest_correlation(draws) < limit_of(len(draws), count)
    # Two dtypes of one block share its words, and are seen to: no release draws them.
    assert largest_correlation([draws[0], block("noise", 0, np.float64, 0)]) > limit_of(2, count)


def largest_correlation(draws: list[np.ndarray]) -> float:
    rows = np.concatenate([np.stack([z, np.abs(z), np.sign(z)]) for z in draws])
    matrix = np.corrcoef(rows)
    for start in range(0, len(rows), 3):  # what is made of one draw is not independent
        matrix[start : start + 3, start : start + 3] = 0.0
    return float(np.abs(matrix).max())


def limit_of(draws: int, count: int) -> float:
    pairs = 9 * draws * (draws - 1) / 2
    return float(stats.norm.isf(ERROR / 2 / pairs)) / math.sqrt(count)


# The secret


def kept_secret(secrets: list[bytes], data: bytes) -> bool:
    """Whether none of them is in the data: as bytes, in hexadecimal, base64, as Python writes bytes, as a number."""
    lowered = data.lower()
    return not any(
        secret in data
        or secret.hex().encode() in lowered
        or base64.b64encode(secret).rstrip(b"=") in data
        or base64.urlsafe_b64encode(secret).rstrip(b"=") in data
        or repr(secret)[2:-1].encode() in data
        or any(str(int.from_bytes(secret, order)).encode() in data for order in ("big", "little"))
        for secret in secrets
    )


def test_the_search_finds_a_secret_however_it_is_written():
    secret = bytes(range(100, 132))
    written = [secret, secret.hex().upper().encode(), base64.b64encode(secret), repr(secret).encode()]
    written += [str(int.from_bytes(secret, "big")).encode(), pickle.dumps({"key": secret}), json.dumps([secret.hex()])]
    for data in written:
        assert not kept_secret([secret], b"..." + (data.encode() if isinstance(data, str) else data) + b"...")
    assert kept_secret([secret], b"nothing")


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The roots and keys made while the test runs."""
    made: list[bytes] = []
    make_stream, make_source = Stream.__init__, RandomSource.__init__

    def noting_stream(self: Stream, key: bytes) -> None:
        made.append(key)
        make_stream(self, key)

    def noting_source(self: RandomSource, seed: int | None = None) -> None:
        make_source(self, seed)
        made.append(self._root)

    monkeypatch.setattr(Stream, "__init__", noting_stream)
    monkeypatch.setattr(RandomSource, "__init__", noting_source)
    return made


def test_keys_are_in_no_file_log_or_output_of_a_training(
    secrets: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    model, caplog.handler.level = make_model(), logging.NOTSET
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    result = pg.fit(pg.PrivateGradient(model, loss_fn, make_plan(steps=3)), optimizer, make_data(), output_dir=tmp_path)
    assert len(secrets) >= 5  # two roots; sampling, noise, dropout
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"checkpoint.pt", "ledger.jsonl"} <= {path.name for path in files}
    output = capfd.readouterr()
    told = [caplog.text, output.out, output.err, repr(result), repr(optimizer.state_dict())]
    assert all(
        kept_secret(secrets, data) for data in [path.read_bytes() for path in files] + [t.encode() for t in told]
    )


def test_keys_are_in_no_repr_state_batch_or_exception(secrets: list[bytes]):
    plan = make_plan()
    private_grad, source = pg.PrivateGradient(make_model(), loss_fn, plan), RandomSource()
    batch = first_batch(plan, make_data())
    gradient = private_grad(batch)
    told = [
        repr(thing)
        for thing in (private_grad, source, private_grad._noise_stream, plan, batch, gradient, private_grad.ledger)
    ]
    told += [
        repr(private_grad.state_dict()),
        repr(private_grad.ledger.plan_facts),
        private_grad._noise_stream.public_id,
    ]
    noise = private_grad._noise_stream
    failing: tuple[Callable[[], object], ...] = (
        lambda: pickle.dumps(source),
        lambda: pickle.dumps(noise),
        lambda: private_grad(batch),
        lambda: normals(noise, -1, 2),
        lambda: normals(noise, 0, 2, np.int32),  # pyright: ignore[reportArgumentType]
        lambda: setattr(noise, "_process", -1) or normals(noise, 0, 2),
    )
    for act in failing:
        with pytest.raises((pg.PrivacyError, OverflowError, TypeError)) as caught:
            act()
        own, beyond = caught.value.__traceback__, caught.value.with_traceback
        told += traceback.TracebackException.from_exception(
            beyond(own and own.tb_next and own.tb_next.tb_next), capture_locals=True
        ).format()
    kept = [pickle.dumps(thing) for thing in (plan, batch, gradient, private_grad.state_dict())]
    assert len(secrets) >= 6
    assert all(kept_secret(secrets, data) for data in kept + [text.encode() for text in told])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_gradient_made_in_a_forked_child_has_noise_of_its_own():
    """And the one made before the fork releases nothing there."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=32)
    batches, model = list(plan.batches(make_data())), make_model()
    parents = pg.PrivateGradient(model, loss_fn, plan)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                parents(batches[0])
            except pg.PrivacyError:
                gradient = pg.PrivateGradient(model, loss_fn, plan)(batches[0])
                os.write(writing, gradient["0.weight"].numpy().tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        theirs = np.frombuffer(pipe.read(), np.float32)
    ours = parents(batches[0])["0.weight"].numpy().ravel()
    assert theirs.shape == ours.shape
    assert not np.isclose(theirs, ours, rtol=1e-3).any()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_is_known_though_its_number_is_the_parents(monkeypatch: pytest.MonkeyPatch):
    """As in a new namespace of processes."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    stream = RandomSource().stream("noise")
    normals(stream, 0, 2)
    child = os.fork()
    if child == 0:
        try:
            normals(stream, 0, 2)
        except pg.PrivacyError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    for name in KINDS:
        found = measured(RandomSource(22).stream(name), name, int(sys.argv[1]))
        require_normal(found)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
