"""GRU and LSTM: the backward pass by a scan against torch's own (cuDNN on a GPU), in turns.

    python benchmarks/scan_gated.py [--device cpu|cuda] [--steps 32768,8192,2048] [--batch 16,1] \
        [--size 20,64] [--chunks] [--seconds 60] [--save FILE.json]
    python benchmarks/scan_gated.py --tiny --device cpu
    python benchmarks/scan_gated.py --save FILE.json --print

Milliseconds of the backward pass and of the whole step, and how far the gradients are from those of
torch in float64. On a GPU also the backward pass with the scan's kernels off, by batched products;
`--chunks` times the kernels alone for each length of a chunk. Rows are saved one by one: a run that
is cut goes on where it ended.
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
from stepscope.fix.scan import gated_layer as step_jacobians
from stepscope.fix.scan.gated_layer import gated_layer, gated_layer_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CELLS: dict[str, Any] = {"gru": (nn.GRU, ScanGRU), "lstm": (nn.LSTM, ScanLSTM)}
FEATURES = 8
CHUNKS = (16, 32, 64, 128, 256, 512)
ROUNDS, LEAST_S = 5, 0.02
MOST_CHECKED = {"cuda": 1 << 26, "cpu": 1 << 18}  # numbers of states: more take minutes in float64
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
    parser.add_argument("--chunks", action="store_true", help="on a GPU: time them too")
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
        if options.chunks:
            rows[-1]["chunks_ms"] = chunk_times(cell, count, batch, size, options.device)
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
        if steps * batch * size <= MOST_CHECKED[inputs.device.type]:
            row["error"] = {name: error(one, inputs, gradient) for name, one in modules.items()}
            row["error"]["same states"] = error_on_same_states(cell, plain, inputs, gradient)
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


def error_on_same_states(
    cell: str, plain: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor
) -> float:
    """The backward pass alone: against itself in float64, from the states that it was given."""
    size = gradient.shape[-1]
    initial = inputs.new_zeros(inputs.shape[1], size if cell == "gru" else 2 * size)
    weights = [one.detach() for one in plain.parameters()]
    given = [*gated_layer(inputs, initial, *weights, cell), inputs, initial, *weights]
    found = gated_layer_backward(gradient, None, *given, cell, True)
    exact = [one.double() for one in given]
    right = gated_layer_backward(gradient.double(), None, *exact, cell, True)
    missed = sum(float((a - b).square().sum()) for a, b in zip(found, right, strict=True))
    return float((missed / sum(float(one.square().sum()) for one in right)) ** 0.5)


def _rivals(
    modules: dict[str, nn.Module], inputs: torch.Tensor, gradient: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    rivals: dict[str, Callable[[], Any]] = {}
    for name, module in modules.items():
        output = module(inputs)[0]
        rivals[f"{name}_ms"] = lambda output=output: output.backward(gradient, retain_graph=True)
    if inputs.is_cuda:
        rivals["products_ms"] = _without_kernels(rivals["scan_ms"])
    for name, module in modules.items():
        rivals[f"{name}_step_ms"] = lambda module=module: module(inputs)[0].backward(gradient)
    return rivals


def _without_kernels(work: Callable[[], Any]) -> Callable[[], Any]:
    def by_products() -> None:
        with kernels_off():
            work()

    return by_products


@contextlib.contextmanager
def kernels_off() -> Iterator[None]:
    largest = step_jacobians.LARGEST_BY_KERNELS
    step_jacobians.LARGEST_BY_KERNELS = 0
    try:
        yield
    finally:
        step_jacobians.LARGEST_BY_KERNELS = largest


def chunk_times(cell: str, steps: int, batch: int, size: int, device: str) -> dict[str, Any]:
    """Of the states alone, by the kernels or what stands in for them."""
    wide, mixed, kept = (size, 4, 0) if cell == "gru" else (2 * size, 5, size)
    coefficient = torch.rand(steps, batch, wide, mixed, device=device) / mixed
    basis = torch.randn(wide, mixed, wide, device=device) / wide**0.5
    gradient = torch.randn(steps, batch, wide, device=device)
    jacobians = step_jacobians.StepJacobians(coefficient, basis, kept)
    found: dict[str, Any] = {}
    for chunk in (chunk for chunk in CHUNKS if chunk < steps):
        try:
            step_jacobians.backward_rows(gradient, jacobians, chunk)
            times = [
                timed(
                    lambda at=chunk: step_jacobians.backward_rows(gradient, jacobians, at), device
                )
                for _ in range(3)
            ]
            found[str(chunk)] = round(statistics.median(times), 4)
        except Exception as failure:
            found[str(chunk)] = f"{type(failure).__name__}: {str(failure)[:100]}"
    return found


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
        "| | T | B | H | torch, ms | scan, ms | | by products | step, torch | scan | "
        "| error, torch | scan | on the same states |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        shape = f"| {row['cell']} | {row['steps']} | {row['batch']} | {row['size']}"
        if "failed" in row:
            lines.append(f"{shape} | {row['failed']} |")
            continue
        errors = [f"{one:.1e}" for one in row.get("error", {}).values()] or ["-"] * 3
        products = f"{row['products_ms']:.2f}" if "products_ms" in row else "-"
        lines.append(
            f"{shape} | {row[TORCH]:.2f} | {row[SCAN]:.2f} | {row[TORCH] / row[SCAN]:.2f}x"
            f" | {products} | {row[TORCH_STEP]:.2f} | {row[SCAN_STEP]:.2f}"
            f" | {row[TORCH_STEP] / row[SCAN_STEP]:.2f}x | {' | '.join(errors)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
