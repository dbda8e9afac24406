"""The bitstream task (Wang et al., MLSys 2020): does training with the scan learn the same, faster?

    python benchmarks/scan_bitstream.py [--steps 1000,30000] [--seconds 60] [--save FILE]

A sequence of bits is drawn with one of ten probabilities; a plain RNN (size 20) tells which, from
its last state, batch 16, Adam. Trained with torch's nn.RNN and with ScanRNN from the same weights
and data, with several seeds: curves overlap if the two differ by less than the seeds do. Steps of
both take turns, so their times compare.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from stepscope.fix.scan import gradient_horizon, scan_backward

CLASSES, SIZE, BATCH = 10, 20, 16
SEEDS = 3


class BitstreamNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, SIZE)
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(bits)[1][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default="1000,30000")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each length")
    parser.add_argument("--most", type=int, default=400, help="training steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    turns = shared_turns()
    options.alone = turns.alone if turns is not None else contextlib.nullcontext
    found = []
    for steps in map(int, options.steps.split(",")):
        found.append(_one_length(steps, options))
        print(json.dumps({key: value for key, value in found[-1].items() if key != "losses"}))
        if options.save:
            options.save.write_text(json.dumps(found))


def _one_length(steps: int, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    runs = [_trained(steps, seed, options, device) for seed in range(SEEDS)]
    length = min(len(losses) for run in runs for losses in run["losses"].values())
    tail = max(1, length // 5)
    ends = {
        way: [statistics.fmean(run["losses"][way][length - tail : length]) for run in runs]
        for way in ("torch", "scan")
    }
    apart = statistics.fmean(abs(a - b) for a, b in zip(ends["torch"], ends["scan"], strict=True))
    ms = {way: statistics.median(run["ms"][way] for run in runs) for way in ("torch", "scan")}
    return {
        "steps": steps,
        "trained": length,
        "ms": ms,
        "speed_up": ms["torch"] / ms["scan"],
        "end_losses": ends,
        "apart": apart,
        "seeds_apart": statistics.pstdev(ends["torch"]),
        "horizon": [run["horizon"] for run in runs],
        "losses": [run["losses"] for run in runs],
    }


def _trained(
    steps: int, seed: int, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    torch.manual_seed(seed)
    plain = BitstreamNet().to(device)
    with torch.no_grad():  # a state that lasts: otherwise only the last bits would count
        plain.rnn.weight_hh_l0.copy_(torch.linalg.qr(torch.randn(SIZE, SIZE))[0])
    nets = {"torch": plain, "scan": scan_backward(copy.deepcopy(plain))}
    optimizers = {way: torch.optim.Adam(net.parameters(), 3e-4) for way, net in nets.items()}
    draw = torch.Generator(device).manual_seed(seed)
    losses: dict[str, list[float]] = {way: [] for way in nets}
    times: dict[str, list[float]] = {way: [] for way in nets}
    bits, labels = _batch(steps, device, draw)
    horizon = str(gradient_horizon(plain.rnn, bits))
    with options.alone():
        end = time.monotonic() + options.seconds / SEEDS
        while len(losses["scan"]) < options.most and time.monotonic() < end:
            bits, labels = _batch(steps, device, draw)
            for way, net in nets.items():
                loss, ms = _step(net, optimizers[way], bits, labels, device)
                losses[way].append(loss)
                times[way].append(ms)
    return {
        "losses": losses,
        "ms": {way: statistics.median(values[2:] or values) for way, values in times.items()},
        "horizon": horizon,
    }


def _batch(
    steps: int, device: torch.device, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(CLASSES, (BATCH,), generator=draw, device=device)
    chance = 0.05 + labels * 0.1
    bits = torch.rand(steps, BATCH, generator=draw, device=device) < chance
    return bits.float().unsqueeze(-1), labels


def _step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    bits: torch.Tensor,
    labels: torch.Tensor,
    device: torch.device,
) -> tuple[float, float]:
    _wait(device)
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(bits), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    _wait(device)
    return float(loss.detach()), (time.perf_counter() - began) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
