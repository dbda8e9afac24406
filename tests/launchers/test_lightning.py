"""Lightning on two hosts, each of which starts the script itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trainer_jobs import HERE, captured, check_ranks, end, free_port, losses, needs, start

pytestmark = pytest.mark.launchers
SCRIPT = str(HERE / "scripts" / "lightning_hosts.py")


def _hosts(folder: Path, command: tuple[str, ...]) -> list[str]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    hosts = [start(command, folder, meeting | {"NODE_RANK": str(place)}) for place in range(2)]
    return [end(host)[0] for host in hosts]


@needs("lightning")
def test_two_hosts_are_one_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    bare = _hosts(tmp_path, (sys.executable, SCRIPT))
    outputs = _hosts(tmp_path, captured(out, sys.executable, SCRIPT))
    assert losses(*outputs) == losses(*bare)
    assert len(losses(*bare)) == 36
    check_ranks(out, 2)
