"""Many small trainings as one, against every other way to run them: ms a model-step, memory.

    python benchmarks/fuse_table.py --check                       is it the same training here?
    python benchmarks/fuse_table.py --save cells.json --seconds 600
    python benchmarks/fuse_table.py --save cells.json --print [--svg docs/images/fuse.svg]
    python benchmarks/fuse_table.py --profile --only resnet-18 --models 32 --ways fused+graph

Each cell is one training in one way with B models, timed in blocks that take turns with one model
trained alone (the control of this very run). Cells are saved one by one: a run that is cut goes on
where it ended. The most telling cells come first.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuse_cells import FuseCell, plan
from fuse_check import check
from fuse_models import CASES
from fuse_processes import MPS, PROCESSES, train_in_processes
from fuse_profile import KernelRow, kernel_rows, launchers, profile_calls
from fuse_profile import table as kernel_table
from fuse_report import markdown, plot
from fuse_ways import SERIAL, WAYS, Setup, TrainAll
from library_turn import Turns, shared_turns

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = 3
_KERNELS = 30  # rows of a profile
_WARM_CALLS = 6  # a captured step trains three times as it is first


def main() -> int:
    options = _options()
    device = torch.device(options.device)
    if options.worker:
        return _worker(options, device)
    if options.check:
        return _check(options, device)
    if options.profile:
        return _profile(options, device)
    saved = _load(options.save)
    if not options.print:
        _measure_all(options, device, saved)
    print(markdown(saved["cells"], saved["device"]))
    if options.svg:
        options.svg.write_text(plot(saved["cells"]))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument(
        "--check", action="store_true", help="compare with training alone, then end"
    )
    parser.add_argument("--compile", action="store_true", help="--check: compiled steps too")
    parser.add_argument(
        "--profile", action="store_true", help="print the longest kernels and who launched them"
    )
    parser.add_argument("--only", help="trainings, by comma")
    parser.add_argument("--ways", help="by comma; all: " + ", ".join([*WAYS, PROCESSES, MPS]))
    parser.add_argument("--models", default="1,2,4,8,16,32", help="how many in an array, by comma")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--seconds", type=float, default=600, help="start no cell after this")
    parser.add_argument("--timed", type=float, default=0.6, help="seconds of timed steps a cell")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every cell")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _names(given: str | None, known: Any) -> list[str]:
    names = list(known) if given is None else given.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _check(options: argparse.Namespace, device: torch.device) -> int:
    """Prints one line for each training; 1 if one differs."""
    torch.backends.cudnn.allow_tf32 = False  # its kernels round by shape
    shared_turns()
    end = time.monotonic() + options.seconds
    models, failed = min(3, max(int(one) for one in options.models.split(","))), 0
    for dtype in options.dtypes.split(","):
        for name in _names(options.only, CASES):
            if time.monotonic() > end:
                print(f"not tried  {name} {dtype}: the time is over", flush=True)
                continue
            setup = Setup(CASES[name], device, dtype, options.tiny)
            for result in check(setup, models, options.compile):
                failed += not result.passed
                print(f"{'pass' if result.passed else 'FAIL'}  {result.name}: {result.words}")
                sys.stdout.flush()
            _free(device)
    return int(failed > 0)


def _profile(options: argparse.Namespace, device: torch.device) -> int:
    """Kernels of one call and who launched them, a table for each cell."""
    torch.backends.cudnn.benchmark = True
    turns = shared_turns()
    models = max(int(one) for one in options.models.split(","))
    for name, dtype, way in product(
        _names(options.only, CASES), options.dtypes.split(","), _names(options.ways, WAYS)
    ):
        setup = Setup(CASES[name], device, dtype, options.tiny)
        known: dict[str, str] = {}
        as_it_is = way.removesuffix("+graph")
        for shown in dict.fromkeys((as_it_is, way)):  # a graph's kernels are named by the former
            title = f"{name} {dtype} x{models} {shown}"
            try:
                ms, rows = _profiled(WAYS[shown](setup, models), device, turns, known)
            except Exception as error:
                print(f"{title}: {_in_a_line(error)}", flush=True)
                continue
            finally:
                _free(device)
            known = launchers(rows)
            print(f"{title}: {ms:.2f} ms\n{kernel_table(rows, _KERNELS)}\n", flush=True)
    return 0


def _profiled(
    train: TrainAll, device: torch.device, turns: Turns | None, known: dict[str, str]
) -> tuple[float, list[KernelRow]]:
    """Milliseconds of a call without the profiler, and its kernels."""
    _warm(train, device)
    with turns.alone() if turns is not None else contextlib.nullcontext():
        ms = _calls(train, 3, device) / 3
        events = profile_calls(train, device.type == "cuda")
    return ms, kernel_rows(events, known)


def _load(file: Path | None) -> dict[str, Any]:
    if file is not None and file.exists():
        known: dict[str, Any] = json.loads(file.read_text())
        return known
    return {"device": None, "torch": torch.__version__, "cells": []}


def _measure_all(options: argparse.Namespace, device: torch.device, saved: dict[str, Any]) -> None:
    torch.backends.cudnn.benchmark = True  # for every way
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if saved["device"] not in (None, name):
        raise SystemExit(f"{options.save} was measured on {saved['device']}, this is {name}")
    saved["device"] = name
    turns = shared_turns()
    end = time.monotonic() + options.seconds
    cells = plan(
        _names(options.only, CASES),
        options.dtypes.split(","),
        [int(one) for one in options.models.split(",")],
        _names(options.ways, [*WAYS, PROCESSES, MPS]),
    )
    known = {FuseCell.of(one) for one in saved["cells"]}
    for cell in cells:
        if cell in known or _is_hopeless(cell, saved["cells"]):
            continue
        if time.monotonic() > end:
            break
        result = {**cell.named(), **_measured(cell, options, device, turns)}
        saved["cells"].append(result)
        print(_line(result), file=sys.stderr, flush=True)
        if options.save:
            part = options.save.with_suffix(".part")
            part.write_text(json.dumps(saved, indent=1))
            part.replace(options.save)


def _is_hopeless(cell: FuseCell, results: list[dict[str, Any]]) -> bool:
    """Fewer models did not fit, or could not be computed at all."""
    same = (one for one in results if FuseCell.of(one).is_like(cell))
    return any(one.get("error") and one["models"] <= cell.models for one in same)


def _measured(
    cell: FuseCell, options: argparse.Namespace, device: torch.device, turns: Turns | None
) -> dict[str, Any]:
    alone = turns.alone if turns is not None else contextlib.nullcontext
    if cell.way in (PROCESSES, MPS):
        return _processes(cell, options, alone)
    setup = Setup(CASES[cell.case], device, cell.dtype, options.tiny)
    try:
        control = WAYS["serial eager"](setup, 1)
        _warm(control, device)
        _free(device)
        base = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start = time.monotonic()
        train = WAYS[cell.way](setup, cell.models)
        _warm(train, device)
        ready_s = time.monotonic() - start
        peak = torch.cuda.max_memory_allocated() - base if device.type == "cuda" else None
        with alone():
            ms, control_ms = _blocks(train, control, options.timed, device)
    except Exception as error:
        return {"error": _in_a_line(error)}
    finally:
        control = train = None  # type: ignore[assignment]
        _free(device)
    models = 1 if cell.way in SERIAL else cell.models
    return {
        "ms_a_model_step": ms / models,
        "control_ms": control_ms,
        "speed_up": control_ms * models / ms,
        "peak_bytes_a_model": None if peak is None else peak // models,
        "ready_s": ready_s,
    }


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _blocks(
    train: TrainAll, control: TrainAll, seconds: float, device: torch.device
) -> tuple[float, float]:
    """Medians of blocks that take turns: ms for a call of each."""
    times: tuple[list[float], list[float]] = ([], [])
    counts = [
        max(1, round(seconds / BLOCKS / 2 / (_calls(one, 2, device) / 2e3)))
        for one in (train, control)
    ]
    for _ in range(BLOCKS):
        for place, one in enumerate((train, control)):
            times[place].append(_calls(one, counts[place], device) / counts[place])
    return statistics.median(times[0]), statistics.median(times[1])


def _warm(train: TrainAll, device: torch.device) -> None:
    """One at a time: a process that is stopped leaves little on the device."""
    for _ in range(_WARM_CALLS):
        _calls(train, 1, device)


def _calls(train: TrainAll, calls: int, device: torch.device) -> float:
    """Milliseconds that they took together."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        train()
    _wait(device)
    return (time.perf_counter() - start) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _processes(
    cell: FuseCell,
    options: argparse.Namespace,
    alone: Callable[[], contextlib.AbstractContextManager[Any]],
) -> dict[str, Any]:
    """As many processes train at once; each begins when all are ready."""
    command = [sys.executable, __file__, "--worker", "--device", options.device]
    command += ["--only", cell.case, "--dtypes", cell.dtype, "--timed", str(2 * options.timed)]
    command += ["--tiny"] if options.tiny else []
    return train_in_processes(command, cell.models, cell.way, alone)


def _worker(options: argparse.Namespace, device: torch.device) -> int:
    setup = Setup(CASES[options.only], device, options.dtypes, options.tiny)
    train = WAYS["serial eager"](setup, 1)
    _calls(train, _WARM_CALLS, device)
    print("ready", flush=True)
    sys.stdin.readline()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < options.timed:
        _calls(train, 5, device)
        steps += 5
    print(json.dumps({"steps": steps, "seconds": time.perf_counter() - start}), flush=True)
    return 0


def _line(result: dict[str, Any]) -> str:
    cell = f"{result['case']} {result['dtype']} x{result['models']} {result['way']}: "
    if "error" in result:
        return cell + result["error"]
    words = f"{result['ms_a_model_step']:.3f} ms a model-step"
    if result.get("speed_up"):
        words += f", {result['speed_up']:.2f}x of {result['control_ms']:.2f} ms"
    return f"{cell}{words}, ready in {result['ready_s']:.1f} s"


if __name__ == "__main__":
    raise SystemExit(main())
