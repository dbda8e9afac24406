"""What-ifs on a run through a parameter server: another consistency."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError, UsageError
from stepscope.records.consistency import Consistency
from stepscope.records.figures import milliseconds, significant
from stepscope.records.words import counted
from stepscope.trace.discover import find_traces
from stepscope.trace.together_files import is_server_file, read_together, server_file
from stepscope.ui.whatif import Tried

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.prediction import Prediction, Setting

_USUAL = ("strong", "bounded:1", "bounded:3", "bounded:10", "eventual", "weak:8")


def find_server_runs(paths: Sequence[str], settings: Sequence[Setting]) -> list[Path]:
    """Run folders whose parameter server answers these changes: those that ask for a consistency,
    and all if nothing else was recorded."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    runs = [folder for folder in folders if server_file(folder) is not None]
    if not runs or any(setting.name == "consistency" for setting in settings):
        return runs
    files = find_traces(runs[0])
    return runs if all(isinstance(file, Path) and is_server_file(file) for file in files) else []


def predict_server(runs: Sequence[Path], settings: Sequence[Setting]) -> Tried:
    """The consistency asked for, or the usual ones. Raises UsageError for other changes, and
    NotCapturedError for too few workers or steps."""
    from stepscope.predict.consistency.server_run import ServerRun
    from stepscope.predict.outcome import Refused

    if len(settings) > 1 or any(setting.name != "consistency" for setting in settings):
        raise UsageError(
            f"{runs[0]} trained through a parameter server. Only its consistency can be "
            "changed, and alone, such as --set consistency=bounded:3"
        )
    names = [setting.value for setting in settings] or list(_USUAL)
    wanted = [Consistency.parse(name) for name in names]
    events = read_together(runs)
    if events is None:
        raise NotCapturedError(f"{runs[0]}: its parameter server recorded nothing")
    try:
        run = ServerRun(events)
    except Refused as reason:
        raise NotCapturedError(f"{runs[0]}: {reason}") from None
    predictions = [run.predict(consistency) for consistency in wanted]
    before = run.predict(events.consistency)
    best_first = sorted(predictions, key=lambda prediction: -prediction.throughput_factor)
    return Tried(before=_as_it_ran(before), predictions=tuple(best_first), refused=())


def _as_it_ran(before: Prediction) -> Prediction:
    """The run itself: what it is simulated to be is moved to what was measured."""
    from msgspec.structs import replace

    ms = before.baseline_ms
    return replace(before, settings=(), applied=(), low_ms=ms, high_ms=ms)


def describe_run(tried: Tried, runs: Sequence[Path]) -> str:
    """A headline: which run, how many workers, how long a step is."""
    promise = tried.before.consistency
    workers = counted(promise.workers, "worker") if promise else ""
    consistency = f"{promise.consistency} consistency" if promise else ""
    step = f"{milliseconds(tried.before.baseline_ms)} a step, measured"
    return " · ".join((runs[0].resolve().name, workers, consistency, step))


def describe_rates(tried: Tried) -> str:
    """Updates per second, now and with the best change, and the straggler that decides it."""
    best, now = tried.predictions[0], tried.before.consistency
    promise = best.consistency
    assert promise is not None
    assert now is not None
    rates = f"{significant(now.updates_per_s)} -> {significant(promise.updates_per_s)} updates/s"
    between = f"({significant(promise.low)} to {significant(promise.high)})"
    return f"{rates} {between}: {best.assumptions[0]}"
