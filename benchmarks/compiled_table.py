"""Compiled and graphed steps on a GPU: what stepscope says of them against what was measured.

    python benchmarks/compiled_table.py --save rows.json [--seconds 400] [--only gpt2,bert] \
        [--ways eager,default] [--precisions bf16] [--tiny]
    python benchmarks/compiled_table.py --save rows.json --print

Each row is one training, run under `stepscope run`. Before the profiler's window the training times
its own steps; FLOPs are counted by torch in an eager step (MFU leaves out what fused attention
computes again in backward, as ours does); memory is the driver's count beyond the
context. MFU, peak, parts, findings and the explained share of the device's time come from
`stepscope explain`. Rows are saved one by one: a run that is cut goes on where it ended. The most
telling rows come first. `--tiny` is for a machine without a GPU: eager and default in fp32 only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = ("gpt2", "resnet50", "llama", "unet", "bert")
WAYS = (
    "reduce-overhead",
    "default",
    "whole-step graph",
    "graphed callables",
    "eager",
    "max-autotune-no-cudagraphs",
)
PRECISIONS = ("bf16", "tf32", "fp32")
WARM, TIMED, AFTER = 12, 12, 12  # steps
_ROW_S = 240  # a row that takes longer is ended


def main() -> int:
    options = _options()
    if options.worker:
        return _train(options)
    rows = json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    if not options.print:
        rows = [row for row in rows if "error" not in row]  # tried again
        _measure_all(options, rows)
    print(markdown(rows))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=400, help="start no row after this")
    parser.add_argument("--only", default=",".join(MODELS), help="models, by comma")
    parser.add_argument("--ways", help="by comma; all: " + ", ".join(WAYS))
    parser.add_argument("--precisions", help="by comma; all: " + ", ".join(PRECISIONS))
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def plan(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Model, way, precision: bf16 in all ways first, what takes minutes to compile last."""
    ways = (
        options.ways.split(",")
        if options.ways
        else (("eager", "default") if options.tiny else WAYS)
    )
    slow = [way for way in ways if way.startswith("max-autotune")]
    fast = [way for way in ways if way not in slow]
    precisions = options.precisions.split(",") if options.precisions else PRECISIONS
    if options.tiny and not options.precisions:  # most CPUs take seconds for a product in bf16
        precisions = ("fp32",)
    models = options.only.split(",")
    order = [(way, precision) for precision, way in product(precisions, fast)]
    order += [(way, precision) for precision, way in product(precisions, slow)]
    return [(model, way, precision) for way, precision in order for model in models]


def _measure_all(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    end = time.monotonic() + options.seconds
    known = {(row["model"], row["way"], row["precision"]) for row in rows}
    for model, way, precision in plan(options):
        if time.monotonic() > end:
            break
        if (model, way, precision) in known:
            continue
        began = time.monotonic()
        row: dict[str, Any] = {"model": model, "way": way, "precision": precision}
        try:
            row |= _run_row(options, row)
        except Exception as error:  # one row's trouble is not the next one's
            row["error"] = f"{type(error).__name__}: {error}"[-600:]
        row["took_s"] = round(time.monotonic() - began, 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))


def _run_row(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, facts = Path(folder, "run"), Path(folder, "facts.json")
        own = [sys.executable, __file__, "--worker", str(facts), "--only", row["model"]]
        own += ["--ways", row["way"], "--precisions", row["precision"]]
        own += ["--tiny"] if options.tiny else []
        window = [
            "--wait",
            str(WARM + TIMED + 2),
            "--warmup",
            "2",
            "--active",
            "3",
            "--repeat",
            "1",
        ]
        ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out)]
        paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        code, errors = _run_to_end([*ours, *window, "--", *own], environment, Path(folder))
        if code:
            raise RuntimeError(errors[-500:])
        measured = json.loads(facts.read_text())
        return measured | _explained(out, measured)


