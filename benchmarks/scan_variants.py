"""Ways to go back through a layer, timed beside the shipped one: which one next?

    python benchmarks/scan_variants.py --save variants.json [--seconds 55] \
        [--steps 1024,4096,32768] [--batch 16,1,256]
    TRITON_INTERPRET=1 python benchmarks/scan_variants.py --tiny --save variants.json

The whole layer (states, weights, inputs), by a kernel for each part or fused, with other chunks and
other products. Every way is first compared with float64, then timed in turns with the others
(median of rounds, on the host's clock, and the host's own time to launch it). Rows are saved one by
one; a run that is cut goes on where it ended. A way that fails has its error in its row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from scan_table import numbers
from stepscope.fix.scan import affine_maps

if TYPE_CHECKING:
    from collections.abc import Callable

    Way = Callable[..., Any]

SIZE, FEATURES = 20, 8
ROUNDS, LEAST_S = 5, 0.01
_ALLOWED = 1e-5  # of the gradient: a way that is further from float64 is no candidate


def main() -> None:
    options = _options()
    rows = json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    end = time.monotonic() + options.seconds
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    known = {(row["batch"], row["steps"]) for row in rows}
    batches, lengths = map(numbers, (options.batch, options.steps))
    for batch, steps in [(3, 37)] if options.tiny else product(batches, lengths):
        if (batch, steps) in known or time.monotonic() > end:
            continue
        rows.append(_measure(steps, batch, options, alone))
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))
    print(table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=55.0, help="start no row after this")
    parser.add_argument("--steps", default="1024,4096,32768")
    parser.add_argument("--batch", default="16,1,256")
    parser.add_argument("--tiny", action="store_true", help="few steps, by Triton's interpreter")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    return parser.parse_args()


def ways(shape: torch.Size, device: torch.device, chunk: int | None = None) -> dict[str, Way]:
    """Every way to compute all gradients of a layer; with the shipped chunk if none is given."""
    from stepscope.fix.scan import rnn_gradient_kernels, rnn_layer
    from stepscope.fix.scan.rnn_kernels import multiprocessors
    from stepscope.records import scan_costs

    steps, batch, _ = shape
    best = chunk or scan_costs.fused_chunk(steps, batch, multiprocessors(device))
    fused = partial(rnn_gradient_kernels.layer_gradients, precision="fp16x3", wants_inputs=True)
    return {
        "fused": partial(fused, chunk=best),
        "fused, chunk / 2": partial(fused, chunk=max(1, best // 2)),
        "fused, chunk x 2": partial(fused, chunk=best * 2),
        "fused, tf32 products": partial(fused, chunk=best, precision="tf32x3"),
        "fused, no tensor cores": partial(fused, chunk=best, precision="ieee"),
        "a kernel for each part": partial(
            rnn_layer.gradients_by_parts, precision="tf32x3", wants_inputs=True
        ),
    }


def _measure(steps: int, batch: int, options: argparse.Namespace, alone: Any) -> dict[str, Any]:
    device = torch.device("cpu" if options.tiny else "cuda")
    size = 5 if options.tiny else SIZE
    torch.manual_seed(0)
    gradient = torch.randn(steps, batch, size, device=device)
    state = torch.tanh(0.5 * torch.randn_like(gradient))
    weight = torch.linalg.qr(torch.randn(size, size, device=device))[0].contiguous()
    inputs = torch.randn(steps, batch, FEATURES, device=device)
    weight_input = torch.randn(size, FEATURES, device=device)
    given = (gradient, state, inputs, state[0] / 2, weight_input, weight)
    right = _exact(*given)
    row: dict[str, Any] = {"steps": steps, "batch": batch, "size": size}
    row |= {"ms": {}, "host_ms": {}, "error": {}, "failed": {}}
    ready: dict[str, Way] = {}
    for name, way in ways(gradient.shape, device, 4 if options.tiny else None).items():
        try:
            row["error"][name] = max(
                float((a - b).norm() / b.norm())
                for a, b in zip(way(*given, tanh=True), right, strict=True)
            )
            ready[name] = way
        except Exception as error:
            row["failed"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    if options.tiny:
        return row
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    with alone():
        for _ in range(ROUNDS):
            for name, way in ready.items():
                times[name].append(_timed(lambda way=way: way(*given, tanh=True)))
    for name, pairs in times.items():
        row["ms"][name], row["host_ms"][name] = map(statistics.median, zip(*pairs, strict=True))
    return row


def _exact(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All gradients of the layer, in float64."""
    g, h, inputs, initial, weight_input, weight = (values.double() for values in given)
    reached, left = affine_maps.backward_states(g, 1 - h * h, weight, 64)
    rows, before = reached.flatten(0, 1), torch.cat([initial.unsqueeze(0), h[:-1]]).flatten(0, 1)
    of_weights = rows.t() @ inputs.flatten(0, 1), rows.t() @ before, rows.sum(0)
    return reached @ weight_input, left, *of_weights


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call, and of the host until it has launched everything."""
    torch.cuda.synchronize()
    began, count, host = time.perf_counter(), 0, 0.0
    while count < 4 or time.perf_counter() - began < LEAST_S:
        before = time.perf_counter()
        work()
        host += time.perf_counter() - before
        count += 1
        if count % 8 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3, host / count * 1e3


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each way; the best of those that are exact enough is marked."""
    lines = [
        "| batch | steps | way | ms | host, ms | distance from float64 | |",
        "|--:|--:|:--|--:|--:|--:|:--|",
    ]
    for row in rows:
        where = f"{row['batch']} | {row['steps']}"
        exact = {n: ms for n, ms in row["ms"].items() if row["error"][n] < _ALLOWED}
        best = min(exact, key=lambda name: exact[name], default="")
        for name, error in row["error"].items():
            ms, host = (row[key].get(name) for key in ("ms", "host_ms"))
            figures = [f"{one:.3f}" if one is not None else "-" for one in (ms, host)]
            note = "best" if name == best else "too far off" if error >= _ALLOWED else ""
            lines.append(f"| {where} | {name} | {' | '.join(figures)} | {error:.0e} | {note} |")
        for name, why in row["failed"].items():
            lines.append(f"| {where} | {name} | - | - | - | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
