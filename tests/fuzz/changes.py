"""Random changes to the bytes of a file."""

import random
import re
from collections.abc import Callable, Sequence

_NUMBER = re.compile(rb"-?\d+\.?\d*(?:e[+-]?\d+)?")
_NUMBERS = (
    *(b"0", b"-1", b"1", b"-0.0", b"1e308", b"1e-320", b"1e999", b"nan", b"inf", b"true", b"[]", b'""', b"{}"),
    *(str(value).encode() for value in (2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64, 10**400, 10**18)),
)
_TOKENS = (b"\0", b"\n", b"\r\n", b'"', b"'", b"{", b"}", b"[" * 2000, b"=", b",", b"\xff\xfe", b"\xf0\x9f\x98\x80")
_WORDS = (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\x01", b"\xff\xff\xff\x7f")

Change = Callable[[bytes, random.Random], bytes]


def _span(content: bytes, rng: random.Random, most: int = 64) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.randint(0, most))


def flip(content: bytes, rng: random.Random) -> bytes:
    """Turn over a few bits."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(content: bytes, rng: random.Random) -> bytes:
    """Keep the beginning, or the end."""
    place = rng.randrange(len(content) + 1)
    return content[:place] if rng.random() < 0.8 else content[place:]


def remove(content: bytes, rng: random.Random) -> bytes:
    """Take out a piece."""
    start, end = _span(content, rng, rng.choice((1, 64, 4096)))
    return content[:start] + content[end:]


def repeat(content: bytes, rng: random.Random) -> bytes:
    """Put a piece in a second time, somewhere; now and then a thousand times."""
    start, end = _span(content, rng, rng.choice((8, 64, 4096)))
    place = rng.randrange(len(content) + 1)
    return content[:place] + content[start:end] * rng.choice((1, 1, 1, 1000)) + content[place:]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    """Write other bytes over some: random ones, or a word that is a border case of integers."""
    start, end = _span(content, rng)
    new = rng.choice(_WORDS) if rng.random() < 0.5 else rng.randbytes(end - start)
    return content[:start] + new + content[start + len(new) :]


def insert(content: bytes, rng: random.Random) -> bytes:
    """Put in what means something to a parser."""
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice(_TOKENS) + content[place:]


def renumber(content: bytes, rng: random.Random) -> bytes:
    """Exchange a written number for a border case."""
    found = list(_NUMBER.finditer(content[:100_000]))
    if not found:
        return flip(content, rng)
    match = rng.choice(found)
    return content[: match.start()] + rng.choice(_NUMBERS) + content[match.end() :]


def swap_lines(content: bytes, rng: random.Random) -> bytes:
    """Exchange two lines, or put one over another."""
    lines = content.splitlines(keepends=True)
    if len(lines) < 2:
        return cut(content, rng)
    one, other = rng.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one] if rng.random() < 0.5 else lines[other]
    return b"".join(lines)


def swap_values(content: bytes, rng: random.Random) -> bytes:
    """Give a name the value of another: `a = 1`, `"a": 1`."""
    found = list(re.finditer(rb"(?<=[=:] )[^\n,{}]+", content[:100_000]))
    if len(found) < 2:
        return swap_lines(content, rng)
    target, source = rng.sample(found, 2)
    return content[: target.start()] + source[0] + content[target.end() :]


CHANGES: Sequence[Change] = (flip, cut, remove, repeat, overwrite, insert, renumber, swap_lines, swap_values)


def changed(content: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """One to four changes; now and then the end of another valid file in place of its own."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if others and rng.random() < 0.1:
            other = rng.choice(others)
            content = content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other) + 1) :]
        else:
            content = rng.choice(CHANGES)(content, rng)
    return content
