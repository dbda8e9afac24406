"""One of the zoo's models trained by an ordinary script, to be captured.

stepscope run -- benchmarks/workloads/train.py MODEL [--steps 40] [--bf16] [--fused]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from workloads.zoo import build
from workloads.zoo.workload import parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = build(options.model, device, options.batch)
    kind: dict[str, Any] = {"fused": True} if options.fused else {}
    optimizers = [torch.optim.AdamW(group, **kind) for group in parameters(workload.modules)]
    for _ in range(options.steps):
        for loss, optimizer in zip(workload.passes, optimizers, strict=True):
            optimizer.zero_grad()
            context: Any = contextlib.nullcontext()
            if options.bf16:
                context = torch.autocast(device, torch.bfloat16)
            with context:
                value = loss()
            value.backward()
            optimizer.step()
    print(value.item())


main()
