"""Deep Speech 2: spectrograms to letters, without knowing when each letter is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

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


def make_speech(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
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


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(DeepSpeech2(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    speech = make_speech(config, place)

    def step(number: int) -> torch.Tensor:
        heard, letters = speech[number % len(speech)]
        chances = model(heard).float().log_softmax(2).transpose(0, 1)
        times, batch = chances.shape[:2]
        # Lengths as plain numbers: as tensors on the device they would make the host wait.
        loss = functional.ctc_loss(chances, letters, [times] * batch, [letters.shape[1]] * batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 400.0)
        optimizer.step()
        return loss

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
TINY = {"batch": 8, "frames": 48, "hold": 6, "channels": 4, "width": 64, "layers": 2, "lr": 5e-3}
WORKLOAD = TrainingWorkload(
    name="deep-speech-2",
    task="speech recognition",
    source="Amodei et al., Deep Speech 2: End-to-End Speech Recognition, 2015 (7 layers, 38 M)",
    samples="utterances",
    sizes={
        "tiny": {**DEEP_SPEECH_2, **TINY},
        "small": {**DEEP_SPEECH_2, "batch": 16, "frames": 500},
        "paper": DEEP_SPEECH_2,
    },
    targets={
        "tiny": Target(loss=2.0, steps=40),
        "small": Target(loss=5.0, steps=60),
        "paper": Target(loss=5.0, steps=60),
    },
    build=build,
    tags=frozenset({"recurrent", "convolutional", "speech"}),
)
