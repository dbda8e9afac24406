"""Backward through time on a GPU: the scan against cuDNN and others, shape by shape.

    python benchmarks/scan_table.py --save cells.json [--seconds 300] [--steps 1024,4096] \
        [--batch 16,1] [--size 20,64]
    python benchmarks/scan_table.py --save cells.json --print [--svg docs/images/scan.svg]
    python benchmarks/scan_table.py --save cells.json --recommend [--seconds 60]
    python benchmarks/scan_table.py --launches [--steps 4096] [--batch 16] [--size 20]

First whether the kernels are right (against float64 on the same device). Then milliseconds of the
backward pass and of the whole step, rivals in turns: torch's nn.RNN (cuDNN), ScanRNN, a kernel that
goes back step by step, and the scan by batched products in a CUDA graph. Cells are saved one by
one: a run that is cut goes on where it ended. torch takes cuDNN's persistent kernels for 16 bits
only, so that rival computes in fp16. `--recommend` asks `recommend` for the saved shapes and tells
where it chose what loses by more than 5% here. `--launches` times the scan's states alone for each
chunk and number of warps: records/scan_costs.py rests on it.
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
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from scan_report import gains, heat_map, markdown, step_gain
from stepscope.fix.scan import ScanRNN, affine_maps

if TYPE_CHECKING:
    from collections.abc import Callable

    Alone = Callable[[], contextlib.AbstractContextManager[Any]]
    Rivals = dict[str, Callable[[], Any]]

STEPS = "32768,4096,1024,256,512,2048,8192,16384,65536"
CHUNKS, WARPS = (16, 32, 64, 128, 256), (1, 2, 4)
FEATURES = 8
ROUNDS, LEAST_S = 5, 0.02
ALLOWED = 0.95  # times as fast
MOST_STATES = 1 << 31  # bytes of one tensor of states
MOST_MAPS = 1 << 33  # bytes that batched products may take


def main() -> None:
    options = _options()
    cells = json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    if options.recommend:
        _compare_advice(options, cells)
        return
    if not options.print:
        _measure_all(options, cells)
    if not options.launches:
        print(markdown(cells), gains(cells), sep="\n\n")
    if options.svg:
        options.svg.write_text(heat_map(cells))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no cell after this")
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--batch", default="16,1,64,256")
    parser.add_argument("--size", default="20,32,16,64,128")
    parser.add_argument("--precision", default="tf32x3")
    parser.add_argument("--recommend", action="store_true", help="does advice fit the table?")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every cell")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--svg", type=Path)
    return parser.parse_args()


def _measure_all(options: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    end = time.monotonic() + options.seconds
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    if not options.no_check:
        check(options.precision)
    known = {(one["batch"], one["size"], one["steps"]) for one in cells}
    for batch, size, steps in product(*map(numbers, (options.batch, options.size, options.steps))):
        if time.monotonic() > end:
            break
        if (batch, size, steps) in known or 4 * steps * batch * size > MOST_STATES:
            continue
        shape = (steps, batch, size)
        with contextlib.ExitStack() as stack:
            stack.callback(torch.cuda.empty_cache)
            rivals = _launches(shape, options) if options.launches else _rivals(shape, options)
            ms = in_turns(rivals, alone)
            del rivals
        cells.append({"steps": steps, "batch": batch, "size": size, "ms": ms})
        print(json.dumps(cells[-1]), flush=True)
        if options.save:
            options.save.write_text(json.dumps(cells, indent=1))


def _compare_advice(options: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    from stepscope.fix.scan import recommend

    end, wrong, asked = time.monotonic() + options.seconds, 0, 0
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    for cell in cells:
        gain = step_gain(cell)
        if gain is None or time.monotonic() > end:
            continue
        with alone():
            advice = recommend(cell["steps"], cell["batch"], cell["size"], features=FEATURES)
        asked += 1
        loses = gain < ALLOWED if advice.choice == "scan" else gain > 1 / ALLOWED
        wrong += advice.choice == "scan" and loses
        shape = f"T={cell['steps']} B={cell['batch']} H={cell['size']}"
        print(
            f"{'LOSES' if loses else 'fits '} {shape}: {advice.choice}, {gain:.2f}x here",
            flush=True,
        )
    print(f"scan chosen where it loses by more than 5%: {wrong} of {asked}")


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def check(precision: str) -> None:
    """Distance from float64 as a share of the gradient, at several spectral radii."""
    from stepscope.fix.scan.rnn_kernels import backward_states, launch_for

    torch.manual_seed(0)
    for (steps, batch, size, tanh), radius in product(
        ((1000, 16, 20, True), (777, 3, 33, True), (515, 17, 64, False), (300, 2, 128, True),
         (32768, 4, 20, True)),
        (0.9, 1.0, 1.1),
    ):  # fmt: skip
        gradient = torch.randn(steps, batch, size, device="cuda")
        state = torch.tanh(0.1 * torch.randn_like(gradient))
        weight = torch.randn(size, size, device="cuda")
        weight *= radius / torch.linalg.eigvals(weight).abs().max()
        slope = 1 - state * state if tanh else (state > 0).float()
        right, _ = affine_maps.backward_states(gradient.double(), slope.double(), weight.double())
        found, _ = backward_states(
            gradient, state, weight, tanh=tanh, precision=precision,
            launch=launch_for(gradient.shape, gradient.device, precision),
        )  # fmt: skip
        whole = right.norm()
        error = float((found - right).norm() / whole) if whole < 1e37 else float("nan")
        shape = f"T={steps} B={batch} H={size} radius {radius}"
        print(f"check {shape} {precision}: {error:.1e}, largest {float(right.abs().max()):.1e}")
        sys.stdout.flush()


def _rivals(shape: tuple[int, int, int], options: argparse.Namespace) -> Rivals:
    steps, batch, size = shape
    torch.manual_seed(0)
    plain = nn.RNN(FEATURES, size, device="cuda")
    ours = ScanRNN.of(plain, options.precision)
    inputs = torch.randn(steps, batch, FEATURES, device="cuda")
    gradient = torch.randn(steps, batch, size, device="cuda")
    rivals: Rivals = {}
    for name, module in (("cudnn", plain), ("scan", ours)):
        rivals[f"{name} step"] = lambda module=module: module(inputs)[0].backward(gradient)
        with contextlib.suppress(RuntimeError):  # cuDNN takes 65535 steps; the step says so too
            output = module(inputs)[0]
            rivals[name] = lambda output=output: output.backward(gradient, retain_graph=True)
    with contextlib.suppress(RuntimeError):
        short = nn.RNN(FEATURES, size, device="cuda", dtype=torch.float16)
        ended, given = short(inputs.half())[0], gradient.half()
        rivals["cudnn, fp16"] = lambda: ended.backward(given, retain_graph=True)
    state = ours(inputs)[0].detach()
    weight = plain.weight_hh_l0.detach()
    rivals["one by one, states"] = lambda: _one_by_one(gradient, state, weight, options.precision)
    if 4 * steps * batch * size * size // 8 < MOST_MAPS:
        with contextlib.suppress(RuntimeError):  # it may need more memory than there is
            rivals["batched products, states"] = _graphed(gradient, state, weight)
    return rivals


def _one_by_one(
    gradient: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, precision: str
) -> torch.Tensor:
    """The kernel that replays a chunk, with one chunk: a program for sixteen sequences."""
    from stepscope.fix.scan import rnn_kernels
    from stepscope.fix.scan.rnn_kernels import launch_for

    steps, batch, size = gradient.shape
    warps = launch_for(gradient.shape, gradient.device, precision).replay_warps
    reached, left = torch.empty_like(gradient), torch.empty_like(gradient[0])
    rnn_kernels._replay[1, -(-batch // rnn_kernels._SEQUENCES)](
        gradient, state, weight, reached, torch.zeros_like(left), reached, left,
        steps, batch, size, steps,
        SEQUENCES=rnn_kernels._SEQUENCES, SIZE=rnn_kernels.padded_size(size), TANH=True,
        PRECISION=precision, AGAIN=False, num_warps=warps,
    )  # fmt: skip
    return reached


def _graphed(
    gradient: torch.Tensor, state: torch.Tensor, weight: torch.Tensor
) -> Callable[[], Any]:
    slope = 1 - state * state
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            affine_maps.backward_states(gradient, slope, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = affine_maps.backward_states(gradient, slope, weight)
    return lambda: (graph.replay(), kept)


def _launches(shape: tuple[int, int, int], options: argparse.Namespace) -> Rivals:
    from stepscope.fix.scan.rnn_kernels import Launch, backward_states

    gradient = torch.randn(*shape, device="cuda")
    state = torch.tanh(torch.randn_like(gradient))
    weight = torch.randn(shape[-1], shape[-1], device="cuda") / shape[-1] ** 0.5
    return {
        f"chunk {launch.chunk} warps {launch.fold_warps}": partial(
            backward_states,
            gradient, state, weight, tanh=True, launch=launch, precision=options.precision,
        )
        for launch in (Launch(chunk, *[warps] * 3) for chunk, warps in product(CHUNKS, WARPS))
    }  # fmt: skip


def in_turns(rivals: Rivals, alone: Alone) -> dict[str, float | str]:
    """Median milliseconds of each."""
    failed: dict[str, str] = {}
    for name, work in rivals.items():  # compiles
        try:
            work()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:150]}"
    ready = {name: work for name, work in rivals.items() if name not in failed}
    found: dict[str, list[float]] = {name: [] for name in ready}
    with alone():
        for _ in range(ROUNDS):
            for name, work in ready.items():
                found[name].append(timed(work))
    return {name: round(statistics.median(ms), 4) for name, ms in found.items()} | failed


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - began < LEAST_S:
        work()
        count += 1
        if count % 8 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


if __name__ == "__main__":
    main()
