"""Other ways to go back through a layer, timed beside the shipped one: which one next?

    python benchmarks/scan_variants.py --save variants.json [--seconds 55] [--steps 1024,4096,32768]
    python benchmarks/scan_variants.py --promote variants.json
    TRITON_INTERPRET=1 python benchmarks/scan_variants.py --tiny --save variants.json

First the whole layer (states, weights, inputs), by a kernel for each part or in two launches; then
the states alone. `--promote` writes the steps for which two launches won into
src/stepscope/records/scan_costs.py: the product goes that way from then on.

Every way is first compared with float64, then timed in turns with the others (median of rounds, on
the host's clock, and the host's own time to launch it). Rows are saved one by one; a run that is
cut goes on where it ended. A way that fails has its error in its row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
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
from stepscope.fix.scan import affine_maps

if TYPE_CHECKING:
    from collections.abc import Callable

    Way = Callable[..., Any]

BATCH, SIZE, FEATURES = 16, 20, 8
ROUNDS, LEAST_S = 5, 0.01
_COSTS = Path(__file__).parent.parent / "src/stepscope/records/scan_costs.py"
_SEPARATE, _FUSED = "layer, by parts", "layer, two launches"
_WORTH = 1.05
_ALLOWED = 1e-5  # of the gradient: a way that is further from float64 is no candidate


def main() -> None:
    options = _options()
    if options.promote:
        print(promote(json.loads(options.promote.read_text()), _COSTS))
        return
    rows = json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    end = time.monotonic() + options.seconds
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    known = {(row["part"], row["steps"]) for row in rows}
    lengths = (37,) if options.tiny else [int(word) for word in options.steps.split(",")]
    for part, steps in product(("layer", "states"), lengths):
        if (part, steps) in known or time.monotonic() > end:
            continue
        rows.append(_measure(part, steps, options, alone))
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))
    print(table(rows))


def promote(rows: list[dict[str, Any]], costs: Path) -> str:
    """Write the range of steps for which two launches are faster, by 5% at least, than a kernel for
    each part, and exact; nothing is measured between the lengths of the table."""
    ratios = {
        row["steps"]: row["ms"][_SEPARATE] / row["ms"][_FUSED]
        for row in rows
        if {_SEPARATE, _FUSED} <= row["ms"].keys() and row["error"][_FUSED] < _ALLOWED
    }
    if not ratios:
        return "no row has both ways of a layer: nothing is changed"
    won = [steps for steps, ratio in ratios.items() if ratio >= _WORTH]
    between = [steps for steps in ratios if won and min(won) <= steps <= max(won)]
    if len(between) > len(won):
        return f"two launches win at {won} steps, but not at all between: choose by hand"
    steps_range = (min(won), max(won)) if won else None
    text, count = re.subn(
        r"^(FUSED_STEPS: [^=]*=).*$", rf"\1 {steps_range}", costs.read_text(), flags=re.MULTILINE
    )
    if count != 1:
        return f"{costs} has no line FUSED_STEPS: nothing is changed"
    costs.write_text(text)
    figures = ", ".join(f"{steps}: {ratio:.2f}x" for steps, ratio in sorted(ratios.items()))
    return f"FUSED_STEPS = {steps_range} ({figures})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=55.0, help="start no row after this")
    parser.add_argument("--steps", default="1024,4096,32768")
    parser.add_argument("--promote", type=Path, help="measure nothing: put this table to use")
    parser.add_argument("--tiny", action="store_true", help="few steps, by Triton's interpreter")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    return parser.parse_args()


def layer_ways(shape: torch.Size, device: torch.device, chunk: int | None = None) -> dict[str, Way]:
    """Every way to compute all gradients of a layer; the first has a kernel for each part."""
    from stepscope.fix.scan import fused_kernels, rnn_layer
    from stepscope.fix.scan.device_size import multiprocessors
    from stepscope.records import scan_costs

    steps, batch, _ = shape
    best = chunk or scan_costs.fused_chunk(steps, batch, multiprocessors(device))
    exact = {"precision": "tf32x3", "wants_inputs": True}
    gradients = partial(fused_kernels.layer_gradients, **exact)
    return {
        _SEPARATE: partial(rnn_layer.gradients_by_parts, **exact),
        _FUSED: partial(gradients, chunk=best),
        "layer, two launches, chunk / 2": partial(gradients, chunk=max(1, best // 2)),
        "layer, two launches, chunk x 2": partial(gradients, chunk=best * 2),
        "layer, two launches, 16 bits": partial(gradients, chunk=best, precision="fp16x3"),
        "layer, no tensor cores": partial(gradients, chunk=best, precision="ieee"),
    }


def ways(shape: torch.Size, device: torch.device, chunk: int | None = None) -> dict[str, Way]:
    """Every way to compute the states; the first is the shipped one, with its own chunk if none
    is given."""
    from scan_variant_kernels import folded_by, in_one_launch
    from stepscope.fix.scan.kernels import Launch, backward_states
    from stepscope.fix.scan.launches import launch_for

    launch = launch_for(shape, device) if chunk is None else Launch(chunk)
    chunk = launch.chunk
    made: dict[str, Way] = {
        "as shipped": partial(backward_states, launch=launch, precision="tf32x3"),
        "chunk / 2": partial(backward_states, launch=Launch(chunk // 2), precision="tf32x3"),
        "chunk x 2": partial(backward_states, launch=Launch(chunk * 2), precision="tf32x3"),
        "without tensor cores": partial(backward_states, launch=launch, precision="ieee"),
        "one tf32 product": partial(backward_states, launch=launch, precision="tf32"),
        "3 products of 16 bits": folded_by("halves", chunk, "tf32x3"),
        "the same, 4 sequences": folded_by("halves", chunk, "tf32x3", 4),
        "4 sequences a program": folded_by("sequences", chunk, "tf32x3", 4),
        "two steps at a time": folded_by("pairs", chunk, "tf32x3"),
        "one launch": in_one_launch(chunk, "tf32x3"),
        "one launch, chunk x 4": in_one_launch(4 * chunk, "tf32x3"),
    }
    return made


def _measure(part: str, steps: int, options: argparse.Namespace, alone: Any) -> dict[str, Any]:
    device = torch.device("cpu" if options.tiny else "cuda")
    batch, size = (3, 5) if options.tiny else (BATCH, SIZE)
    torch.manual_seed(0)
    gradient = torch.randn(steps, batch, size, device=device)
    state = torch.tanh(0.5 * torch.randn_like(gradient))
    weight = torch.linalg.qr(torch.randn(size, size, device=device))[0].contiguous()
    given: tuple[torch.Tensor, ...] = (gradient, state, weight)
    choose: Way = ways
    if part == "layer":
        inputs = torch.randn(steps, batch, FEATURES, device=device)
        weight_input = torch.randn(size, FEATURES, device=device)
        given = (gradient, state, inputs, state[0] / 2, weight_input, weight)
        choose = layer_ways
    right = _exact(*given)
    row: dict[str, Any] = {"part": part, "steps": steps, "batch": batch, "size": size}
    row |= {"ms": {}, "host_ms": {}, "error": {}, "failed": {}}
    ready: dict[str, Way] = {}
    for name, way in choose(gradient.shape, device, 4 if options.tiny else None).items():
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


def _exact(gradient: torch.Tensor, state: torch.Tensor, *others: torch.Tensor) -> Any:
    """In float64: what reaches the states and the first of them, or all gradients of a layer."""
    g, h, *wide = (values.double() for values in (gradient, state, *others))
    reached, left = affine_maps.backward_states(g, 1 - h * h, wide[-1], 64)
    if len(wide) == 1:
        return reached, left
    inputs, initial, weight_input, _ = wide
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
        "| steps | way | ms | host, ms | distance from float64 | |",
        "|--:|:--|--:|--:|--:|:--|",
    ]
    for row in rows:
        exact = {n: ms for n, ms in row["ms"].items() if row["error"][n] < _ALLOWED}
        best = min(exact, key=lambda name: exact[name], default="")
        for name, error in row["error"].items():
            ms, host = (row[key].get(name) for key in ("ms", "host_ms"))
            figures = [f"{one:.3f}" if one is not None else "-" for one in (ms, host)]
            note = "best" if name == best else "too far off" if error >= _ALLOWED else ""
            lines.append(
                f"| {row['steps']} | {name} | {' | '.join(figures)} | {error:.0e} | {note} |"
            )
        for name, why in row["failed"].items():
            lines.append(f"| {row['steps']} | {name} | - | - | - | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
