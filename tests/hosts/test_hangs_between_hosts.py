"""A link between two hosts breaks while they train: the network is named, no line of a rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from jobs_on_hosts import capture
from lab import Lab

from verb_process import run_verb

SCRIPT = Path(__file__).parents[1] / "hang/hanging.py"
_LIMIT_S = 90.0


@pytest.mark.parametrize("host", ["node0", "node1"])
def test_a_cut_link_is_named(lab: Lab, tmp_path: Path, host: str) -> None:
    out = tmp_path / "run"
    job = lab.torchrun(
        [str(SCRIPT), "nothing", "2"],
        env={"STEPS": "100000"},
        around=capture(out, "--hang-after", "3s"),
    )
    job["node0"].wait_for_line("loss 0 30")
    lab.unplug(host)
    cut = time.monotonic()
    while "More: stepscope hang" not in job["node0"].stderr():
        assert time.monotonic() - cut < _LIMIT_S, job["node0"].stderr()
        time.sleep(0.2)
    done = run_verb("hang", out, "--json")
    answer = json.loads(done.stdout)
    assert (answer["kind"], answer["ranks"]) == ("unreachable", [0, 1]), answer
