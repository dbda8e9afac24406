"""For scripts of different make: several remedies at once, injected and as a patch that `patch -p1`
made, train the same to the last bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from script_files import SCRIPTS

from stepscope.fix.named_changes import choose_all
from stepscope.ui.tune.patch import make_patch

sys.path.append(str(Path(__file__).parents[1] / "fix"))
from injected import run_injected

pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="no patch program here")

REMEDIES = {
    "plain_loop": ["bf16", "fused-optimizer", "gc-freeze", "flush-denormal"],
    "trainer_class": ["foreach-optimizer", "loader-workers=1"],
    "hooks": ["bf16", "fused-optimizer", "loader-workers=1"],
    "two_ranks": ["bf16", "fused-optimizer", "bucket-view", "bucket-mb=1"],
    "accumulates": ["sync-once=4", "bf16", "first-bucket-mb=0.1"],
    "convolutions": ["bf16", "fused-optimizer", "set-to-none"],
    "slow_loader": ["loader-workers=2", "prefetch-factor=4"],
    "own_autocast": ["foreach-optimizer", "gc-freeze"],
    "mis_threaded": ["threads=1", "fused-optimizer"],
    "healthy": ["gc-freeze", "flush-denormal"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "plain_loop" else pytest.mark.slow)
        for name in REMEDIES
    ],
)
def test_injected_and_patched_train_the_same(tmp_path: Path, name: str) -> None:
    script, remedies = SCRIPTS[name], REMEDIES[name]
    how = {"steps": 8, "ranks": script.ranks}
    plain = run_injected(tmp_path, script.text, **how)
    injected = run_injected(tmp_path, script.text, *remedies, **how)
    assert not injected.refused
    assert all(injected.did[remedy] for remedy in remedies), injected.did

    path = plain.folder.parent / "train.py"
    patch = make_patch(plain.facts, choose_all(remedies), path.parent)
    assert patch.diff is not None
    assert not patch.by_hand, (patch.by_hand, patch.diff)
    done = subprocess.run(
        ["patch", "-p1"], cwd=patch.root, input=patch.diff, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    patched = run_injected(tmp_path, path.read_text(), **how, variables=patch.variables)
    assert len(patched.losses) >= 8
    assert patched.losses == injected.losses, patch.diff
