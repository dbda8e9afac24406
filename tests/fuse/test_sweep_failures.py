"""Sweeps whose settings do not fit together, fail to build, or run out of data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sweep import STEPS, Data, alone, build, loss, means
from test_sweep_verb import SCRIPT, stepscope
from torch import nn

from stepscope.fix.fuse import grid, sweep
from stepscope.fix.fuse.sweep import TrialArray, start_trial


def sizes(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Another optimizer, batch or switch for some."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    kind = getattr(torch.optim, config["kind"])
    options = {"momentum": 0.9, "nesterov": config["flag"]} if config["kind"] == "SGD" else {}
    return model, kind(model.parameters(), lr=0.05, **options), Uneven(config["batch"]), loss


class Uneven(Data):
    """Its last batch is smaller than the others."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(11, 6, generator=draw)
        for places in torch.randperm(11).split(self.size):
            yield x[places], (x[places][:, 0] > 0).long()


def serial(config: Mapping[str, Any], steps: int) -> float:
    (trial,) = sweep(sizes, [config], steps=steps, width=1, every=steps)
    return trial.loss


def test_whatever_differs_trains_apart_and_late_comers_have_other_batches() -> None:
    configs = grid(kind=["SGD", "Adam"], flag=[True, False], batch=[4, 5])
    ended = list(sweep(sizes, configs, steps=7, width=3, every=2))
    assert sorted(trial.number for trial in ended) == list(range(8))
    for trial in ended:
        assert trial.state == "finished"
    again = {trial.number: trial for trial in sweep(sizes, configs, steps=7, width=1, every=2)}
    for trial in ended:
        assert trial.losses == pytest.approx(again[trial.number].losses, rel=1e-4)


def test_a_trial_that_joins_in_the_middle_of_an_epoch() -> None:
    configs = [{"kind": "SGD", "flag": False, "batch": 4}] * 3
    hopeless = iter([True, False, False, False, False, False, False, False, False, False])
    ended = list(sweep(sizes, configs, steps=8, width=2, every=2, stop=lambda _: next(hopeless)))
    expected = serial(configs[0], 8)
    finished = [trial for trial in ended if trial.state == "finished"]
    assert len(finished) == 2
    for trial in finished:
        assert sum(trial.losses) / len(trial.losses) == pytest.approx(expected, rel=1e-4)


def test_one_that_cannot_be_built_fails_alone() -> None:
    def sometimes(config: Mapping[str, Any]) -> tuple[Any, ...]:
        if config["lr"] == 1e-2:
            raise ValueError("no such data")
        return build(config)

    configs = grid(lr=[1e-1, 1e-2, 1e-3])
    ended = {one.number: one for one in sweep(sometimes, configs, steps=STEPS, width=2, every=4)}
    assert [ended[number].state for number in range(3)] == ["finished", "failed", "finished"]
    assert str(ended[1].error) == "no such data"
    assert ended[2].losses == pytest.approx(means(alone(configs[2]), 4), rel=1e-4)


def test_one_whose_data_raise_leaves_and_the_others_lose_nothing() -> None:
    class Broken(Data):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for place, batch in enumerate(super().__iter__()):
                if place == 2:
                    raise OSError("disk gone")
                yield batch

    def sometimes(config: Mapping[str, Any]) -> tuple[Any, ...]:
        model, optimizer, data, own = build(config)
        return model, optimizer, Broken() if config["lr"] == 1e-2 else data, own

    configs = grid(lr=[1e-1, 1e-2, 1e-3])
    ended = {one.number: one for one in sweep(sometimes, configs, steps=STEPS, width=3, every=4)}
    assert [ended[number].state for number in range(3)] == ["finished", "failed", "finished"]
    for number in (0, 2):
        expected = alone(configs[number])
        total = sum(ended[number].losses) / len(ended[number].losses)
        assert ended[number].step == STEPS
        assert total == pytest.approx(sum(expected) / STEPS, rel=0.2)


