"""Gradients in turn over two links between two hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import Lab

SCRIPT = Path(__file__).parents[2] / "benchmarks/workloads/two_links.py"
SMALL = ("--layers=6", "--width=128", "--pause-ms=0", "--bucket-mb=0.05", "--steps=3", "--rounds=2")
GRADIENT_BYTES = 6 * 4 * (128 * 128 + 128)  # sent once by each of two ranks
STEPS = 6


@pytest.mark.slow
def test_half_of_the_bytes_take_the_second_link_and_no_loss_changes() -> None:
    with Lab(hosts=2, links=2) as lab:
        for link in range(2):
            lab.shape("node0", "200mbit", link=link)
        job = lab.torchrun([str(SCRIPT), *SMALL])
        outcomes = [process.wait() for process in job.values()]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].stderr
    found = json.loads(outcomes[0].stdout.splitlines()[-1])
    plain, both, one = (found[name] for name in ("plain", "several links", "one link"))
    assert plain["losses"] == both["losses"] == one["losses"]
    assert len(plain["losses"]) == STEPS + 2
    assert both["sent_bytes"]["eth1"] > 0.4 * STEPS * GRADIENT_BYTES
    assert both["sent_bytes"]["eth0"] < 0.7 * plain["sent_bytes"]["eth0"]
    for alone in (plain, one):
        assert alone["sent_bytes"]["eth0"] > STEPS * GRADIENT_BYTES
        assert alone["sent_bytes"]["eth1"] < 0.01 * STEPS * GRADIENT_BYTES
