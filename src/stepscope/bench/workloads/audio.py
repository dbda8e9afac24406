"""Speech and signals: Deep Speech 2, Conformer, WaveNet."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload, descend
from stepscope.bench.workloads.language_models import make_texts, train_language_model

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
            *(BidirectionalLayer(size, width, norm=at > 0) for at, size in enumerate(inputs))
        )
        self.norm, self.output = nn.BatchNorm1d(width), nn.Linear(width, LETTERS, bias=False)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(spectrograms.unsqueeze(1))
        x = self.layers(x.flatten(1, 2).transpose(1, 2))
        return self.output(self.norm(x.flatten(0, 1)).view_as(x))


def make_letters(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A letter is a tone of its own pitch for some frames, then silence; with noise."""
    draw, device = place.generator(), place.device
    pitches = torch.arange(FREQUENCIES, device=device).view(-1, 1)
    sounds = torch.arange(config.frames, device=device) % config.hold < config.hold * 2 // 3
    speech = []
    for _ in range(config.batches):
        shape = (config.batch, config.frames // config.hold)
        letters = torch.randint(1, LETTERS, shape, generator=draw, device=device)
        tone = 5 * letters.repeat_interleave(config.hold, 1).unsqueeze(1)
        heard = 3 * torch.exp(-(((pitches - tone) / 3) ** 2)) * sounds[: tone.shape[2]]
        noise = torch.randn(heard.shape, generator=draw, device=device)
        speech.append((heard + 0.3 * noise, letters))
    return speech


def build_deep_speech_2(config: Config, place: TrainingPlace) -> Step:
    model = place.put(DeepSpeech2(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    speech = make_letters(config, place)

    def step(number: int) -> torch.Tensor:
        heard, letters = speech[number % len(speech)]
        chances = model(heard).float().log_softmax(2).transpose(0, 1)
        times, batch = chances.shape[:2]
        # Lengths as plain numbers: as tensors on the device they would make the host wait.
        loss = functional.ctc_loss(chances, letters, [times] * batch, [letters.shape[1]] * batch)
        return descend(optimizer, loss, clip=400.0)

    return step


DEEP_SPEECH_2 = {
    "batch": 64,
    "batches": 4,  # that training goes round
    "frames": 1000,  # of 10 ms
    "hold": 10,  # frames of a letter
    "channels": 32,
    "width": 800,
    "layers": 5,
    "lr": 3e-4,
}
DEEP_SPEECH_TINY = {
    "batch": 8,
    "frames": 48,
    "hold": 6,
    "channels": 4,
    "width": 64,
    "layers": 2,
    "lr": 5e-3,
}
DEEP_SPEECH_2_WORKLOAD = TrainingWorkload(
    name="deep-speech-2",
    task="speech recognition",
    source="Amodei et al., Deep Speech 2: End-to-End Speech Recognition, 2015 (7 layers, 38 M)",
    samples="utterances",
    sizes={
        "tiny": {**DEEP_SPEECH_2, **DEEP_SPEECH_TINY},
        "small": {**DEEP_SPEECH_2, "batch": 16, "frames": 500},
        "paper": DEEP_SPEECH_2,
    },
    targets={
        "tiny": Target(loss=2.0, steps=40),
        "small": Target(loss=5.0, steps=60),
        "paper": Target(loss=5.0, steps=60),
    },
    build=build_deep_speech_2,
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


def build_conformer(config: Config, place: TrainingPlace) -> Step:
    model = place.put(Conformer(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    batches = make_speech(config, place)

    def step(number: int) -> torch.Tensor:
        frames, sounds = batches[number % len(batches)]
        loss = functional.cross_entropy(model(frames).flatten(0, 1).float(), sounds.flatten())
        return descend(optimizer, loss)

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
CONFORMER_TINY = {
    "batch": 4,
    "frames": 40,
    "bands": 16,
    "sounds": 16,
    "width": 32,
    "kernel": 7,
    "layers": 2,
}
CONFORMER_WORKLOAD = TrainingWorkload(
    name="conformer",
    task="speech recognition",
    source="Gulati et al., Conformer: Convolution-augmented Transformer, 2020",
    samples="clips",
    sizes={
        "tiny": {**CONFORMER_S, **CONFORMER_TINY, "lr": 3e-3},
        "small": CONFORMER_S,
        "paper": {**CONFORMER_S, "width": 512, "heads": 8, "layers": 17, "frames": 1000},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=5.0, steps=60),
        "paper": Target(loss=5.0, steps=60),
    },
    build=build_conformer,
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


def build_wavenet(config: Config, place: TrainingPlace) -> Step:
    model = place.put(WaveNet(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    return train_language_model(model, optimizer, make_texts(config, place))


WAVENET = {
    "batch": 8,
    "batches": 4,
    "length": 4096,
    "words": 256,  # levels of the signal
    "known": 256,
    "width": 128,
    "stacks": 2,
    "doublings": 9,
    "lr": 1e-3,
}
WAVENET_TINY = {
    "length": 128,
    "words": 32,
    "known": 32,
    "width": 32,
    "stacks": 1,
    "doublings": 4,
    "lr": 5e-3,
}
WAVENET_WORKLOAD = TrainingWorkload(
    name="wavenet",
    task="audio generation",
    source="van den Oord et al., WaveNet: A Generative Model for Raw Audio, 2016",
    samples="clips",
    sizes={
        "tiny": {**WAVENET, **WAVENET_TINY},
        "small": WAVENET,
        "paper": {**WAVENET, "length": 16000, "stacks": 3, "doublings": 10},
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.5, steps=60),
    },
    build=build_wavenet,
    tags=frozenset({"convolutional", "extra"}),
)
