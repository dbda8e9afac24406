"""How well `compile` is promised from an eager trace: library models, compiled afterwards.

    PYTHONPATH=src python3 benchmarks/compile_promises.py --save rows.json [--seconds 560]
        [--models bert,swin] [--precisions bf16,tf32] [--at-once 4] [--traces FOLDER]
    python3 benchmarks/compile_promises.py --save rows.json --print

Each model has a process of its own. An eager training is timed and traced (three steps, shapes).
The what-if answers for each mode from that trace and the measured step. Then the model is compiled
in that mode and timed in the same process. Rows are saved one by one: a run that is cut goes on
where it ended. Host and device are compared on their own too: the device's time of a compiled step
comes from a trace of it. `--traces` keeps all traces.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from library_hand import Combination, training_step
from library_turn import FOLDER_VARIABLE, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stepscope.predict.whatif import Bench

    Step = Callable[[int], Any]

MODELS = "bert,resnet50,llama,swin,convnext,mobilenet,whisper,vit,t5,efficientnet,sage,gat"
MODES = ("default", "reduce-overhead")
WARM_UP, BLOCKS, BLOCK, TRACED = 8, 3, 10, 3
GOAL, INSIDE = 0.12, 0.85


def main() -> None:
    options = _options()
    if options.one:
        _one_model(options.one, options)
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
    parser.add_argument("--at-once", type=int, default=4, help="models that compile side by side")
    parser.add_argument("--traces", type=Path, help="a folder to keep the traces in")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU can train")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _all_models(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as own:
        os.environ.setdefault(FOLDER_VARIABLE, own)
        turns = Turns(Path(os.environ[FOLDER_VARIABLE]))
        with turns.kept_going(), ThreadPoolExecutor(options.at_once) as pool:
            names = options.models.split(",")
            for name, failure in pool.map(lambda name: (name, _child(name, end)), names):
                if failure:
                    print(f"{name}: {failure}", flush=True)


def _child(name: str, end: float) -> str | None:
    left_s = end - time.monotonic()
    if left_s < 20:
        return "not tried: no time left"
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--one", name])
    try:
        code = child.wait(left_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return "stopped: no time left; what was measured until then is kept"
    return f"exit code {code}" if code else None


def _one_model(name: str, options: argparse.Namespace) -> None:
    import torch

    known = {(row["model"], row["precision"], row["mode"]) for row in read_rows(options.save)}
    turns = Turns(Path(os.environ[FOLDER_VARIABLE]))
    turns.enter()
    script = importlib.import_module(f"library_models.{name}")
    torch.manual_seed(0)
    batch = 2 if options.tiny else script.BATCH
    batches = script.make_batches(batch, options.device, options.tiny)
    for precision in options.precisions.split(","):
        modes = [mode for mode in options.modes.split(",") if (name, precision, mode) not in known]
        if not modes:
            continue
        trial = _Trial(script, batches, precision, options, turns, name)
        try:
            bench = trial.trace_eager()
        except Exception as error:
            save_rows(options.save, [_failed(name, precision, mode, error) for mode in modes])
            continue
        for mode in modes:
            try:
                row = trial.compare(bench, mode)
            except Exception as error:
                row = _failed(name, precision, mode, error)
            save_rows(options.save, [row])
            print(describe(row), flush=True)


def _failed(name: str, precision: str, mode: str, error: Exception) -> dict[str, Any]:
    first = (str(error).splitlines() or [""])[0][:200]
    failure = f"{type(error).__name__}: {first}"
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
        from stepscope.predict.whatif import Bench
        from stepscope.records.measured_steps import MeasuredSteps
        from stepscope.records.rank_inputs import RankInputs
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
            return row | {"refused": list(promise.refused)}
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
            file = self._trace(step, wait, mode)
        return ms, file

    def _trace(self, step: Step, wait: Callable[[], Any], mode: str) -> Path:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._options.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        folder = self._options.traces or Path(tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self._name}_{self._precision}_{mode}.json.gz"
        with profile(activities=activities, record_shapes=True) as profiler:
            for number in range(TRACED):
                step(number)
                profiler.step()
            wait()
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_text(json.dumps([*read_rows(path), *rows], indent=1))


def error_of(row: dict[str, Any]) -> float:
    """Promised over measured, less one."""
    return float(row["promised_ms"] / row["measured_ms"] - 1)


def describe(row: dict[str, Any]) -> str:
    head = f"{row['model']:12} {row['precision']:5} {row['mode']:16}"
    if "measured_ms" not in row:
        return f"{head} {row.get('failure') or '; '.join(row['refused'])}"
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
    measured = [row for row in rows if "measured_ms" in row]
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
