"""Two real ranks of which one records a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from two_ranks import run_ranks

from stepscope.explain.explain_job import explain_job

TRAIN = """
import stepscope
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
with stepscope.watch({folder!r}, ranks={ranks!r}, wait=3, warmup=1, active=2, on_stall=True) as run:
    for step in range(14):
        loss = model(torch.ones(4, 8) * step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.step()
answer["losses"] = losses
"""


def train(folder: Path, ranks: str) -> tuple[Path, list[list[float]]]:
    folder.mkdir()
    answers = run_ranks(folder, TRAIN.format(folder=str(folder / "run"), ranks=ranks))
    losses = [answer["losses"] for answer in answers if answer is not None]
    return folder / "run", losses


def facts(run: Path, rank: int) -> dict[str, object]:
    facts: dict[str, object] = json.loads((run / f"rank-{rank:05d}" / "rank.json").read_text())
    return facts


def test_one_of_two_ranks_is_traced_and_both_are_explained(tmp_path: Path) -> None:
    run, losses = train(tmp_path / "first", "0,7-9")
    assert losses == train(tmp_path / "all", "all")[1]
    names = {path.name for path in (run / "rank-00001").iterdir()}
    assert {"rank.json", "steps.jsonl", "clock.json"} <= names
    assert not names & {"trace.json.gz", "memory.json", "samples.json", "comms.jsonl"}
    assert (run / "rank-00000" / "trace.json.gz").exists()
    assert facts(run, 0)["trace"] == {"chosen": True, "ranks": "listed"}
    assert facts(run, 1)["trace"] == {"chosen": False, "ranks": "listed"}
    assert "ranks: --ranks names 7-9, but the job has 2 ranks" in str(facts(run, 0)["problems"])
    assert "--ranks" not in str(facts(run, 1)["problems"])

    meetings = [json.loads((run / f"rank-{n:05d}" / "clock.json").read_text()) for n in (0, 1)]
    labels = [[(sync["label"], sync["step"]) for sync in one["syncs"]] for one in meetings]
    assert labels[0] == labels[1]
    assert labels[0]

    explanation = explain_job(run, cache=False)
    assert [rank.rank for rank in explanation.ranks] == [0]
    assert explanation.without_trace is not None
    assert explanation.without_trace.ranks == ((1, 1),)
    assert explanation.run is not None
    assert {one.rank: one.steps for one in explanation.run.ranks} == {0: 14, 1: 14}


@pytest.mark.parametrize("ranks", ["x", "5-1"])
def test_a_script_with_a_list_that_is_none_trains_and_all_are_traced(
    tmp_path: Path, ranks: str
) -> None:
    run, losses = train(tmp_path / "odd", ranks)
    assert len(losses) == 2
    assert (run / "rank-00001" / "trace.json.gz").exists()
    assert f"--ranks {ranks}" in str(facts(run, 0)["problems"])
