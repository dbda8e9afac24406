"""Stacks of one thread, counted without stopping it."""

from __future__ import annotations

import threading
import time

from stepscope.measure.sampler import Sampler


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
