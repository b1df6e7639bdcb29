"""The command: `python -m tests.sensitivity --seconds 600`."""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.sensitivity.grammar import PARTS, ROOTS
from tests.sensitivity.large import Large, run_large, setting
from tests.sensitivity.mixing import KINDS, Mixed, run_mixed
from tests.sensitivity.search import LIMIT, Tally, run_case

_MIXING = 4  # of so many cases, one mixes examples


def main() -> int:
    """Draw cases until the time is up; print what was done, and each failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.sensitivity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to search, > 0")
    parser.add_argument("--seed", type=int, default=0, help="of all draws; with a number it names a case")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="number of a single case, to repeat it")
    parser.add_argument(
        "--first",
        choices=[*PARTS, *ROOTS],
        metavar="PART",
        help="the models' first part, by its name in grammar.py; else it is drawn",
    )
    parser.add_argument("--out", type=Path, help="file that failures are appended to, one JSON object a line")
    parser.add_argument("--shown", type=int, default=5, help="failures to print in full")
    parser.add_argument("--large", action="store_true", help="batches of 1,000 to 20,000 rows of few kinds instead")
    parser.add_argument("--mixing", choices=[*KINDS, "any"], help="only cases that mix examples, of one kind or any")
    parser.add_argument("--threads", type=int, help="of torch; default: its own")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if not 0 < options.seconds < math.inf or options.start < 0 or (options.only or 0) < 0:
        parser.error("expected --seconds to be positive and --start and --only to be at least 0")
    if options.out is not None:
        options.out.open("a").close()  # before the search, not after hours of it
    if options.large:
        return _search_large(options.seed, options.start, options.seconds, options.shown)
    if options.mixing:
        return _search_mixing(options)
    tally, began, computing = Tally(), time.monotonic(), time.process_time()
    kinds = Counter[str]()
    number = options.start if options.only is None else options.only
    failures, slowest, told, mixing = 0, (0.0, 0), began, list[Mixed]()
    while options.only is not None or time.monotonic() - began < options.seconds:
        started = time.process_time()
        if options.only is None and number % _MIXING == 0:
            mixing.append(run_mixed(options.seed, number))
            failures += mixing[-1].failed
            if mixing[-1].failed:
                _show("FAILED", vars(mixing[-1]))
        outcome = run_case(options.seed, number, options.first)
        slowest = max(slowest, (time.process_time() - started, number))
        tally.add(outcome)
        for pair in outcome.failures():
            failure = {"change": pair.change, "error": pair.error, "place": pair.place, "note": pair.note}
            failure |= {"after": round(time.monotonic() - began, 1)} | outcome.case.describe()
            failures += 1
            kinds["a change above C" if pair.error is None else pair.error[:100]] += 1
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(failure, default=str) + "\n")
            if failures <= options.shown:
                _show("FAILED", failure)
        if options.only is not None:
            _show("case", outcome.case.describe())
            for pair in outcome.pairs:
                _show("pair", vars(pair))
            break
        number += 1
        if time.monotonic() - told > 5:
            told = time.monotonic()
            sys.stderr.write(f"\r{tally.cases:,} models, {tally.pairs:,} pairs, {failures} failures")
            sys.stderr.flush()
    sys.stderr.write("\n")
    seconds = time.process_time() - computing
    speed = f"{tally.cases / seconds:.1f} a second of computing; slowest {slowest[0]:.1f} s, case {slowest[1]}"
    print(f"models drawn: {tally.cases:,} ({speed})")  # noqa: T201
    print(f"pairs compared: {tally.pairs:,}; largest change over C of those that held: {tally.largest:.6f}")  # noqa: T201
    print(f"refused: {sum(tally.refusals.values()):,}")  # noqa: T201
    for reason, count in tally.refusals.most_common():
        print(f"  {count:6,} {reason}")  # noqa: T201
    print(f"rounding jumps: {tally.verdicts['jump']:,}", *tally.jumps, sep="\n  ")  # noqa: T201
    _show_mixing(mixing)
    found = [f"{count:6,} {kind}" for kind, count in kinds.most_common()]
    print(f"failures: {failures:,}", *found, sep="\n  ")  # noqa: T201
    return 1 if failures else 0


def _search_mixing(options: argparse.Namespace) -> int:
    """Try cases that mix examples until the time is up; print those that nothing refused in time."""
    number, began, found = options.start if options.only is None else options.only, time.monotonic(), list[Mixed]()
    while time.monotonic() - began < options.seconds:
        found.append(run_mixed(options.seed, number, None if options.mixing == "any" else options.mixing))
        number += 1
        if found[-1].failed or options.only is not None:
            _show("FAILED" if found[-1].failed else "case", vars(found[-1]))
        if options.only is not None:
            break
    _show_mixing(found)
    return int(any(one.failed for one in found))


def _show_mixing(found: list[Mixed]) -> None:
    """Print how many cases of each kind were refused, and how many passed without a change above C."""
    for kind in KINDS:
        those = [one for one in found if one.parts[0] == kind]
        refused, failed = sum(one.refused is not None for one in those), sum(one.failed for one in those)
        told = f"{len(those):,}, refused {refused:,}, moved by more than {LIMIT} C before {failed:,}"
        print(f"mixing, {kind}: {told}")  # noqa: T201


def _search_large(seed: int, start: int, seconds: float, shown: int) -> int:
    """Compare pairs of large batches until the time is up; print the worst of each kind and the setting."""
    worst, failures, number, began = dict[str, Large](), 0, start, time.monotonic()
    while time.monotonic() - began < seconds:
        found = run_large(seed, number)
        number += 1
        if found.way not in worst or found.change > worst[found.way].change:
            worst[found.way] = found
        if not found.change <= LIMIT:
            failures += 1
            if failures <= shown:
                _show("FAILED", vars(found))
    told = f"{number - start:,} pairs of large batches, {failures:,} above {LIMIT} C; next: --start {number}"
    print(f"{told}\n{setting()}")  # noqa: T201
    for way, found in worst.items():
        _show(f"worst with {way}: {found.change:.6f} C", vars(found))
    return 1 if failures else 0


def _show(title: str, values: Mapping[str, object]) -> None:
    print(title, *(f"  {name}: {value}" for name, value in values.items()), sep="\n", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
