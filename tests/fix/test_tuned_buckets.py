"""`run --with tuned-buckets`: DDP's buckets tuned inside the run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from ddp_scripts import PLAIN
from injected import run_injected

from stepscope.errors import UsageError
from stepscope.fix.named_changes import choose, choose_all
from stepscope.fix.proposal import Script
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

DDP = Built(kind="ddp", type="DistributedDataParallel", options={}, given=(), frames=())
FACTS = ScriptFacts(device="cpu", built=(DDP,), world_size=2)
LONGER = PLAIN.replace("range(20)", "range(64)").replace("step == 5", "step == 63")


def test_tune_leaves_it_to_a_whole_run() -> None:
    fits = choose("tuned-buckets").fix.fits
    assert "stepscope run --with tuned-buckets" in (fits(FACTS, "") or "")
    assert "a single rank" in (fits(replace(FACTS, world_size=1), "") or "")
    proposal = choose("tuned-buckets").fix.patch(Script(FACTS, lambda _file: None), "")
    assert "tune_buckets(model, optimizer)" in proposal.by_hand[0]
    with pytest.raises(UsageError, match="Choose one"):
        choose_all(["tuned-buckets", "bucket-mb=50"])


@pytest.mark.slow
def test_a_run_tunes_its_buckets_and_trains_the_same(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, LONGER, steps=64, ranks=2)
    tuned = run_injected(tmp_path, LONGER, "tuned-buckets", steps=64, ranks=2)
    assert tuned.refused == {}
    _, verdict = tuned.did["tuned-buckets"]
    assert verdict.startswith("buckets ")
    assert tuned.losses == plain.losses
    assert len(tuned.losses) >= 60


@pytest.mark.slow
def test_a_hook_of_the_script_is_left_alone(tmp_path: Path) -> None:
    hooked = PLAIN.replace(
        "optimizer = ",
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
        "model.register_comm_hook(None, allreduce_hook)\noptimizer = ",
    )
    run = run_injected(tmp_path, hooked, "tuned-buckets", ranks=2)
    assert "a communication hook is registered" in run.refused["tuned-buckets"]
    assert run.did["tuned-buckets"] == []
