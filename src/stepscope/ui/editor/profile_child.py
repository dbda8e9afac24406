"""Profiles one script in a process of its own, which can be ended at any time.

python -m stepscope.ui.editor.profile_child < request   (JSON: ProfileRequest)

The script's processes end with this one, whatever ends it.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.measure.settings import Settings
from stepscope.measure.trial import ENOUGH
from stepscope.records.figures import long_duration
from stepscope.ui.captured_command import capture_to_end
from stepscope.ui.command_to_end import last_lines

# Step 0 sets things up, 1 warms the profiler up, 2 and 3 are recorded, memory is measured in 5 and
# lines in 8 and 9; the rest is measured without any of it.
WAIT, WARMUP, ACTIVE, STEPS = 1, 1, 2, 20
_LAST_LINES = 8


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, for how long, and where the run folder goes."""

    command: tuple[str, ...]
    folder: str
    cwd: str
    limit_s: float


class ProfiledScript(msgspec.Struct, frozen=True, kw_only=True):
    """How profiling a script ended. A run whose lines were captured counts, whatever came after."""

    run: str | None = None  # the run folder, once it shows lines
    failed: str | None = None  # why there is none
    output: tuple[str, ...] = ()  # the last lines of the script's output, if it failed
    took_s: float = 0.0


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileRequest)
    os.chdir(request.cwd)
    answer = profile(request)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def profile(request: ProfileRequest) -> ProfiledScript:
    """Run the command until enough steps were seen, it ends, or its time is up."""
    folder = Path(request.folder)
    settings = Settings(
        folder=request.folder,
        wait=WAIT,
        warmup=WARMUP,
        active=ACTIVE,
        lines=True,
        script_facts=True,
        sample_hz=0.0,
        stop_after=STEPS,
    )
    began, parent = time.monotonic(), os.getppid()
    try:
        end, ranks = capture_to_end(
            request.command,
            folder,
            settings,
            limit_s=request.limit_s,
            enough=lambda: _is_enough(folder, parent),
        )
    except StepscopeError as error:
        return ProfiledScript(failed=str(error), took_s=time.monotonic() - began)
    took_s = time.monotonic() - began
    if any("trace-lines.json.gz" in rank["captured"] for rank in ranks):
        return ProfiledScript(run=request.folder, took_s=took_s)
    steps = max((rank.get("steps") or 0 for rank in ranks), default=0)
    return ProfiledScript(
        failed=_why(request, end.code, too_long=end.too_long, steps=steps),
        output=tuple(last_lines(folder, _LAST_LINES)),
        took_s=took_s,
    )


def _is_enough(folder: Path, parent: int) -> bool:
    """Whether all steps were seen. Raises SystemExit once nobody waits for the answer."""
    if os.getppid() != parent:
        raise SystemExit(1)
    return any(folder.glob(f"rank-*/{ENOUGH}"))


def _why(request: ProfileRequest, code: int, *, too_long: bool, steps: int) -> str:
    name = shlex.join(request.command)
    if too_long:
        limit = long_duration(request.limit_s * 1e9)
        return (
            f"{name} was stopped after {limit}, in training step {steps}. stepscope records lines "
            "in steps 8 and 9: allow more time, or give the script less work before them"
        )
    if code:
        return f"{name} ended with exit code {code} in training step {steps}"
    if not steps:
        return f"{name} ended without a training step: no optimizer stepped"
    return f"{name} ended after {steps} training steps, but lines are recorded in steps 8 and 9"


if __name__ == "__main__":
    main()