def test_batches_may_be_dictionaries() -> None:
    class Named(Data):
        def __iter__(self) -> Iterator[Any]:
            for x, y in super().__iter__():
                yield {"x": x, "labels": [y], "kind": "plain"}

    def named(config: Mapping[str, Any]) -> tuple[Any, ...]:
        model, optimizer, _, _ = build(config)
        return model, optimizer, Named(), lambda net, one: loss(net, (one["x"], one["labels"][0]))

    configs = grid(lr=[1e-1, 1e-3])
    hopeless = iter([True, False, False, False, False])
    ended = sweep(named, [*configs, configs[0]], steps=8, width=2, every=4,
                  stop=lambda _: next(hopeless))  # fmt: skip
    finished = [trial for trial in ended if trial.state == "finished"]
    assert len(finished) == 2
    for trial in finished:
        assert trial.losses == pytest.approx(means(alone(trial.config, 8), 4), rel=1e-4)


def test_what_all_have_in_common_fails_for_all(tmp_path: Path) -> None:
    def wrong(config: Mapping[str, Any]) -> tuple[Any, ...]:
        model, optimizer, data, _ = build(config)
        return model, optimizer, data, lambda net, batch: loss(net, (batch[0][:, :3], batch[1]))

    for width in (2, None):
        ended = list(sweep(wrong, grid(lr=[1e-1, 1e-3]), steps=8, width=width))
        assert [trial.state for trial in ended] == ["failed", "failed"]
        assert all(isinstance(trial.error, RuntimeError) for trial in ended)


def test_as_many_as_fit() -> None:
    ended = list(sweep(build, grid(lr=[1e-1, 1e-2, 1e-3]), steps=4, width=None, every=4))
    for trial in ended:
        assert trial.losses == pytest.approx(means(alone(trial.config, 4), 4), rel=1e-4)


def test_an_array_of_trials_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    configs = grid(lr=[1e-1, 1e-2])
    array = TrialArray(start_trial(build, configs[0], 0, 0))
    array.add(start_trial(build, configs[1], 1, 0))
    array.train(6)  # its data began again meanwhile
    torch.save(array.checkpoint(), tmp_path / "array.pt")
    again = TrialArray.from_checkpoint(build, torch.load(tmp_path / "array.pt"))
    for one in (array, again):
        one.train(6)
    assert again.trials[0].losses == array.trials[0].losses
    for trial, config in zip(again.trials, configs, strict=True):
        assert trial.losses == pytest.approx(means(alone(config), 6), rel=1e-4)


def test_the_verb_says_what_failed_and_what_to_do(tmp_path: Path) -> None:
    failing = SCRIPT.replace(
        "    model = nn.Linear(4, 1)",
        "    if config['lr'] > 1: raise ValueError('too large')\n    model = nn.Linear(4, 1)",
    )
    (tmp_path / "train.py").write_text(failing)
    words = ["--grid", "lr=0.1,2.0,0.01", "--fuse", "auto", "--steps", "4", "--out", "swept"]
    done = stepscope(tmp_path, "train.py", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("verdict  lr=0.1 has the lowest loss")
    assert lines[1].startswith("why      3 of 3 trials ended: 1 failed, 2 finished; the second")
    assert lines[2] == 'next     load the best weights: torch.load("swept/best.pt")["model"]'
    assert "train.py in line 10: ValueError: too large" in lines[-1]
    assert "lr=0.01: finished after 4 steps" in done.stderr
    again = stepscope(tmp_path, "train.py", "--resume", "swept", "--json")
    trials = {one["number"]: one for one in json.loads(again.stdout)["trials"]}
    assert trials[1]["state"] == "failed"
    assert trials[1]["why"].endswith("ValueError: too large")
    assert stepscope(tmp_path, "train.py", "--grid", "lr=1", "--fuse", "all").returncode == 2
