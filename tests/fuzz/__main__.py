"""The command: `python -m tests.fuzz READER --seconds 600`."""

import argparse
import faulthandler
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("", "lab", "models"))

from tests.fuzz.changes import changed
from tests.fuzz.readers import READERS, ReaderError, Target

_GIB = 1 << 30
_SLOW = 10.0  # seconds of computing; a reader that takes ten times as long is stopped
# Raised by the interpreter itself: what a reader has no business with.
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "ctypes.dlopen",
)


def is_forbidden(event: str, given: tuple[object, ...]) -> bool:
    """Return whether an audit event shows that a reader ran something.

    A PrivateGradient opens the process itself, to set how memory is kept: dlopen without a name loads nothing.
    """
    return event in _FORBIDDEN and (event, given) != ("ctypes.dlopen", (None,))


def main() -> int:
    """Fuzz until the time is up; keep what fails, tell what was done."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("reader", choices=sorted(READERS))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first execution, to repeat one that failed")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fuzz", help="where failures go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        readers = READERS[options.reader]
        targets = [Target(reader, Path(folder) / str(index)) for index, reader in enumerate(readers)]
        # What readers load on first use is loaded by now.
        done: set[str] = set()
        sys.addaudithook(lambda event, given: done.add(event) if is_forbidden(event, given) else None)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _GIB, resource.RLIM_INFINITY))
        counts, failures, slowest = Counter[str](), Counter[str](), 0.0
        number, until = options.start, time.monotonic() + options.seconds
        while time.monotonic() < until:
            rng = random.Random(f"{options.reader} {options.seed} {number}")
            target = targets[number % len(targets)]
            file, began = target.change(changed, rng), time.process_time()
            faulthandler.dump_traceback_later(10 * _SLOW, exit=True)
            try:
                counts["read" if target.read() else "refused"] += 1
                seconds = time.process_time() - began
                slowest = max(slowest, seconds)
                if done or seconds > _SLOW:
                    raise ReaderError(f"called {done}" if done else f"took more than {_SLOW:g} s")
            except ReaderError as error:
                counts["failed"] += 1
                if not failures[str(error)[:60]]:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    kept = options.keep / f"{options.reader}-{options.seed}-{number}-{file.name}"
                    kept.write_bytes(file.read_bytes())
                    traceback.print_exc()
                    print(f"execution {number}: {error}; kept as {kept}", flush=True)  # noqa: T201
                failures[str(error)[:60]] += 1
                done.clear()
            faulthandler.cancel_dump_traceback_later()
            target.restore()
            number += 1
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    print(f"{options.reader}: {sum(counts.values()):,} executions ({told}), slowest {slowest:.2f} s")  # noqa: T201
    print(*(f"  {count} times {error}" for error, count in failures.most_common()), sep="\n")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
