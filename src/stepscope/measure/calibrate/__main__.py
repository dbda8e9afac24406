"""python -m stepscope.measure.calibrate: the raw measurements as JSON, with torch alone.

python -m stepscope.measure.calibrate --json machine.json
torchrun --nproc-per-node=8 -m stepscope.measure.calibrate --json job.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.measure.calibrate.settings import KINDS, PROGRESS, CalibrationSettings


def main() -> int:
    """Rank 0 writes the answer; a rank that fails writes the reason next to it."""
    options = _options()
    try:
        from stepscope.measure.calibrate.job import measure

        measured = measure(
            CalibrationSettings(
                backend=options.backend,
                max_bytes=options.max_bytes,
                seconds=options.seconds,
                quick=options.quick,
                kinds=tuple(options.kind or KINDS),
                seed=options.seed,
                algorithms=options.algorithms,
                sizes_bytes=tuple(options.size or ()),
            ),
            _progress_writer(options.progress),
        )
    except Exception as error:
        code = error.exit_code if isinstance(error, StepscopeError) else 1
        _report_failure(options.json, error, code)
        return code
    if measured is not None:
        text = json.dumps(measured)
        if options.json is None:
            sys.stdout.write(text + "\n")
        else:
            options.json.write_text(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stepscope.measure.calibrate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="stdout where none is named")
    parser.add_argument("--backend")
    parser.add_argument("--max-bytes", type=int)
    parser.add_argument("--seconds", type=float, help="for each kind of collective in each group")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this collective")
    parser.add_argument("--algorithms", action="store_true", help="algorithms of collectives only")
    parser.add_argument("--size", type=int, action="append", help="of the algorithms' vectors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", action="store_true", help="lines on stderr for a program")
    return parser.parse_args()


def _progress_writer(wanted: bool) -> Callable[[str, float], None]:
    def write(what: str, share: float) -> None:
        if wanted and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{PROGRESS} {share:.3f} {what}\n")
            sys.stderr.flush()

    return write


def _report_failure(answer: Path | None, error: Exception, code: int) -> None:
    rank = os.environ.get("RANK")
    ours = isinstance(error, StepscopeError)
    what = str(error) if ours else f"{type(error).__name__}: {error}"
    line = what if rank is None else f"rank {rank}: {what}"
    sys.stderr.write(f"stepscope: {line}\n")
    if answer is not None:
        failure = answer.with_name(f"{answer.name}.error-{rank or 0}")
        failure.write_text(json.dumps({"message": line, "exit_code": code}))


if __name__ == "__main__":
    sys.exit(main())
