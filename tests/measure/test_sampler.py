"""Stacks of one thread, counted without stopping it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from stepscope.measure.profiler import sampler as sampling
from stepscope.measure.profiler.sampler import SampledSteps, Sampler


def busy_place(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(200))


def test_most_samples_name_the_function_that_ran() -> None:
    sampler = Sampler(threading.get_ident(), 200)
    gives_up = time.monotonic() + 60
    while sampler.samples < 5 and time.monotonic() < gives_up:  # its budget is a share of the time
        busy_place(0.2)
    found = sampler.close()
    assert found["samples"] >= 5
    named = sum(
        stack["count"]
        for stack in found["stacks"]
        if any(frame[2] == "busy_place" for frame in stack["frames"])
    )
    assert named > found["samples"] / 2
    assert sum(stack["count"] for stack in found["stacks"]) == found["samples"]


def test_nothing_is_sampled_while_paused() -> None:
    sampler = Sampler(threading.get_ident(), 200)
    sampler.pause()
    time.sleep(0.1)
    before = sampler.samples
    busy_place(0.4)
    assert sampler.samples == before
    sampler.close()


def slow_place(seconds: float) -> None:
    busy_place(seconds)


def test_every_sample_knows_its_step() -> None:
    step = 7
    sampler = Sampler(threading.get_ident(), 200, lambda: step)
    gives_up = time.monotonic() + 60
    while sampler.samples < 4 and time.monotonic() < gives_up:
        busy_place(0.1)
    step, before = 8, sampler.samples
    while sampler.samples < before + 4 and time.monotonic() < gives_up:
        slow_place(0.1)
    content = sampler.close()
    steps, stacks = content["steps"]["number"], content["steps"]["stack"]
    assert content["steps"]["every"] == 1
    assert len(steps) == len(stacks) == content["samples"]
    assert set(steps) == {7, 8}
    for number, count in enumerate(stack["count"] for stack in content["stacks"]):
        assert stacks.count(number) == count
    functions = [{frame[2] for frame in stack["frames"]} for stack in content["stacks"]]
    slow = [
        step for step, stack in zip(steps, stacks, strict=True) if "slow_place" in functions[stack]
    ]
    assert set(slow) == {8}


def test_too_many_samples_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_SAMPLES", 100)
    samples = SampledSteps()
    for step in range(1000):
        samples.add(step, step % 2)
    content = samples.content([5, 9])
    assert content["every"] == 16
    assert content["number"] == list(range(15, 1000, 16))
    assert set(content["stack"]) == {9}


def test_samples_are_saved_now_and_then_for_a_job_that_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "FIRST_SAVE_S", 0.1)
    monkeypatch.setattr(sampling, "MOST_SAVE_S", 0.1)
    sampler = Sampler(threading.get_ident(), 200, lambda: 3)
    saved: list[dict[str, Any]] = []
    sampler.save = saved.append
    gives_up = time.monotonic() + 60
    while not (saved and saved[-1]["samples"]) and time.monotonic() < gives_up:
        busy_place(0.1)
    sampler.close()
    assert saved[-1]["steps"]["number"] == [3] * saved[-1]["samples"]


def test_a_short_run_gets_its_samples_from_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget alone gives a few samples in half a second; before the windows it is kept to."""
    monkeypatch.setattr(sampling, "BUDGET", 1e-5)
    step = 0
    sampler = Sampler(threading.get_ident(), 200, lambda: step, closely_from=20)
    busy_place(0.5)
    before = sampler.samples
    step = 20
    gives_up = time.monotonic() + 30
    while sampler.samples < before + 20 and time.monotonic() < gives_up:
        busy_place(0.2)
    sampler.close()
    assert before <= 5
    assert sampler.samples >= before + 20


def test_the_credit_is_spent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BUDGET", 1e-5)
    monkeypatch.setattr(sampling, "CREDIT_S", 5 * sampling.DISTURBANCE_S)
    sampler = Sampler(threading.get_ident(), 200)
    busy_place(1.0)
    sampler.close()
    assert sampler.samples <= 8


def deep(levels: int, seconds: float) -> None:
    if levels:
        deep(levels - 1, seconds)
    else:
        busy_place(seconds)


def users_code(seconds: float) -> None:
    deep(300, seconds)


def test_a_deep_stack_keeps_the_users_outermost_frames() -> None:
    """The compiler's stacks have hundreds of frames below the line that calls it."""
    thread = threading.Thread(target=users_code, args=(1.0,))
    thread.start()
    assert thread.ident is not None
    sampler = Sampler(thread.ident, 200)
    thread.join()
    stacks = [stack["frames"] for stack in sampler.close()["stacks"]]
    names = [frame[2] for frame in max(stacks, key=len)]
    assert len(names) <= sampling.DEEPEST
    assert "users_code" in names
    assert names.count("deep") > 10
