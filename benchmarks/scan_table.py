"""Backward through time on a GPU: the scan's kernels against cuDNN, one table.

    python benchmarks/scan_table.py [--seconds 60] [--steps 1024,4096,32768] [--batch 16] \
        [--size 20] [--save FILE]

First whether the kernels are right (against float64 on the same device), then milliseconds of the
backward pass: cuDNN's, the scan's operator, and its states alone for each chunk, number of warps
and precision. Rivals take turns.
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
from stepscope.fix.scan import ScanRNN, affine_maps
from stepscope.fix.scan.kernels import Launch, backward_states

if TYPE_CHECKING:
    from collections.abc import Callable

    Alone = Callable[[], contextlib.AbstractContextManager[Any]]

CHUNKS, WARPS = (16, 32, 64, 128, 256), (1, 2, 4)
PRECISIONS = ("tf32x3", "ieee")  # "ieee" may take minutes to compile
ROUNDS, LEAST_S = 5, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", default="32768,4096,1024")
    parser.add_argument("--batch", default="16")
    parser.add_argument("--size", default="20")
    parser.add_argument("--precisions", default=PRECISIONS[0])
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    precisions = options.precisions.split(",")
    check(precisions)
    rows = []
    for batch, size, steps in product(
        *(map(numbers, (options.batch, options.size, options.steps)))
    ):
        if time.monotonic() > end:
            break
        rows.append(one_row((steps, batch, size), precisions, alone, end))
        print(json.dumps(rows[-1]), flush=True)
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def check(precisions: list[str]) -> None:
    """Largest error of any size, as a share of the largest gradient."""
    torch.manual_seed(0)
    for steps, batch, size, tanh in (
        (1000, 16, 20, True),
        (777, 3, 33, True),
        (515, 17, 64, False),
        (300, 2, 128, True),
    ):
        gradient = torch.randn(steps, batch, size, device="cuda")
        state = torch.tanh(torch.randn_like(gradient))
        weight = torch.randn(size, size, device="cuda") / size**0.5
        slope = 1 - state * state if tanh else (state > 0).float()
        right, _ = affine_maps.backward_states(gradient.double(), slope.double(), weight.double())
        for precision in precisions:
            reached, _ = backward_states(
                gradient, state, weight, tanh=tanh, launch=Launch(32), precision=precision
            )
            error = float((reached - right).norm() / right.norm())
            print(f"check T={steps} B={batch} H={size} {precision}: {error:.1e}", flush=True)


def one_row(
    shape: tuple[int, int, int], precisions: list[str], alone: Alone, end: float
) -> dict[str, Any]:
    steps, batch, size = shape
    torch.manual_seed(0)
    plain = nn.RNN(8, size, device="cuda")
    ours = ScanRNN.of(plain)
    inputs = torch.randn(steps, batch, 8, device="cuda")
    gradient = torch.randn(steps, batch, size, device="cuda")
    state = ours(inputs)[0].detach()
    weight = plain.weight_hh_l0.detach()
    rivals: dict[str, Callable[[], Any]] = {}
    for name, module in (("cudnn", plain), ("scan", ours)):
        output = module(inputs)[0]
        rivals[name] = lambda output=output: output.backward(gradient, retain_graph=True)
    for chunk, warps, precision in product(CHUNKS, WARPS, precisions):
        launch = Launch(chunk, fold_warps=warps, replay_warps=warps)
        rivals[f"states {precision} chunk {chunk} warps {warps}"] = (
            lambda launch=launch, precision=precision: backward_states(
                gradient, state, weight, tanh=True, launch=launch, precision=precision
            )
        )
    rivals["forward"] = lambda: plain(inputs)
    return {"steps": steps, "batch": batch, "size": size, "ms": in_turns(rivals, alone, end)}


def in_turns(
    rivals: dict[str, Callable[[], Any]], alone: Alone, end: float
) -> dict[str, float | str]:
    """Median milliseconds of each."""
    failed: dict[str, str] = {}
    for name, work in rivals.items():  # compiles
        try:
            work()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:150]}"
    ready = {name: work for name, work in rivals.items() if name not in failed}
    found: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        if time.monotonic() > end:
            break
        with alone():
            for name, work in ready.items():
                found[name].append(timed(work))
    return {name: round(statistics.median(ms), 4) for name, ms in found.items() if ms} | failed


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < LEAST_S:
        work()
        count += 1
        if count % 8 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


if __name__ == "__main__":
    main()
