"""stepscope run: capture an unmodified training command, then explain it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import HANG_ENDED, StepscopeError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.ranks import parse_ranks
from stepscope.measure.settings import Settings
from stepscope.records.folders import HANG_REQUEST
from stepscope.ui.cli.options import (
    TIME,
    TIME_OR_NEVER,
    command_argument,
    count_option,
    flag,
    log_option,
    mode_option,
    out_option,
    step_on_option,
    verb,
    with_option,
)
from stepscope.ui.jobs.capture import JobPart, PartTakenError, candidate_folders, capture_into
from stepscope.ui.jobs.environment import startable
from stepscope.ui.jobs.hang_watch import HangNews
from stepscope.ui.jobs.job_key import JobKey, find_job
from stepscope.ui.jobs.process import HeldSignals, News, raising_on_signals, run_job
from stepscope.ui.jobs.run_folder import (
    Attachment,
    RunFile,
    applied_words,
    claim,
    missing_words,
    script_of,
    why_nothing,
)
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation
    from stepscope.ui.loggers.run_log import LogChoice

_LOAD_AFTER_S = 0.5
AFTER_SIGTERM_S = 25.0  # for closing and explaining
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@verb(
    "run",
    takes_command=True,
    examples=(
        ("stepscope run -- python train.py", "Record a training, then explain its steps"),
        (
            "stepscope run --with tf32,fused-optimizer -- torchrun --nproc-per-node 8 train.py",
            "Record all ranks of a job, with two changes applied",
        ),
        ("stepscope run --check -- python train.py", "Check three steps, then stop the training"),
    ),
    groups={
        "Where and how": "--out --with --check --quiet --no-explain",
        "What to record": "--stacks --lines --modules --shapes --memory --ranks --script-facts "
        "--nvtx --nccl-debug",
        "When to record": "--wait --warmup --active --repeat --every --on-stall --step-on",
        "While it runs": "--log --metrics-file --hang-after --on-hang",
        "Several hosts": "--job",
        "Afterwards": "--probe --set --probe-budget",
    },
    modes={"--check": "health"},
)
@out_option(
    "Folder for the recording and the report (default: stepscope-runs/<time>-<script>).",
    type=click.Path(path_type=Path),
)
@count_option(
    "--wait",
    "Steps to skip before recording (default: record a few early steps, then steps 12 to 14).",
    least=0,
)
@count_option(
    "--warmup",
    "Steps to profile and throw away, because the profiler's start slows them.",
    default=2,
    least=0,
)
@count_option("--active", "Steps to record in the trace.", default=3)
@count_option("--repeat", "How many times to wait, warm up and record.", default=1)
@click.option(
    "--every",
    default=0,
    type=click.IntRange(0),
    help="Also record every N steps through the whole run. Older recordings are thinned out.",
)
@flag("--on-stall", "Also record the steps around a stall that recurs (trace-stall.json.gz).")
@click.option(
    "--shapes/--no-shapes",
    default=True,
    help="Record the operators' input shapes (on by default). FLOPs and predictions need them.",
)
@flag(
    "--stacks",
    "Record Python stacks, so that findings name lines of your code. Slows recorded steps.",
)
@flag(
    "--lines",
    "Also record two steps that show which line of your code ran what, for editors.",
)
@flag("--modules", "Record nn.Module names, for time by module.")
@step_on_option
@click.option(
    "--memory/--no-memory",
    default=True,
    help="Measure memory by category in one more step (on by default): parameters, "
    "activations and others.",
)
@flag("--nvtx", "Mark phases and modules with NVTX ranges, for a run under Nsight Systems.")
@flag("--nccl-debug", "Let NCCL log its transports and algorithms into the run folder.")
@click.option(
    "--ranks",
    default="auto",
    metavar="LIST",
    help="Ranks that record traces: 0,7,64-71, one-per-host, all or auto. "
    "auto takes at most 64, spread over the hosts. Every rank records its step times.",
)
@click.option(
    "--job",
    metavar="NAME",
    help="Runs with this name are one job and share its folder. stepscope finds the job itself "
    "under torchrun, Slurm, MPI and Kubernetes.",
)
@with_option
@mode_option(
    "--check",
    "Check how training is doing after three steps, then stop it. `run --check --help` has its "
    "options.",
)
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path),
    metavar="FILE.prom",
    help="Write the job's metrics to this file while it trains, for Prometheus' node exporter.",
)
@click.option(
    "--hang-after",
    default="30s",
    show_default=True,
    type=TIME_OR_NEVER,
    help="Say who hangs when no step ends for this long, and for 20 times a usual step. 0: never.",
)
@click.option(
    "--on-hang",
    type=click.Choice(("report", "end")),
    default="report",
    show_default=True,
    help="What to do then: only report it, or also end the job, with exit code 7.",
)
@flag(
    "--script-facts", "Also write script.json: what the script builds, and where. Patches need it."
)
@flag(
    "--probe",
    "After the command, time the step's operators one by one, as `stepscope probe` does. "
    "Predictions then use these times.",
)
@click.option(
    "--set",
    "probe_settings",
    multiple=True,
    metavar="precision=VALUE",
    help="With --probe: also time them in this precision (tf32, bf16, fp16). Repeatable.",
)
@click.option(
    "--probe-budget",
    default="20s",
    show_default=True,
    type=TIME,
    help="With --probe: stop after this long.",
)
@log_option
@flag("--quiet", "Print nothing while the command runs.")
@flag("--no-explain", "Record only: no verdict, no report.")
@command_argument()
def command(
    out: Path | None,
    job: str | None,
    metrics_file: Path | None,
    on_hang: str,
    logs: tuple[LogChoice, ...],
    quiet: bool,
    no_explain: bool,
    probe: bool,
    probe_settings: tuple[str, ...],
    probe_budget: float,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Run a training command as it is, record steps of every rank, and explain them.

    The command's output and exit code pass through. stepscope prints to stderr.
    """
    command = startable(command)
    if probe or probe_settings:
        from stepscope.ui.probe import asked_precisions, probe_run

        precisions = asked_precisions(probe_settings, probe=probe)
    if metrics_file is not None:
        from stepscope.ui.serve.metrics import require_place

        require_place(metrics_file)
    with HeldSignals() as signals:
        _load_meanwhile(explains=not no_explain)
        run = _begin(out, command, options, job)
        if run is None:
            return run_job(command, None, signals=signals)
        log = metrics = None
        if logs and run.closes:
            from stepscope.ui.loggers.run_log import begin_log

            log = begin_log(run.folder, logs)
        announces = run.closes and not quiet
        news: News | None = Attachment(run.folder, run.settings, command) if announces else None
        if metrics_file is not None:
            from stepscope.ui.serve.metrics import MetricsFile

            news = metrics = MetricsFile(metrics_file.absolute(), run.folder.absolute(), news)
        hang = _watch_hangs(run, news, announces=announces, ends=on_hang == "end")
        code, ranks = capture_into(run, command, news=hang or news, signals=signals)
        code = hang.exit_code or code if hang is not None else code
    # From here on nothing may change the command's exit code.
    with _not_ended_by_signals(), _ended_before_the_scheduler_kills(run):
        if isinstance(run, JobPart):
            ranks = _close_job(run)
        explanation = None
        if run.closes:
            # First: what-ifs in the report use its times. A job that was told to end has none.
            if probe and ranks and not run.record["signals"]:
                say(probe_run(run.folder, precisions, probe_budget))
            explanation = _conclude(run, ranks, command, code, explain=not no_explain)
            if not (ranks or code or out or log or metrics_file) and isinstance(run, RunFile):
                run.remove_empty()
            if metrics is not None and (problem := metrics.write(explanation)):
                say(problem)
        if log is not None:
            log.conclude(explanation)
    return code


