"""Would a scan pay for the backward pass of GRU and LSTM? FLOPs and bytes, and a measured fold.

    python benchmarks/scan_gated.py [--device cpu|cuda] [--steps 1024] [--batch 16] [--size 20] \
        [--seconds 30] [--save FILE.json]

A step back through a plain RNN is a diagonal times one weight that all steps share: a chunk is
folded with one [H, H] product a step, and nothing but states is read. A GRU's step has a dense
[H, H] Jacobian of three weights, an LSTM's one of [2H, 2H] of four, different for every step and
sequence. Folding one step means to make its Jacobian and to multiply it.

The measured fold is the least that any scan has to do: one product with a Jacobian for every step
and sequence, in chunks at the same time; making the Jacobians comes on top. The rival is torch's
own whole backward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

CELLS = {"rnn": (nn.RNN, 1, 1), "gru": (nn.GRU, 3, 1), "lstm": (nn.LSTM, 4, 2)}  # gates, states
_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--size", default="8,20,64")
    parser.add_argument("--seconds", type=float, default=30.0, help="start no row after this")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    rows = json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    known = {(row["cell"], row["batch"], row["size"]) for row in rows}
    print("| cell | B | H | FLOPs over the chain's | fold alone, ms | torch's backward, ms | |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for size in map(int, options.size.split(",")):
        for batch in map(int, options.batch.split(",")):
            for cell in CELLS:
                if (cell, batch, size) in known or time.monotonic() > end:
                    continue
                rows.append(measure(cell, options.steps, batch, size, options.device))
                print(line(rows[-1]), flush=True)
                if options.save:
                    options.save.write_text(json.dumps(rows, indent=1))


def fold_flops(cell: str, size: int) -> int:
    """Of one step and sequence: making the Jacobian (a diagonal scales each gate's weight; a
    GRU's reset gate and an LSTM's carry add to it) and one product with the chunk's matrix."""
    _, gates, states = CELLS[cell]
    making = 0 if cell == "rnn" else 2 * gates * size * size
    return making + 2 * (states * size) ** 3


def chain_flops(cell: str, size: int) -> int:
    """Of one step and sequence of the ordinary backward pass through the states."""
    _, gates, _ = CELLS[cell]
    return 2 * gates * size * size


def measure(cell: str, steps: int, batch: int, size: int, device: str) -> dict[str, Any]:
    make, _, states = CELLS[cell]
    row: dict[str, Any] = {"cell": cell, "steps": steps, "batch": batch, "size": size}
    row["flops_ratio"] = fold_flops(cell, size) / chain_flops(cell, size)
    try:
        row["torch_ms"] = _torch_ms(make(8, size, device=device), steps, batch, device)
        row["fold_ms"] = _fold_ms(states * size, steps, batch, device)
    except RuntimeError as error:  # memory
        row["failed"] = str(error)[:200]
    return row


def _torch_ms(rnn: nn.Module, steps: int, batch: int, device: str) -> float:
    output = rnn(torch.randn(steps, batch, 8, device=device))[0]
    gradient = torch.randn_like(output)
    return _median_ms(lambda: output.backward(gradient, retain_graph=True), device)


def _fold_ms(size: int, steps: int, batch: int, device: str) -> float:
    """One Jacobian for all chunks stands for those of a step: less memory than there would be."""
    chunk = max(1, 1 << (steps.bit_length() // 2))
    chunks = steps // chunk
    jacobian = torch.randn(chunks * batch, size, size, device=device) / size**0.5
    matrix = torch.randn_like(jacobian)

    def fold() -> None:
        current = matrix
        for _ in range(chunk):
            current = torch.bmm(current, jacobian)

    return _median_ms(fold, device)


def _median_ms(work: Any, device: str) -> float:
    work()
    times = []
    for _ in range(_ROUNDS):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def line(row: dict[str, Any]) -> str:
    shape = f"| {row['cell']} | {row['batch']} | {row['size']} | {row['flops_ratio']:.0f}x"
    if "failed" in row:
        return f"{shape} | - | - | {row['failed']} |"
    gain = row["torch_ms"] / row["fold_ms"]
    return f"{shape} | {row['fold_ms']:.1f} | {row['torch_ms']:.1f} | {gain:.2g}x |"


if __name__ == "__main__":
    sys.exit(main())
