"""Promised peaks against the bytes that are alive, counted after every operator.

On a CPU torch keeps no account of memory. Here it has one, so that a plan is made as on a GPU: from
what was allocated around the recorded pass and while each node of its backward ran.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import step_times

WIDTH, IMAGE, BATCH = 16, 24, 8
CLOSE = 0.03


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for size, into in ((1, width // 4), (3, width // 4), (1, width)):
            channels = width if size == 1 and into < width else width // 4
            parts += [nn.Conv2d(channels, into, size, padding=size // 2), nn.BatchNorm2d(into)]
            parts += [nn.ReLU()] if into < width else []
        self.path = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.path(x))


class DenseLayers(nn.Module):
    """Each reads what all before it made."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + 4 * n), nn.ReLU(), nn.Conv2d(width + 4 * n, 4, 3, padding=1)
            )
            for n in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class GatedLayers(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.inward = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.outward = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).transpose(1, 2)
        for inward, outward, norm in zip(self.inward, self.outward, self.norms, strict=True):
            gate, up = inward(norm(x)).chunk(2, -1)
            x = x + outward(nn.functional.silu(gate) * up)
        return x


NETS: dict[str, Any] = {
    "residual blocks": lambda: nn.Sequential(*(Bottleneck(WIDTH) for _ in range(5))),
    "dense layers": lambda: DenseLayers(WIDTH, 6),
    "gated layers": lambda: GatedLayers(WIDTH, 4),
}


def account_for_cpus(monkeypatch: pytest.MonkeyPatch, live: LiveBytes) -> None:
    monkeypatch.setattr(step_times, "allocated_bytes", lambda _device: live.bytes_now())
    monkeypatch.setattr(step_times, "_limit_bytes", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: live.peak_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: live.reset_peak())


@pytest.mark.parametrize("heavy", [False, True], ids=["cheap", "heavy"])
@pytest.mark.parametrize("name", NETS)
def test_a_step_holds_what_was_promised(
    name: str, heavy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = NETS[name]()
    batch = torch.randn(BATCH, WIDTH, IMAGE, IMAGE)
    live = LiveBytes(batch, *net.parameters(), *net.buffers())
    account_for_cpus(monkeypatch, live)
    saver = save_memory(net, heavy=heavy)
    peaks = []
    with live:
        for _ in range(6):
            live.reset_peak()
            net.zero_grad()
            net(batch).square().mean().backward()
            peaks.append(live.peak_bytes)
    promise = saver.promise
    assert promise is not None
    assert promise.whole_step
    assert promise.peak_bytes_before == pytest.approx(peaks[0], rel=CLOSE)
    assert promise.peak_bytes < 0.85 * promise.peak_bytes_before
    assert promise.peak_bytes == pytest.approx(peaks[-1], rel=CLOSE)