def _watch_hangs(
    run: RunFile | JobPart, news: News | None, *, announces: bool, ends: bool
) -> HangNews | None:
    least_s = run.settings.hang_after
    if not least_s:
        return None
    return HangNews(run.folder, least_s, news, reads=run.closes, announces=announces, ends=ends)


def _load_meanwhile(*, explains: bool) -> None:
    """What explains the run, while the command starts: later its end would wait for it."""

    def load() -> None:
        with contextlib.suppress(Exception):
            import stepscope.ui.api
            import stepscope.ui.terminal.short  # noqa: F401

    loading = threading.Timer(_LOAD_AFTER_S, load)
    loading.daemon = True
    with contextlib.suppress(RuntimeError):  # no more threads
        if explains:
            loading.start()


def _close_job(part: JobPart) -> list[dict[str, Any]]:
    try:
        ranks = part.close_job()
        if not part.closes and (words := part.farewell()):
            say(words)
        return ranks
    except Exception as error:
        say(f"the run could not be closed: {type(error).__name__}: {error}")
        return []


def _begin(
    out: Path | None, command: tuple[str, ...], options: dict[str, Any], job: str | None
) -> RunFile | JobPart | None:
    """Return the run's record; `options` are fields of Settings, named as on the command line.

    None if nothing can be captured, whatever the reason: the command runs all the same.
    """
    claimed = None
    try:
        window = options["warmup"] + options["active"]
        if 0 < options["every"] < window + 2:
            raise UsageError(
                f"--every {options['every']} leaves no steps between windows of {window} steps: "
                f"choose {window + 2} or more"
            )
        parse_ranks(options["ranks"])
        key = find_job(command, os.environ, job)
        if key is not None:
            return _begin_part(out, command, options, key)
        claimed = claim(out, command)
        settings = Settings(folder=str(claimed.path.absolute()), **options)
        return RunFile.begin(claimed.path, command, settings)
    except UsageError:
        raise
    except Exception as error:
        if claimed is not None:
            claimed.give_back()
        why = f"a defect in stepscope: {type(error).__name__}: {error}"
        if isinstance(error, OSError):
            why = _unwritable(error, claimed.path if claimed else out)
            why += "" if out is not None else "; --out names another folder"
        say(f"nothing is captured; the command runs without stepscope: {why}")
        return None


