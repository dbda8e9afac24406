"""A served folder whose workers' jobs are done in the test's own process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.ui.serve.served_runs import ServedRuns, read_answer
from stepscope.ui.serve.worker import answer


class WorkerHere:
    """Does a worker's jobs in the test's own process: test_serve_process.py has real ones."""

    def ask(self, limit_s: float, /, **job: Any) -> dict[str, Any]:
        del limit_s
        return read_answer(json.dumps(answer(json.dumps(job).encode())).encode())

    def close(self) -> None:
        pass


class PoolHere(WorkerHere):
    @contextlib.contextmanager
    def worker(self) -> Iterator[WorkerHere]:
        yield self


def serve_here(root: Path, *, rebuild: bool = False) -> ServedRuns:
    """The folder as it is now, with a complete list."""
    served = replace(ServedRuns.of_folder(root, rebuild=rebuild), pool=PoolHere())
    served.keeper.worker = served.keeper.explainer = WorkerHere()
    served.keeper.look()
    served.keeper.summarise_changed()
    return served
