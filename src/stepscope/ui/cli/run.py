"""stepscope run: capture an unmodified training command, then explain it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import stepscope.measure
from stepscope.errors import StepscopeError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.settings import STEP_ON, Settings
from stepscope.ui.attachment import Attachment, why_no_trace, why_nothing
from stepscope.ui.say import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_POLL_S, _GRACE_S = 0.2, 15.0
# Sent to us, meant for the command: without a handler they would end us and orphan it.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_UNREADABLE: dict[str, Any] = {
    "rank": None,
    "world_size": None,
    "status": "unreadable",
    "problems": [],
}
INJECT = Path(stepscope.measure.__file__).parent / "inject"


@click.command(
    name="run",
    short_help="capture an unmodified training command, then explain it",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the capture and the report (default: stepscope-runs/<time>-<script>).",
)
@click.option(
    "--wait",
    default=None,
    type=click.IntRange(0),
    help="Steps to skip before recording (default: record a few early steps, then steps 12 to 14).",
)
@click.option(
    "--warmup",
    default=2,
    show_default=True,
    type=click.IntRange(0),
    help="Steps to profile and throw away, so that the profiler's start does not count.",
)
@click.option(
    "--active",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Steps to record in the trace.",
)
@click.option(
    "--repeat",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="How many times to wait, warm up and record.",
)
@click.option(
    "--shapes/--no-shapes",
    default=True,
    help="Record operators' input shapes: FLOPs and what-ifs need them.",
)
@click.option(
    "--stacks",
    is_flag=True,
    help="Record Python stacks, so that findings name lines of your code. Slows recorded steps.",
)
@click.option("--modules", is_flag=True, help="Record nn.Module names, for time by module.")
@click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    help="What counts as the end of a training step.",
)
@click.option(
    "--memory/--no-memory",
    default=True,
    help="Measure memory by category (parameters, activations, ...) in one more step.",
)
@click.option(
    "--nvtx",
    is_flag=True,
    help="Mark phases and modules with NVTX ranges, for a run under Nsight Systems.",
)
@click.option(
    "--nccl-debug",
    is_flag=True,
    help="Let NCCL log its transports and algorithms into the run folder.",
)
@click.option("--quiet", is_flag=True, help="Say nothing while the command runs.")
@click.option("--no-explain", is_flag=True, help="Only capture: no verdict, no report.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    out: Path | None,
    wait: int | None,
    warmup: int,
    active: int,
    repeat: int,
    shapes: bool,
    stacks: bool,
    modules: bool,
    step_on: str,
    memory: bool,
    nvtx: bool,
    nccl_debug: bool,
    quiet: bool,
    no_explain: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND as it is and capture every rank's training steps.

    The command's output and exit code pass through untouched; what stepscope says goes to stderr.
    """
    command = startable(command)
    folder = claim(out, command)
    settings = Settings(
        folder=str(folder.absolute()),
        wait=wait,
        warmup=warmup,
        active=active,
        repeat=repeat,
        shapes=shapes,
        stacks=stacks,
        modules=modules,
        step_on=step_on,
        memory=memory,
        nvtx=nvtx,
        nccl_debug=nccl_debug,
    )
    code, ranks = capture(command, folder, settings, announce=not quiet)
    _conclude(folder, ranks, settings, command, code, explain=not no_explain)
    return code


def capture(
    command: tuple[str, ...],
    folder: Path,
    settings: Settings,
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
    announce: bool = False,
) -> tuple[int, list[dict[str, Any]]]:
    """Run the command with capture, write run.json; its exit code and what each rank left.

    Where `until` says that enough was seen, the command is ended, and that is no failure.
    """
    record = _record(command, settings)
    layout.write_json(folder / layout.RUN, record)
    attachment = Attachment(folder, settings, command) if announce else None
    code = _run(command, settings, output, until, attachment)
    ranks = describe_ranks(folder, settings)
    record |= {
        "status": "finished",
        "exit_code": code,
        "ended_unix": time.time(),
        "ranks": ranks,
        "world_size": max((r["world_size"] or 1 for r in ranks), default=None),
    }
    try:
        layout.write_json(folder / layout.RUN, record)
    except OSError as error:
        say(f"{folder / layout.RUN} could not be written: {error}")
    return code, ranks


def claim(out: Path | None, command: tuple[str, ...]) -> Path:
    try:
        if out is None:
            return layout.new_run_folder(_script(command))
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty: a run folder is never written over")
        return out
    except OSError as error:
        raise UsageError(f"the run folder cannot be made: {error}") from None