def _begin_part(
    out: Path | None, command: tuple[str, ...], options: dict[str, Any], key: JobKey
) -> JobPart:
    """Begin in the first folder that has no such part yet.

    The folder cannot be written on this host alone, perhaps: the other hosts would wait in vain for
    ranks that nobody captures, so the part goes to a temporary folder. OSError if none can be made.
    """
    refused: UsageError | None = None
    for folder in candidate_folders(out, command, key):
        settings = Settings(folder=str(folder.absolute()), **options)
        try:
            return JobPart.begin(folder, command, settings, key)
        except PartTakenError as error:
            refused = error
        except OSError as error:
            home = Path(tempfile.gettempdir()) / layout.HOME
            elsewhere = layout.new_run_folder(script_of(command), home=home)
            settings = Settings(folder=str(elsewhere), **options)
            part = JobPart.begin(elsewhere, command, settings, key)
            why = _unwritable(error, folder)
            say(f"{why}: this host's part of the run goes to {elsewhere}")
            return part
    raise refused or UsageError(f"{layout.HOME} has no room for another run of {key.name}")


def _unwritable(error: OSError, folder: Path | None) -> str:
    where = error.filename or folder or "the run folder"
    return f"{where} cannot be written: {layout.why_refused(error)}"


@contextlib.contextmanager
def _not_ended_by_signals() -> Iterator[None]:
    """The command's exit code stands: a signal now only stops the explanation."""
    handled = [n for n in _ENDING if signal.getsignal(n) != signal.SIG_IGN]
    stop = raising_on_signals(handled, lambda n: KeyboardInterrupt(signal.Signals(n).name))
    with stop:
        try:
            yield
        except KeyboardInterrupt as reason:
            say(f"stopped explaining ({reason})")


@contextlib.contextmanager
def _ended_before_the_scheduler_kills(run: RunFile | JobPart) -> Iterator[None]:
    """Slurm and Kubernetes send SIGTERM, and 30 s later SIGKILL, which would be our exit code."""
    if not any(heard["signal"] == "SIGTERM" for heard in run.record["signals"]):
        yield
        return
    reason = f"{AFTER_SIGTERM_S:g} s after SIGTERM; `stepscope explain {run.folder}` has more time"
    with raising_on_signals([signal.SIGALRM], lambda _: KeyboardInterrupt(reason)):
        signal.setitimer(signal.ITIMER_REAL, AFTER_SIGTERM_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _conclude(
    run: RunFile | JobPart,
    ranks: list[dict[str, Any]],
    command: tuple[str, ...],
    code: int,
    *,
    explain: bool,
) -> Explanation | None:
    """Report and explain."""
    from stepscope.trace.run_folder.run_state import find_failure

    folder = run.folder
    try:
        if not ranks:
            say(f"nothing was captured: {why_nothing(folder, run.settings, command, code)}")
            return None
        say(f"run folder {folder}")
        for words in (*applied_words(ranks), *missing_words(ranks)):
            say(words)
        if explain and any(layout.TRACE in rank["captured"] for rank in ranks):
            from stepscope.ui.api import explain_paths
            from stepscope.ui.terminal.short import print_short

            report = folder / "report.html"
            explanation = explain_paths((folder,), cache=True, html=report, quiet=True)
            more = f"stepscope explain {shlex.quote(str(folder))} --full"
            print_short(explanation, more=more, report=report, to_stderr=True)
            return explanation
        if code == HANG_ENDED and (folder / HANG_REQUEST).exists():
            say("the job was ended because it hung, as --on-hang end asks")
        elif (failed := find_failure(folder, code)) is not None:
            say(f"the command failed: {failed.words}")
    except StepscopeError as error:
        say(str(error))
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        say(
            f"the run was captured, but explaining it failed: a defect in stepscope: "
            f"{type(error).__name__}: {error}; `stepscope explain {folder}` tries again"
        )
    return None