def _run_to_end(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Exit code and stderr; after the time limit the training and its compilers are ended too."""
    errors = folder / "stderr.txt"
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(_ROW_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    return code, errors.read_text(errors="replace")


def _explained(out: Path, measured: dict[str, Any]) -> dict[str, Any]:
    from stepscope.explain.explain_job import explain_job

    rank = explain_job(out, cache=False).ranks[0]
    efficiency, memory, compiled = rank.efficiency, rank.memory, rank.compiled
    parts = sum(part.ms for part in rank.budget.parts) if rank.budget.step_ms else None
    counted = efficiency.hardware_flops if efficiency else None
    timeline = rank.timeline
    pieces = timeline.compute_ns + timeline.exposed_comm_ns + timeline.exposed_memory_ns
    mfu = _ratio(measured["model_flops"], measured["bare_ms"] / 1e3)
    return {
        "mfu": efficiency.mfu if efficiency else None,
        "expected_mfu": mfu / efficiency.peak_flops
        if mfu and efficiency and efficiency.peak_flops
        else None,
        "flops_ratio": _ratio(counted, measured["eager_flops"]),
        "step_ratio": _ratio(rank.step_ms.truth or rank.step_ms.corrected, measured["bare_ms"]),
        "peak_ratio": _ratio(memory.peak_bytes if memory else None, measured["allocated_bytes"]),
        "driver_ratio": _ratio(memory.reserved_bytes if memory else None, measured["driver_bytes"]),
        "categories_ratio": _ratio(
            sum(size or 0 for size in memory.categories.values()) if memory else None,
            memory.peak_bytes if memory else None,
        ),
        "parts_ratio": _ratio(parts, rank.budget.step_ms),
        "timeline_left_ns": timeline.span_ns - pieces - timeline.idle_ns,
        "operator_share": compiled.operator_share if compiled else None,
        "line_share": compiled.line_share if compiled else None,
        "findings": [f"{one.id} {one.share:.0%}" for one in rank.findings],
        "quality": [note.id for note in rank.quality],
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _train(options: argparse.Namespace) -> int:
    """In the captured process: trains, and writes what it measured itself."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from compiled_models import MODELS as BUILDERS
    from library_turn import shared_turns

    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    precision = options.precisions
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(0)
    context = _driver_bytes(device)
    model, batch = BUILDERS[options.only](tiny=options.tiny)
    model.to(device)
    batch = tuple(one.to(device) for one in batch)
    cast = torch.autocast(
        device.type,
        torch.bfloat16,
        enabled=precision == "bf16",
        cache_enabled=options.ways != "graphed callables",  # torch refuses to capture the cache
    )
    with FlopCounterMode(display=False) as counter, cast:
        model(*batch).backward()
    model.zero_grad()
    flops = counter.get_total_flops()
    recomputed = _recomputed(counter.get_flop_counts().get("Global", {}))
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = _stepper(options.ways, model, batch, cast, on_gpu=on_gpu)
    for _ in range(WARM):
        step()
    with alone():
        _wait(device)
        began = time.perf_counter()
        for _ in range(TIMED):
            step()
        _wait(device)
        bare_ms = 1e3 * (time.perf_counter() - began) / TIMED
    for _ in range(AFTER):
        step()
    _wait(device)
    facts = {
        "bare_ms": bare_ms,
        "eager_flops": flops,
        "model_flops": flops - recomputed,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": torch.cuda.memory_reserved() if on_gpu else None,
        "driver_bytes": _driver_bytes(device) - context + torch.cuda.memory_reserved()
        if on_gpu
        else None,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "alone": turns is None,  # otherwise other processes' memory is in the driver's count
    }
    options.worker.write_text(json.dumps(facts))
    return 0


def _recomputed(by_operator: dict[Any, int]) -> int:
    """Fused attention computes its scores again in backward: one of five products there."""
    names = {str(operator): flops for operator, flops in by_operator.items()}
    return sum(
        flops // 5
        for name, flops in names.items()
        if "attention" in name
        and name.partition(".")[2].startswith(("_scaled", "_flash", "_eff"))
        and "backward" in name
    )


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _driver_bytes(device: Any) -> int:
    """In use on the device, with the libraries' own workspaces loaded, without torch's segments."""
    import torch

    if device.type != "cuda":
        return 0
    small = torch.ones(64, 64, device=device)
    torch.mm(small, small)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _stepper(way: str, model: Any, batch: Any, cast: Any, *, on_gpu: bool) -> Callable[[], Any]:
    """One training step in this way."""
    import torch

    whole = way == "whole-step graph"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu, capturable=whole)
    called = model
    if way in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        called = torch.compile(model, mode=None if way == "default" else way)
    elif way == "graphed callables":
        with cast:
            called = torch.cuda.make_graphed_callables(model, batch)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not whole)
        with cast:
            loss = called(*batch)
        loss.backward()
        optimizer.step()

    return _recorded(step) if whole else step


def _recorded(step: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


_COLUMNS = (
    ("MFU / expected", lambda row: _ratio(row.get("mfu"), row.get("expected_mfu"))),
    ("FLOPs / eager's", lambda row: row.get("flops_ratio")),
    ("step / bare", lambda row: row.get("step_ratio")),
    ("peak / torch's", lambda row: row.get("peak_ratio")),
    ("reserved / driver's", lambda row: row.get("driver_ratio")),
    ("parts / step", lambda row: row.get("parts_ratio")),
    ("with operator", lambda row: row.get("operator_share")),
    ("with line", lambda row: row.get("line_share")),
)


def markdown(rows: list[dict[str, Any]]) -> str:
    """A short table, and the findings of each row below it."""
    names = [name for name, _ in _COLUMNS]
    lines = [f"| training | ms | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    notes = []
    for row in rows:
        title = f"{row['model']} {row['way']} {row['precision']}"
        if "error" in row:
            notes.append(f"{title}: failed: {row['error'][-160:]}")
            continue
        values = [value(row) for _, value in _COLUMNS]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        lines.append(f"| {title} | {row['bare_ms']:.2f} | {' | '.join(cells)} |")
        notes.append(f"{title}: {', '.join(row['findings']) or 'no finding'}")
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    sys.exit(main())