def startable(command: tuple[str, ...]) -> tuple[str, ...]:
    """`train.py` alone is run by this Python."""
    script = Path(command[0])
    if script.suffix == ".py" and script.is_file() and not os.access(script, os.X_OK):
        return (sys.executable, *command)
    return command


def _script(command: tuple[str, ...]) -> str:
    for word in command:
        if word.endswith((".py", ".sh")):
            return word
    return command[-1]


def _record(command: tuple[str, ...], settings: Settings) -> dict[str, Any]:
    return {
        "schema": layout.SCHEMA,
        "stepscope": stepscope.__version__,
        "command": list(command),
        "folder": str(Path.cwd()),
        "started_unix": time.time(),
        "status": "running",
        "window": {
            "wait": settings.wait,
            "warmup": settings.warmup,
            "active": settings.active,
            "repeat": settings.repeat,
        },
        "step_on": settings.step_on,
    }


def _run(
    command: tuple[str, ...],
    settings: Settings,
    output: int | None,
    until: Callable[[], bool] | None,
    attachment: Attachment | None,
) -> int:
    path = os.pathsep.join(filter(None, [str(INJECT), os.environ.get("PYTHONPATH")]))
    defaults = {
        "KINETO_LOG_LEVEL": "6",  # the profiler's own chatter is not the command's output
        "TORCH_FR_BUFFER_SIZE": "2000",  # torch before 2.13 records no collectives without it
    }
    ours = {**settings.to_environment(), "PYTHONPATH": path}
    if settings.nccl_debug:
        defaults["NCCL_DEBUG_SUBSYS"] = "INIT,ENV,GRAPH,COLL,TUNING"
        ours |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{settings.folder}/nccl.%h.%p.log"}
    environment = {**defaults, **os.environ, **ours}
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=output, start_new_session=until is not None
        )
    except FileNotFoundError:
        raise UsageError(f"{command[0]}: no such command") from None
    except OSError as error:
        raise UsageError(f"{shlex.join(command)}: {error.strerror}") from None

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        with contextlib.suppress(OSError):
            process.send_signal(number)

    # Ctrl-C reaches the command by itself: it decides, we wait.
    heard = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = _wait_until(process, until) if until is not None else _wait(process, attachment)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes], attachment: Attachment | None) -> int:
    """The command's exit code; meanwhile, what was attached."""
    while attachment is not None and not attachment.done:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        try:
            sentence = attachment.news()
        except Exception:  # whatever it is, the command goes on
            break
        if sentence:
            say(sentence)
    return process.wait()


def _wait_until(process: subprocess.Popen[bytes], enough: Callable[[], bool]) -> int:
    """The command's exit code, or 0 when it was ended because enough was seen."""
    signal.signal(signal.SIGINT, lambda number, _: os.killpg(process.pid, number))
    while not enough():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            break
    return 0


def describe_ranks(folder: Path, settings: Settings) -> list[dict[str, Any]]:
    """What each rank left, what is missing, and why."""
    from stepscope.trace.rank_facts import read_facts

    ranks = []
    for place in sorted(folder.glob("rank-*")):
        facts = _UNREADABLE | read_facts(place)
        captured = [name for name in layout.PARTS if (place / name).exists()]
        missing = {}
        if layout.TRACE not in captured:
            missing[layout.TRACE] = why_no_trace(facts, settings)
        ranks.append({"folder": place.name, **facts, "captured": captured, "missing": missing})
    return ranks


def _conclude(
    folder: Path,
    ranks: list[dict[str, Any]],
    settings: Settings,
    command: tuple[str, ...],
    code: int,
    *,
    explain: bool,
) -> None:
    """Nothing in here may change the command's exit code."""
    if not ranks:
        say(f"nothing was captured: {why_nothing(folder, settings, command, code)}")
        return
    say(f"run folder {folder}")
    for rank in ranks:
        for name, why in rank["missing"].items():
            say(f"rank {rank['rank']}: no {name}: {why}")
    if not explain or not any(layout.TRACE in rank["captured"] for rank in ranks):
        return
    try:
        _explain(folder)
    except StepscopeError as error:
        say(str(error))
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        say(
            f"the run was captured, but explaining it failed: a defect in stepscope: "
            f"{type(error).__name__}: {error}; `stepscope explain {folder}` tries again"
        )


def _explain(folder: Path) -> None:
    from stepscope.ui.cli.explain import explain_paths
    from stepscope.ui.terminal.short import print_short

    report = folder / "report.html"
    explanation = explain_paths((folder,), cache=True, html=report, quiet=True)
    more = f"stepscope explain {shlex.quote(str(folder))} --full"
    print_short(explanation, more=more, report=report, to_stderr=True)
