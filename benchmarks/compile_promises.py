"""How well `compile` is promised from an eager trace: library models, compiled afterwards.

    PYTHONPATH=src python3 benchmarks/compile_promises.py --save rows.json [--seconds 560]
        [--models bert,swin] [--precisions bf16,tf32] [--at-once 6] [--traces FOLDER]
    python3 benchmarks/compile_promises.py --save rows.json --print

Each model in each precision has a process of its own; several compile beside each other, and each
has the device alone while it is timed and traced. An eager training comes first (three traced
steps, shapes). The what-if answers for each mode from that trace and the measured step. Then the
model is compiled in that mode and timed in the same process. Rows are saved one by one: a run that
is cut goes on where it ended, and failed rows are tried again. All models come in the first
precision before any comes in the next. Host and device are compared on their own too: the device's
time of a compiled step comes from a trace of it. `--traces` keeps all traces. `--tiny --device cpu`
tries the program without a GPU: there the what-if refuses, and such rows have no error.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from library_hand import Combination, training_step
from library_turn import FOLDER_VARIABLE, Turns, end_with_children, side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stepscope.predict.engine import Bench

    Step = Callable[[int], Any]

MODELS = "bert,resnet50,llama,swin,convnext,mobilenet,whisper,vit,t5,efficientnet,sage,gat"
MODES = ("default", "reduce-overhead")
WARM_UP, BLOCKS, BLOCK, TRACED = 8, 3, 10, 3
GOAL, INSIDE = 0.12, 0.85
_LEAST_S = 25  # less is not enough for any model


def main() -> None:
    options = _options()
    if options.one:
        _one_model(*options.one.split("/"), options)
        return
    if not options.print:
        _all_models(options)
    print(table(read_rows(options.save)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, required=True, help="JSON; read first")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all models")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--at-once", type=int, default=6, help="models that compile side by side")
    parser.add_argument("--traces", type=Path, help="a folder to keep the traces in")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU can train")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _all_models(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.seconds
    forget_failures(options.save)
    with side_by_side(options.at_once) as pool:
        for _ in pool.map(lambda case: _child(*case, options, end), cases_left(options)):
            pass


def cases_left(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Models and precisions with modes that the file does not have yet."""
    cases = product(options.precisions.split(","), options.models.split(","))
    return [(name, precision) for precision, name in cases if modes_left(name, precision, options)]


def modes_left(name: str, precision: str, options: argparse.Namespace) -> list[str]:
    known = {(row["model"], row["precision"], row["mode"]) for row in read_rows(options.save)}
    return [mode for mode in options.modes.split(",") if (name, precision, mode) not in known]


def _child(name: str, precision: str, options: argparse.Namespace, end: float) -> None:
    """What a process that died did not save is a row with the reason."""
    left_s = end - time.monotonic()
    if left_s < _LEAST_S:
        print(f"{name} {precision}: not tried: no time left", flush=True)
        return
    child = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--one", f"{name}/{precision}"]
    )
    try:
        code = child.wait(left_s)
        failure = f"the process ended with exit code {code}"
    except subprocess.TimeoutExpired:
        end_with_children(child.pid)
        child.wait()
        failure = f"ended after {left_s:.0f} s: no time left"
    modes = modes_left(name, precision, options)
    save_rows(options.save, [_failed(name, precision, mode, failure) for mode in modes])
    for mode in modes:
        print(f"{name} {precision} {mode}: {failure}", flush=True)


def _one_model(name: str, precision: str, options: argparse.Namespace) -> None:
    modes = modes_left(name, precision, options)
    try:
        trial = _start_trial(name, precision, options)
        bench = trial.trace_eager()
    except Exception as error:
        why = _first_line(error)
        save_rows(options.save, [_failed(name, precision, mode, why) for mode in modes])
        print(f"{name} {precision}: {why}", flush=True)
        return
    for mode in modes:
        try:
            row = trial.compare(bench, mode)
        except Exception as error:
            row = _failed(name, precision, mode, _first_line(error))
        save_rows(options.save, [row])
        print(describe(row), flush=True)


def _start_trial(name: str, precision: str, options: argparse.Namespace) -> _Trial:
    import torch

    turns = Turns(Path(os.environ[FOLDER_VARIABLE]))
    turns.enter()
    script = importlib.import_module(f"library_models.{name}")
    torch.manual_seed(0)
    batch = 2 if options.tiny else script.BATCH
    batches = script.make_batches(batch, options.device, options.tiny)
    return _Trial(script, batches, precision, options, turns, name)


def _first_line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}"


def _failed(name: str, precision: str, mode: str, failure: str) -> dict[str, Any]:
    return {"model": name, "precision": precision, "mode": mode, "failure": failure}


