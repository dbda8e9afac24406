"""DDP on gloo, whose ranks work for equally long unless a variable says otherwise.

A rank's work is mostly a pause, as the work of a device is for its host: more ranks than this
machine has cores would otherwise slow each other. Every rank prints its losses with all their bits.

    STEPS, WORK_MS, WIDTH, LAYERS     the training: how many steps, a rank's own work, the model
    SLOW_RANK, SLOW_HOST, SLOW_MS     this rank, or every rank of this host, works longer
    TARDY_HOST, TARDY_MS, TARDY_FROM  this host's ranks pause before they update the parameters
    HOLD_AT, HOLD_FILE                all ranks wait before this step until the file exists
    DIE_RANK, DIE_HOST, DIE_AT        this rank, or every rank of this host, is killed at this step;
    DIE_MARK                          once only: the file exists afterwards
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=number("TIMEOUT_S", 60)))
    rank = dist.get_rank()
    torch.manual_seed(0)
    width, steps = number("WIDTH", 128), number("STEPS", 20)
    layers = [
        part
        for _ in range(number("LAYERS", 4))
        for part in (nn.Linear(width, width, bias=False), nn.Tanh())
    ]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(rank)
    pause_s = (number("WORK_MS", 20) + slower_ms(rank)) / 1e3
    for step in range(steps):
        hold(step)
        die(step, rank)
        batch = torch.randn(16, width, generator=batches)
        time.sleep(pause_s)
        loss = model(batch).square().mean()
        loss.backward()
        if step >= number("TARDY_FROM", 0) and is_named("TARDY", rank):
            time.sleep(number("TARDY_MS", 0) / 1e3)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item().hex()}", flush=True)
    dist.destroy_process_group()


def number(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise))


def slower_ms(rank: int) -> int:
    return number("SLOW_MS", 10) if is_named("SLOW", rank) else 0


def is_named(fault: str, rank: int) -> bool:
    """Whether the fault is planted in this rank or on its host."""
    on_rank, on_host = (os.environ.get(f"{fault}_{where}") for where in ("RANK", "HOST"))
    return on_rank == str(rank) or on_host == os.uname().nodename


def hold(step: int) -> None:
    if step == number("HOLD_AT", -1):
        print(f"holding at {step}", flush=True)
        while not Path(os.environ["HOLD_FILE"]).exists():
            time.sleep(0.02)


def die(step: int, rank: int) -> None:
    if step != number("DIE_AT", -1) or not is_named("DIE", rank):
        return
    mark = Path(os.environ["DIE_MARK"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
