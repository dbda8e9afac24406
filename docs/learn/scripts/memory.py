"""Lesson 4: feed-forward blocks whose activations outgrow everything else."""

import argparse

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

BLOCKS, WIDTH = 6, 128


class Block(nn.Module):
    """Keeps for backward: its input, and the wide layer's output before and after the GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(nn.functional.gelu(self.widen(x)))


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def train(options: argparse.Namespace, profiler: profile | None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(recompute=options.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(options.steps):
        x = torch.randn(options.batch, WIDTH)
        optimizer.zero_grad()  # before forward: gradients and activations never meet at the peak
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        if profiler:
            profiler.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--checkpoint", action="store_true", help="the fix")
    parser.add_argument("--trace", help="record a trace with every allocation to this file")
    options = parser.parse_args()
    if options.trace is None:
        train(options, None)
        return
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=5, warmup=1, active=3),
        profile_memory=True,
        record_shapes=True,
        on_trace_ready=lambda done: done.export_chrome_trace(options.trace),
    ) as profiler:
        train(options, profiler)


if __name__ == "__main__":
    main()
