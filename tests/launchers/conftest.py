"""Fixtures for tests under real launchers; they skip where a launcher is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import BIN, SCRIPT, Launched
from slurm_cluster import SlurmCluster, why_not_here


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes, ss1 and ss2."""
    reason = why_not_here()
    if reason:
        pytest.skip(reason)
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def bare_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """What a job of so many ranks prints without stepscope."""
    known: dict[int, list[str]] = {}

    def of(ranks: int) -> list[str]:
        if ranks not in known:
            folder: Path = tmp_path_factory.mktemp("bare")
            torchrun = (str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", SCRIPT)
            run = Launched.start(folder, torchrun, {})
            assert run.wait() == 0, run.stderr
            known[ranks] = run.stdout
        return known[ranks]

    return of
