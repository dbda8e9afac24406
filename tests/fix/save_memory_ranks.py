"""One rank of a training with and without save_memory; prints "same" when all gradients are equal.

torchrun --nproc-per-node 2 save_memory_ranks.py ddp|inner|fsdp
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepscope.fix import save_memory


def make() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        for _ in range(3)
    ]
    return nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 4))


def wrapped(kind: str) -> tuple[nn.Module, nn.Module]:
    """What is trained, and what save_memory gets."""
    model = make()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
        return model, model
    replicated = nn.parallel.DistributedDataParallel(model)
    return replicated, model if kind == "inner" else replicated


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def train(kind: str, *, save: bool) -> tuple[list[torch.Tensor], Any]:
    model, inner = wrapped(kind)
    saver = save_memory(inner) if save else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(local(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen, saver


def main() -> None:
    dist.init_process_group("gloo")
    kind = sys.argv[1]
    plain, _ = train(kind, save=False)
    saved, saver = train(kind, save=True)
    same = len(plain) == len(saved) and all(map(torch.equal, plain, saved))
    plan = saver.plan
    less = plan is not None and saver.held_bytes == plan.saved_bytes < plan.saved_bytes_before
    words = ["same" if same else "different", "less" if less else "not less", *saver.notes]
    Path(sys.argv[2], f"rank-{dist.get_rank()}").write_text(" ".join(words))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
