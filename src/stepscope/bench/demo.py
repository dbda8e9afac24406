"""The training behind `stepscope demo`: a small language model, DDP over gloo, one slow input.

    torchrun --nproc-per-node=2 -m stepscope.bench.demo

An ordinary training script: nothing in it knows that it is captured. Rank 1's data set is slow on
purpose, so that there is something to find: rank 1 waits for data, rank 0 waits for rank 1.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 128, 4, 2, 64, 8
STEPS = 40
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


class TransformerBlock(nn.Module):
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
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


def main() -> None:
    """Join the group, train, leave."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallLanguageModel(), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(Sentences(SLOW_SAMPLE_S if rank == 1 else 0.0), batch_size=BATCH)
    for step, tokens in enumerate(batches):
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1:2d}  loss {loss.item():.3f}", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
