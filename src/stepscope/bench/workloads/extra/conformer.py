"""Conformer: speech by attention over the whole clip and convolutions of its neighbourhood."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


NOISE = 0.5


class ConformerBlock(nn.Module):
    """Half a feed-forward layer, attention, a depthwise convolution, the other half."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, kernel = config.width, config.kernel
        self.first, self.last = conformer_feed(width), conformer_feed(width)
        self.before_attention, self.before_convolution = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, config.heads, dropout=0.1, batch_first=True)
        self.gated = nn.Conv1d(width, 2 * width, 1)
        self.convolution = nn.Sequential(
            nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width),
            nn.BatchNorm1d(width),
            nn.SiLU(),
            nn.Conv1d(width, width, 1),
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        y = self.before_attention(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = functional.glu(self.gated(self.before_convolution(x).transpose(1, 2)), 1)
        x = x + self.convolution(y).transpose(1, 2)
        out: torch.Tensor = self.norm(x + 0.5 * self.last(x))
        return out


def conformer_feed(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.SiLU(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, width),
    )


class Conformer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Linear(config.bands, config.width)
        self.blocks = nn.Sequential(*(ConformerBlock(config) for _ in range(config.layers)))
        self.head = nn.Linear(config.width, config.sounds)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.first(frames)))
        return logits


def make_speech(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Frames and the sound of each: a sound lasts eight frames and has a spectrum of its own."""
    draw, device, last = place.generator(), place.device, 8
    spectra = torch.randn((config.sounds, config.bands), generator=draw, device=device)
    batches = []
    for _ in range(config.batches):
        spoken = (config.batch, -(-config.frames // last))
        sounds = torch.randint(config.sounds, spoken, generator=draw, device=device)
        sounds = sounds.repeat_interleave(last, 1)[:, : config.frames]
        noise = torch.randn((*sounds.shape, config.bands), generator=draw, device=device)
        batches.append((spectra[sounds] + NOISE * noise, sounds))
    return batches


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(Conformer(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    batches = make_speech(config, place)

    def step(number: int) -> torch.Tensor:
        frames, sounds = batches[number % len(batches)]
        loss = functional.cross_entropy(model(frames).flatten(0, 1).float(), sounds.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


CONFORMER_S = {
    "batch": 16,
    "batches": 4,
    "frames": 400,
    "bands": 80,
    "sounds": 512,
    "width": 256,
    "heads": 4,
    "kernel": 31,
    "layers": 8,
    "lr": 1e-3,
}
TINY = {"batch": 4, "frames": 40, "bands": 16, "sounds": 16, "width": 32, "kernel": 7, "layers": 2}
WORKLOAD = TrainingWorkload(
    name="conformer",
    task="speech recognition",
    source="Gulati et al., Conformer: Convolution-augmented Transformer, 2020",
    samples="clips",
    sizes={
        "tiny": {**CONFORMER_S, **TINY, "lr": 3e-3},
        "small": CONFORMER_S,
        "paper": {**CONFORMER_S, "width": 512, "heads": 8, "layers": 17, "frames": 1000},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=5.0, steps=60),
        "paper": Target(loss=5.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention", "extra"}),
)
