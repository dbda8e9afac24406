"""The training behind `stepscope demo`: a small language model, DDP over gloo, one slow input.

    python -m stepscope.bench.demo --rank 0 --world 2 --store FILE --out FOLDER

Rank 1's data set is slow on purpose, so that there is something to find: rank 1 waits for data,
rank 0 waits for rank 1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 128, 4, 2, 64, 8
STEPS, WAIT, WARMUP, ACTIVE = 16, 6, 2, 8
SLOW_SAMPLE_S = 0.006


class Sentences(Dataset[torch.Tensor]):
    """Random bytes with a rhythm a small model can learn."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.delay_s)  # stands for decoding and augmentation
        start = index * 7 % VOCABULARY
        return (start + torch.arange(LENGTH + 1) * 3) % VOCABULARY


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.middle = nn.LayerNorm(WIDTH)
        self.forward_layer = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.forward_layer(self.middle(x))


class SmallLanguageModel(nn.Module):
    """Bytes in, next bytes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


def train(rank: int, out: Path) -> None:
    """A few steps, the last ones profiled."""
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallLanguageModel(), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(Sentences(SLOW_SAMPLE_S if rank == 1 else 0.0), batch_size=BATCH)

    def save(profiler: Any) -> None:
        profiler.export_chrome_trace(str(out / f"rank-{rank:05d}" / "trace.json.gz"))

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE),
        on_trace_ready=save,
        record_shapes=True,
        with_stack=True,
    ) as profiler:
        for step, tokens in enumerate(batches):
            loss = nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
            if rank == 0 and step % 4 == 3:
                print(f"step {step + 1:2d}  loss {loss.item():.3f}", flush=True)  # noqa: T201


def main() -> None:
    """Join the group, train, leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (options.out / f"rank-{options.rank:05d}").mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(str(options.store), options.world)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world)
    try:
        train(options.rank, options.out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
