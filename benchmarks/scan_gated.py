"""GRU and LSTM: the backward pass by a scan against torch's own (cuDNN on a GPU), in turns.

    python benchmarks/scan_gated.py [--device cpu|cuda] [--steps 32768,8192,2048] [--batch 16,1] \
        [--size 20,64] [--seconds 60] [--save FILE.json]
    python benchmarks/scan_gated.py --tiny --device cpu
    python benchmarks/scan_gated.py --save FILE.json --print

Milliseconds of the backward pass and of the whole step, and how far the gradients are from those of
torch in float64. Rows are saved one by one: a run that is cut goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from stepscope.fix.scan import ScanGRU, ScanLSTM

if TYPE_CHECKING:
    from collections.abc import Callable

CELLS: dict[str, Any] = {"gru": (nn.GRU, ScanGRU), "lstm": (nn.LSTM, ScanLSTM)}
FEATURES = 8
ROUNDS, LEAST_S = 5, 0.02
MOST_CHECKED = 8192 * 16 * 64  # numbers of the states: float64 takes minutes for more
TORCH, SCAN, TORCH_STEP, SCAN_STEP = "torch_ms", "scan_ms", "torch_step_ms", "scan_step_ms"


def main() -> None:
    options = _options()
    rows = json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    if not options.print:
        _measure_all(options, rows)
    print(table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", default="32768,8192,2048")
    parser.add_argument("--batch", default="16,1")
    parser.add_argument("--size", default="20,64")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no row after this")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--tiny", action="store_true", help="two small rows")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.batch, options.size = "64", "2", "4"
    return options


def _measure_all(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    end = time.monotonic() + options.seconds
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    known = {(row["cell"], row["steps"], row["batch"], row["size"]) for row in rows}
    sizes, steps, batches = (
        [int(word) for word in words.split(",")]
        for words in (options.size, options.steps, options.batch)
    )
    for size, count, batch, cell in product(sizes, steps, batches, CELLS):
        if (cell, count, batch, size) in known or time.monotonic() > end:
            continue
        rows.append(measure(cell, count, batch, size, options.device, alone))
        print(json.dumps(rows[-1]), flush=True)
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))


def measure(
    cell: str, steps: int, batch: int, size: int, device: str, alone: Callable[[], Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": cell, "steps": steps, "batch": batch, "size": size}
    torch.manual_seed(0)
    make, scan = CELLS[cell]
    plain = make(FEATURES, size, device=device)
    modules = {"torch": plain, "scan": scan.of(plain)}
    inputs = torch.randn(steps, batch, FEATURES, device=device)
    gradient = torch.randn(steps, batch, size, device=device)
    try:
        if steps * batch * size <= MOST_CHECKED:
            row["error"] = {name: error(one, inputs, gradient) for name, one in modules.items()}
        rivals = _rivals(modules, inputs, gradient)
        for work in rivals.values():  # compiles, and chooses kernels
            work()
        with alone():
            rounds = [[timed(work, device) for work in rivals.values()] for _ in range(ROUNDS)]
        medians = (round(statistics.median(times), 4) for times in zip(*rounds, strict=True))
        row |= dict(zip(rivals, medians, strict=True))
    except Exception as failure:  # the other rows count
        row["failed"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    return row


def error(module: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor) -> float:
    """Of all weights' gradients, as a share of them, against torch in float64 with the same weights
    and inputs: that of the forward pass is in it (cuDNN's may be TF32)."""
    module.zero_grad()
    module(inputs)[0].backward(gradient)
    make = next(plain for plain, scan in CELLS.values() if isinstance(module, (plain, scan)))
    exact = make(FEATURES, gradient.shape[-1], dtype=torch.float64, device=inputs.device)
    exact.load_state_dict(module.state_dict())
    exact(inputs.double())[0].backward(gradient.double())
    pairs = list(zip(module.parameters(), exact.parameters(), strict=True))
    missed = sum(float((one.grad - right.grad).square().sum()) for one, right in pairs)
    module.zero_grad()
    return float((missed / sum(float(right.grad.square().sum()) for _, right in pairs)) ** 0.5)


def _rivals(
    modules: dict[str, nn.Module], inputs: torch.Tensor, gradient: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    rivals: dict[str, Callable[[], Any]] = {}
    for name, module in modules.items():
        output = module(inputs)[0]
        rivals[f"{name}_ms"] = lambda output=output: output.backward(gradient, retain_graph=True)
    for name, module in modules.items():
        rivals[f"{name}_step_ms"] = lambda module=module: module(inputs)[0].backward(gradient)
    return rivals


def timed(work: Callable[[], Any], device: str) -> float:
    _wait(device)
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < LEAST_S:
        work()
        _wait(device)
        count += 1
    return (time.perf_counter() - began) / count * 1e3


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | T | B | H | torch, ms | scan, ms | | step, torch | scan | | error, torch | scan |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        shape = f"| {row['cell']} | {row['steps']} | {row['batch']} | {row['size']}"
        if "failed" in row:
            lines.append(f"{shape} | {row['failed']} |")
            continue
        errors = [f"{one:.1e}" for one in row.get("error", {}).values()] or ["-", "-"]
        lines.append(
            f"{shape} | {row[TORCH]:.2f} | {row[SCAN]:.2f} | {row[TORCH] / row[SCAN]:.2f}x"
            f" | {row[TORCH_STEP]:.2f} | {row[SCAN_STEP]:.2f}"
            f" | {row[TORCH_STEP] / row[SCAN_STEP]:.2f}x | {' | '.join(errors)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
