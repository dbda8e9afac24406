"""Real processes: those that share memory are named, those that train apart are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.explain.explain_job import explain_job
from stepscope.records.explanation import Explanation

SCRIPTS = Path(__file__).parent / "scripts"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def explained(tmp_path: Path, script: str, *launcher: str) -> Explanation:
    out = tmp_path / "run"
    window = ["--wait", "4", "--warmup", "1", "--active", "3", "--no-explain", "--out", str(out)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stepscope", "run", *window, "--"),
            *(sys.executable, *launcher, str(SCRIPTS / script)),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return explain_job(out, cache=False)


def test_processes_that_share_a_model_are_named_and_not_accused(tmp_path: Path) -> None:
    found = explained(tmp_path, "hogwild.py")
    assert [rank.called for rank in found.ranks] == ["process 1", "process 2"]
    (told,) = (each for each in found.findings if each.id == "not-training-together")
    assert (told.severity, told.title) == ("none", "Shared memory")
    assert "duplicate-ranks" not in {note.id for note in found.quality}


@pytest.mark.slow
def test_ranks_that_only_sum_their_loss_do_not_train_together(tmp_path: Path) -> None:
    found = explained(tmp_path, "apart.py", *TWO_RANKS)
    assert found.findings[0].id == "not-training-together"
    assert found.verdict.startswith(
        "Ranks do not train together: The 2 ranks exchange no gradients"
    )
    assert found.why == "a step exchanges 4 B, but 263 kB of parameters are trained"
