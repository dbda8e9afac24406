"""A sweep: the same trials as one after the other, whoever leaves or joins meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix.fuse import grid, sweep
from stepscope.fix.fuse.sweep import SweptTrial

STEPS = 12


class Data:
    """Its order is drawn when it begins, from the trial's own random numbers."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(20, 6, generator=draw)
        y = (x[:, 0] > 0).long()
        for places in torch.randperm(20).split(5):
            yield x[places], y[places]


def loss(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def build(config: Mapping[str, Any]) -> tuple[Any, ...]:
    width = config.get("width", 8)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))
    return model, torch.optim.Adam(model.parameters(), lr=config["lr"]), Data(), loss


def alone(config: Mapping[str, Any], steps: int = STEPS) -> list[float]:
    torch.manual_seed(0)
    model, optimizer, data, _ = build(config)
    losses: list[float] = []
    batches = iter(data)
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(data)
            batch = next(batches)
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def means(losses: list[float], every: int) -> list[float]:
    groups = [losses[at : at + every] for at in range(0, len(losses), every)]
    return [sum(group) / len(group) for group in groups]


def test_every_trial_trains_as_it_would_alone() -> None:
    configs = grid(lr=[1e-1, 1e-2, 1e-3, 3e-2, 3e-3])
    ended = list(sweep(build, configs, steps=STEPS, width=2, every=4))
    assert sorted(trial.number for trial in ended) == [0, 1, 2, 3, 4]
    for trial in ended:
        assert (trial.state, trial.step) == ("finished", STEPS)
        assert trial.losses == pytest.approx(means(alone(trial.config), 4), rel=1e-4)


def test_one_that_is_stopped_makes_room_for_the_next() -> None:
    def hopeless(trial: SweptTrial) -> bool:
        return trial.config["lr"] < 1e-2

    configs = grid(lr=[1e-4, 1e-1, 2e-4, 5e-2])
    ended = {trial.number: trial for trial in sweep(
        build, configs, steps=STEPS, width=2, every=4, stop=hopeless
    )}  # fmt: skip
    assert [ended[number].state for number in range(4)] == [
        "stopped", "finished", "stopped", "finished",
    ]  # fmt: skip
    assert ended[0].step == 4
    assert ended[3].losses == pytest.approx(means(alone(configs[3]), 4), rel=1e-4)


def test_other_architectures_get_an_array_of_their_own() -> None:
    configs = grid(width=[8, 16], lr=[1e-1, 1e-2])
    ended = list(sweep(build, configs, steps=4, width=4, every=4))
    assert sorted(trial.number for trial in ended) == [0, 1, 2, 3]
    for trial in ended:
        assert trial.losses == pytest.approx(means(alone(trial.config, 4), 4), rel=1e-4)
        assert trial.model is not None
        assert trial.model[0].out_features == trial.config["width"]  # type: ignore[index]


def test_settings_may_follow_from_results() -> None:
    seen: list[SweptTrial] = []

    def search() -> Iterator[dict[str, float]]:
        yield {"lr": 1e-4}
        yield {"lr": 1e-1}
        yield {"lr": 2 * min(seen, key=lambda trial: trial.loss).config["lr"]}

    for trial in sweep(build, search(), steps=8, width=1, every=8):
        seen += [trial]
    assert [trial.config["lr"] for trial in seen] == [1e-4, 1e-1, 0.2]


def test_a_build_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="model, optimizer, data and loss"):
        list(sweep(lambda _config: nn.Linear(2, 2), grid(lr=[1.0]), steps=1))  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="at least one"):
        list(sweep(build, grid(lr=[1.0]), steps=0))
