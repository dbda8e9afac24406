"""--collect, in the ranks: where the first host's `stepscope run` listens goes to all hosts.

Rank 0 publishes it in the job's own store. The first rank of every other host reads it there after
a window and leaves it in its run folder, for its own `run`. Both happen in a thread that nobody
waits for: a store may be busy with the script's own calls.

The token for it goes the same way. Whoever reaches the job's store can read it there, as they can
change what the job itself keeps in it; the file in the run folder is its owner's alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from stepscope.measure import folder as layout
from stepscope.measure.cluster.clock_meeting import own_addresses
from stepscope.measure.never_raise import never_raise
from stepscope.measure.settings import Settings
from stepscope.measure.writer import started_thread
from stepscope.records.folders import COLLECTOR, HOSTS

_KEY = "stepscope/collector"
_MOST_BYTES = 4096


class Rendezvous:
    """One rank's part in it; does nothing without --collect."""

    def __init__(self, run: Path, rank: int) -> None:
        settings = Settings.from_environment()
        self._port = settings.collect_port if settings is not None else 0
        self._token = settings.collect_token if settings is not None else ""
        self._file = run / HOSTS / COLLECTOR
        self._publishes = bool(self._port) and rank == 0
        first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        self._looks = bool(self._port) and rank != 0 and first_here

    def publish(self) -> None:
        if self._publishes:
            started_thread(self._publish, "stepscope-collect")

    def look(self) -> None:
        if self._looks:
            started_thread(self._look, "stepscope-collect")

    @never_raise
    def _publish(self) -> None:
        store = _job_store()
        if store is None:
            return
        where = {
            "hosts": own_addresses(store, is_root=True),
            "host": socket.gethostname(),
            "port": self._port,
            "token": self._token,
        }
        store.set(_KEY, json.dumps(where))

    @never_raise
    def _look(self) -> None:
        store = _job_store()
        if store is None or not store.check([_KEY]):
            return
        where = json.loads(store.get(_KEY)[:_MOST_BYTES])
        self._looks = False
        self._file.parent.mkdir(exist_ok=True)
        layout.write_json(self._file, where, mode=0o600)


def _job_store() -> Any | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
