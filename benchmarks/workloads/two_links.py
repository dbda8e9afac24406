"""One rank of a DDP training that exchanges gradients over one link, and over several in turn.

Started by benchmarks/round_robin.py on every host. Rank 0 prints the step times and losses of every
way as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from paused_layers import paused_model
from torch.nn.parallel import DistributedDataParallel

from stepscope.fix.ddp import link_groups, round_robin_hook

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--links", nargs="+", default=["eth0", "eth1"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pause-ms", type=float, default=2.0)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = options.links[0]
    ways = {
        "plain": None,
        "several links": link_groups(options.links),
        "one link": link_groups([first] * len(options.links)),
    }
    trainings = {name: Training(groups, options) for name, groups in ways.items()}
    sent: dict[str, dict[str, int]] = {name: {} for name in ways}
    for turn in range(options.rounds):
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            before = {link: bytes_sent(link) for link in options.links}
            trainings[name].train(options.steps)
            for link, count in before.items():
                sent[name][link] = sent[name].get(link, 0) + bytes_sent(link) - count
    if dist.get_rank() == 0:
        found = {
            name: {"steps_s": one.steps_s, "losses": one.losses, "sent_bytes": sent[name]}
            for name, one in trainings.items()
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


class Training:
    """Goes on where it was left, with the same weights and data in all ways."""

    def __init__(self, groups: list[object] | None, options: argparse.Namespace) -> None:
        model = paused_model(options.layers, options.width, options.pause_ms)
        self._ddp = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
        if groups is not None:
            self._ddp.register_comm_hook(None, round_robin_hook(groups))
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self._batches = batches(options.width)
        self.losses: list[str] = []
        self.steps_s: list[float] = []
        self._step()  # DDP's first step uses one bucket
        self._step()

    def train(self, steps: int) -> None:
        dist.barrier()
        for _ in range(steps):
            begun = time.perf_counter()
            self._step()
            self.steps_s.append(time.perf_counter() - begun)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._ddp(next(self._batches)).square().mean()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item().hex())


def batches(width: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    while True:
        yield torch.randn(8, width, generator=draw)


def bytes_sent(link: str) -> int:
    """/proc/net belongs to the host's network, /sys to the whole machine."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counts,) = [line.split()[1:] for line in lines if line.split()[0] == f"{link}:"]
    return int(counts[8])


main()
