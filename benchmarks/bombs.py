"""Small files that expand to 4 GB of text: how long reading each takes, and how much memory.

The files repeat one compressed member, so that making them takes no time. Each is read in a process
of its own.

    python bombs.py [--gigabytes 4] [--only NAME]
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import tempfile
from pathlib import Path

EVENT = b'{"ph": "X", "cat": "cpu_op", "name": "mm", "pid": 1, "tid": 1, "ts": 10, "dur": 5}'
OPEN = b'{"traceEvents": ['
IN_EVENT = OPEN + EVENT + b', {"ph": "X", '
# Name -> the text that comes first, and the text that is repeated.
BOMBS = {
    "blanks": (b"", b" "),
    "one string": (b'{"a": "', b"x"),
    "one string in an event": (IN_EVENT + b'"name": "', b"x"),
    "one number in an event": (IN_EVENT + b'"ts": ', b"9"),
    "keys before the events": (b"{", b'"a": 1, '),
    "keys in an event": (IN_EVENT + b'"args": {', b'"a": 1, '),
    "shapes in an event": (IN_EVENT + b'"args": {"Input Dims": [', b"[1, 2], "),
    "keys after the events": (OPEN + EVENT + b"]", b', "a": 1'),
    "commas": (b"[", b","),
    "brackets": (OPEN, b"["),
    "braces": (OPEN + EVENT + b", ", b"{"),
    "empty objects": (OPEN + EVENT, b", {}"),
    "damaged events": (OPEN + EVENT, b', {"ph": x}'),
    "odd events": (OPEN + EVENT, b', {"ph": 1}'),
    "zeros after an event": (OPEN + EVENT + b", ", b"\0"),
}
_MEMBER_BYTES = 32 << 20
_READ = """
import resource, sys, time
from stepscope import StepscopeError, read_trace
began = time.monotonic()
try:
    trace = read_trace(sys.argv[1], cache=False)
    answer = f"{trace.events} events, " + ", ".join(note.id for note in trace.quality)
except StepscopeError as error:
    answer = "refused: " + str(error).partition(sys.argv[1])[2][:90]
seconds, usage = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
own = usage.ru_utime + usage.ru_stime
print(f"{seconds:6.1f} s {own:6.1f} s {usage.ru_maxrss >> 10:5d} MB  {answer}")
"""


def write_bomb(path: Path, begin: bytes, filling: bytes, size_bytes: int) -> None:
    """The members of a gzip file form one text."""
    member = gzip.compress(filling * (_MEMBER_BYTES // len(filling)), 9)
    with path.open("wb") as file:
        file.write(gzip.compress(begin))
        for _ in range(size_bytes // _MEMBER_BYTES):
            file.write(member)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--only", choices=BOMBS)
    options = parser.parse_args()
    print(f"{'':26}{'file':>8}  {'took':>8} {'computed':>8} {'memory':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (begin, filling) in BOMBS.items():
            if options.only in (None, name):
                path = Path(folder) / "bomb.json.gz"
                write_bomb(path, begin, filling, int(options.gigabytes * 2**30))
                size = f"{path.stat().st_size / 1e6:.1f} MB"
                command = [sys.executable, "-c", _READ, str(path)]
                answer = subprocess.run(command, capture_output=True, text=True, check=False)
                print(
                    f"{name:26}{size:>8}  {(answer.stdout or answer.stderr[-200:]).rstrip()}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
