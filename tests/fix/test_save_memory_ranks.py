"""save_memory under DDP and FSDP2, on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("save_memory_ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "inner", "fsdp"])
def test_two_ranks_train_as_without(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(SCRIPT), kind, str(tmp_path)],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["same less"] * 2
