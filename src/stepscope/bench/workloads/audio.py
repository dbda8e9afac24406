"""Speech and signals: Deep Speech 2, Conformer, WaveNet."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Target, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    Labelled,
    feed_forward,
    in_batches,
    in_sizes,
    train_on,
    words_loss,
)
from stepscope.bench.workloads.language_models import make_texts, next_word_loss

# Deep Speech 2: spectrograms to letters, without knowing when each letter is said.

LETTERS = 29  # 26, space, apostrophe; 0 is the blank
FREQUENCIES = 161


class BidirectionalLayer(nn.Module):
    """A norm over batch and time, then both directions, added."""

    def __init__(self, inputs: int, width: int, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs) if norm else nn.Identity()
        self.recurrent = nn.GRU(inputs, width, bias=False, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.flatten(0, 1)).view_as(x)
        both, _ = self.recurrent(x)
        return both.unflatten(2, (2, -1)).sum(2)


class DeepSpeech2(nn.Module):
    """Convolutions over frequency and time, recurrent layers, letters at each time."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels, width = config.channels, config.width
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), (2, 2), (0, 5)),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (21, 11), (2, 1), (0, 5)),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )
        bands = ((FREQUENCIES - 41) // 2 + 1 - 21) // 2 + 1
        inputs = (channels * bands, *[width] * (config.layers - 1))
        self.layers = nn.Sequential(
            *(BidirectionalLayer(size, width, norm=layer > 0) for layer, size in enumerate(inputs))
        )
        self.norm, self.output = nn.BatchNorm1d(width), nn.Linear(width, LETTERS, bias=False)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(spectrograms.unsqueeze(1))
        x = self.layers(x.flatten(1, 2).transpose(1, 2))
        return self.output(self.norm(x.flatten(0, 1)).view_as(x))


@in_batches
def make_letters(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """A letter is a tone of its own pitch for some frames, then silence; with noise."""
    device = draw.device
    pitches = torch.arange(FREQUENCIES, device=device).view(-1, 1)
    sounds = torch.arange(config.frames, device=device) % config.hold < config.hold * 2 // 3
    while True:
        shape = (config.batch, config.frames // config.hold)
        letters = torch.randint(1, LETTERS, shape, generator=draw, device=device)
        tone = 5 * letters.repeat_interleave(config.hold, 1).unsqueeze(1)
        heard = 3 * torch.exp(-(((pitches - tone) / 3) ** 2)) * sounds[: tone.shape[2]]
        noise = torch.randn(heard.shape, generator=draw, device=device)
        yield heard + 0.3 * noise, letters


def letters_loss(model: nn.Module, batch: Labelled) -> torch.Tensor:
    heard, letters = batch
    chances = model(heard).float().log_softmax(2).transpose(0, 1)
    times, samples = chances.shape[:2]
    # Lengths as plain numbers: as tensors on the device they would make the host wait.
    return functional.ctc_loss(chances, letters, [times] * samples, [letters.shape[1]] * samples)


# Frames are of 10 ms, and a letter is held for `hold` of them.
DEEP_SPEECH_2 = {
    "batch": 64, "batches": 4, "frames": 1000, "hold": 10, "channels": 32, "width": 800,
    "layers": 5, "lr": 3e-4,
}  # fmt: skip
DEEP_SPEECH_TINY = {
    "batch": 8, "frames": 48, "hold": 6, "channels": 4, "width": 64, "layers": 2, "lr": 5e-3,
}  # fmt: skip
DEEP_SPEECH_2_WORKLOAD = TrainingWorkload(
    name="deep-speech-2",
    task="speech recognition",
    source="Amodei et al., Deep Speech 2: End-to-End Speech Recognition, 2015 (7 layers, 38 M)",
    samples="utterances",
    sizes=in_sizes(DEEP_SPEECH_2, tiny=DEEP_SPEECH_TINY, small={"batch": 16, "frames": 500}),
    targets={"tiny": Target(2.0, 40), "small": Target(5.0, 60), "paper": Target(5.0, 60)},
    build=train_on(make_letters, DeepSpeech2, loss=letters_loss, clip=400.0),
    tags=frozenset({"recurrent", "convolutional", "speech"}),
)


# Conformer: speech by attention over the whole clip and convolutions of its neighbourhood.

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
    feed = feed_forward(width, 4 * width, nn.Sequential(nn.SiLU(), nn.Dropout(0.1)))
    return nn.Sequential(nn.LayerNorm(width), feed)


def conformer(config: Config) -> nn.Module:
    blocks = [nn.Linear(config.bands, config.width)]
    blocks += [ConformerBlock(config) for _ in range(config.layers)]
    return nn.Sequential(*blocks, nn.Linear(config.width, config.sounds))


@in_batches
def make_speech(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """Frames and the sound of each: a sound lasts eight frames and has a spectrum of its own."""
    device, last = draw.device, 8
    spectra = torch.randn((config.sounds, config.bands), generator=draw, device=device)
    while True:
        spoken = (config.batch, -(-config.frames // last))
        sounds = torch.randint(config.sounds, spoken, generator=draw, device=device)
        sounds = sounds.repeat_interleave(last, 1)[:, : config.frames]
        noise = torch.randn((*sounds.shape, config.bands), generator=draw, device=device)
        yield spectra[sounds] + NOISE * noise, sounds


def sounds_loss(model: nn.Module, batch: Labelled) -> torch.Tensor:
    frames, sounds = batch
    return words_loss(model(frames), sounds)


CONFORMER_S = {
    "batch": 16, "batches": 4, "frames": 400, "bands": 80, "sounds": 512, "width": 256,
    "heads": 4, "kernel": 31, "layers": 8, "lr": 1e-3,
}  # fmt: skip
CONFORMER_TINY = {
    "batch": 4, "frames": 40, "bands": 16, "sounds": 16, "width": 32, "kernel": 7, "layers": 2,
    "lr": 3e-3,
}  # fmt: skip
CONFORMER_WORKLOAD = TrainingWorkload(
    name="conformer",
    task="speech recognition",
    source="Gulati et al., Conformer: Convolution-augmented Transformer, 2020",
    samples="clips",
    sizes=in_sizes(
        CONFORMER_S,
        tiny=CONFORMER_TINY,
        paper={"width": 512, "heads": 8, "layers": 17, "frames": 1000},
    ),
    targets={"tiny": Target(1.0, 60), "small": Target(5.0, 60), "paper": Target(5.0, 60)},
    build=train_on(make_speech, conformer, torch.optim.AdamW, sounds_loss),
    tags=frozenset({"attention", "extra"}),
)


# WaveNet: the next level of a signal by convolutions that look ever farther back.


class WaveNetLayer(nn.Module):
    """A gated convolution of two moments, `apart` from each other."""

    def __init__(self, width: int, apart: int) -> None:
        super().__init__()
        self.apart = apart
        self.both = nn.Conv1d(width, 2 * width, 2, dilation=apart)
        self.out = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        signal, gate = self.both(functional.pad(x, (self.apart, 0))).chunk(2, 1)
        change, skip = self.out(torch.tanh(signal) * torch.sigmoid(gate)).chunk(2, 1)
        return x + change, skip


class WaveNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.levels = nn.Embedding(config.words, width)
        self.layers = nn.ModuleList(
            WaveNetLayer(width, 2**power)
            for _ in range(config.stacks)
            for power in range(config.doublings)
        )
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, config.words, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.levels(ids).transpose(1, 2)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        logits: torch.Tensor = self.head(total).transpose(1, 2)
        return logits


# The words are levels of the signal.
WAVENET = {
    "batch": 8, "batches": 4, "length": 4096, "words": 256, "known": 256, "width": 128,
    "stacks": 2, "doublings": 9, "lr": 1e-3,
}  # fmt: skip
WAVENET_TINY = {
    "length": 128, "words": 32, "known": 32, "width": 32, "stacks": 1, "doublings": 4, "lr": 5e-3,
}  # fmt: skip
WAVENET_WORKLOAD = TrainingWorkload(
    name="wavenet",
    task="audio generation",
    source="van den Oord et al., WaveNet: A Generative Model for Raw Audio, 2016",
    samples="clips",
    sizes=in_sizes(
        WAVENET, tiny=WAVENET_TINY, paper={"length": 16000, "stacks": 3, "doublings": 10}
    ),
    targets={"tiny": Target(2.0, 60), "small": Target(4.0, 60), "paper": Target(4.5, 60)},
    build=train_on(make_texts, WaveNet, loss=next_word_loss),
    tags=frozenset({"convolutional", "extra"}),
)