class _Trial:
    """One model in one precision: eager first, then compiled."""

    def __init__(
        self,
        script: Any,
        batches: list[Any],
        precision: str,
        options: argparse.Namespace,
        turns: Turns,
        name: str,
    ) -> None:
        self._script, self._batches, self._precision = script, batches, precision
        self._options, self._turns, self._name = options, turns, name
        self._eager_ms = 0.0

    def trace_eager(self) -> Bench:
        from stepscope.explain.rank_analysis import RankAnalysis
        from stepscope.predict.engine import Bench
        from stepscope.records.rank import MeasuredSteps, RankInputs
        from stepscope.trace.read import read_trace

        self._eager_ms, trace = self._run("eager")
        ns = round(self._eager_ms * 1e6)
        measured = MeasuredSteps(
            steps=BLOCKS * BLOCK,
            steps_ns=(ns,),
            step_ns=ns,
            wall_ns=ns,
            device_ns=None,
            phases_ns={},
            host_ns={},
        )
        return Bench(RankAnalysis(RankInputs(trace=read_trace(trace), measured=measured)))

    def compare(self, bench: Bench, mode: str) -> dict[str, Any]:
        from stepscope.predict.whatifs import parse_setting

        promise = bench.predict([parse_setting(f"compile={mode}")])
        row = {
            "model": self._name,
            "precision": self._precision,
            "mode": mode,
            "eager_ms": self._eager_ms,
            "promised_ms": promise.predicted_ms,
            "low_ms": promise.low_ms,
            "high_ms": promise.high_ms,
            "eager_device_ms": bench.context.graph.device_ns / 1e6,
            "promised_device_ms": promise.device_ms,
            "promised_host_ms": promise.host_ms,
            "assumptions": list(promise.assumptions),
        }
        if promise.refused:
            row["refused"] = list(promise.refused)
        measured_ms, trace = self._run(mode)
        return row | {"measured_ms": measured_ms, "device_ms": _device_ms(trace)}

    def _run(self, mode: str) -> tuple[float, Path]:
        """Milliseconds per step and a trace."""
        import torch

        torch._dynamo.reset()
        gc.collect()
        on_gpu = self._options.device == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
        wait = torch.cuda.synchronize if on_gpu else (lambda: None)
        combination = Combination(
            precision=self._precision, fused=True, compile="" if mode == "eager" else mode
        )
        tiny = self._options.tiny
        step = training_step(
            self._script, self._batches, combination, self._options.device, tiny=tiny
        )
        for number in range(2 if tiny else WARM_UP):
            step(number)
        wait()
        with self._turns.alone():
            ms = _time(step, wait, 1 if tiny else BLOCKS, 2 if tiny else BLOCK)
            profiler = self._profile(step, wait)
        return ms, self._write(profiler, mode)

    def _profile(self, step: Step, wait: Callable[[], Any]) -> Any:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._options.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True) as profiler:
            for number in range(TRACED):
                step(number)
                profiler.step()
            wait()
        return profiler

    def _write(self, profiler: Any, mode: str) -> Path:
        """With the turn over: nobody waits for a file."""
        folder = self._options.traces or Path(tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self._name}_{self._precision}_{mode}.json.gz"
        profiler.export_chrome_trace(str(file))
        return file


def _time(step: Step, wait: Callable[[], Any], blocks: int, length: int) -> float:
    measured = []
    for _ in range(blocks):
        start = time.perf_counter()
        for number in range(length):
            step(number)
        wait()
        measured.append((time.perf_counter() - start) * 1e3 / length)
    return statistics.median(measured)


def _device_ms(file: Path) -> float | None:
    """The device's time of one step."""
    from stepscope.records.trace import DeviceKind
    from stepscope.trace.read import read_trace

    device = read_trace(file).device
    work = device.kind <= DeviceKind.MEMSET
    return float(device.dur_ns[work].sum()) / TRACED / 1e6 if work.any() else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows
    return []


def save_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Several processes may save at once."""
    with _locked(path):
        _write_rows(path, [*read_rows(path), *rows])


def forget_failures(path: Path) -> None:
    """They are tried again."""
    with _locked(path):
        _write_rows(path, [row for row in read_rows(path) if not row.get("failure")])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Whole or not at all: a process may be ended while it writes."""
    written = path.with_suffix(".part")
    written.write_text(json.dumps(rows, indent=1))
    written.replace(path)


def error_of(row: dict[str, Any]) -> float:
    """Promised over measured, less one."""
    return float(row["promised_ms"] / row["measured_ms"] - 1)


def describe(row: dict[str, Any]) -> str:
    head = f"{row['model']:12} {row['precision']:5} {row['mode']:16}"
    if row.get("failure"):
        return f"{head} {row['failure']}"
    if row.get("refused"):
        return f"{head} {'; '.join(row['refused'])}; measured {row['measured_ms']:.2f}"
    device = row["device_ms"]
    inside = row["low_ms"] <= row["measured_ms"] <= row["high_ms"]
    on_device = f"{row['promised_device_ms']:7.1f} /{device:7.1f}" if device else " not known"
    return (
        f"{head} {row['eager_ms']:8.2f} -> {row['promised_ms']:7.2f} "
        f"({row['low_ms']:.1f} to {row['high_ms']:.1f}), measured {row['measured_ms']:7.2f} "
        f"{error_of(row):+7.1%} {'inside' if inside else 'OUTSIDE'}; device {on_device}"
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows, then the mean error and how often the interval held."""
    lines = [describe(row) for row in rows]
    measured = [row for row in rows if not (row.get("failure") or row.get("refused"))]
    lines += [
        _summary(mode, [row for row in measured if row["mode"] == mode])
        for mode in dict.fromkeys(row["mode"] for row in measured)
    ]
    return "\n".join([*lines, _summary("all", measured)] if measured else lines)


def _summary(name: str, rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(error_of(row)) for row in rows]
    inside = sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows) / len(rows)
    changes = [abs(math.log(row["measured_ms"] / row["eager_ms"])) for row in rows]
    missed = [abs(math.log(row["promised_ms"] / row["measured_ms"])) for row in rows]
    share = statistics.fmean(missed) / statistics.fmean(changes) if any(changes) else math.nan
    return (
        f"{name}: {len(rows)} rows, mean error {statistics.fmean(errors):.1%} (goal {GOAL:.0%}), "
        f"inside {inside:.0%} (goal {INSIDE:.0%}); the error is {share:.0%} of the change"
    )


if __name__ == "__main__":
    main()
