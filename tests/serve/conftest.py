"""A served folder with runs of every kind, and clients that know the token or do not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from browsing import browser  # noqa: F401
from served_folders import TOKEN
from stepscope.ui.serve.app import make_app
from stepscope.ui.serve.served_runs import ServedRuns
from stepscope.ui.serve.worker_process import read_answer
from stepscope.ui.serve_worker.__main__ import answer


@pytest.fixture(autouse=True)
def tags_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stepscope-tags"
    monkeypatch.setenv("STEPSCOPE_TAGS", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


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


@pytest.fixture
def serve(root: Path) -> Iterator[Any]:
    """Serve the folder as it is now: the list is complete, and only `look` brings it up to date."""
    opened: list[ServedRuns] = []

    def start(*, token: bool = True, rebuild: bool = False) -> Any:
        served = replace(ServedRuns.of_folder(root, rebuild=rebuild), pool=PoolHere())
        served.keeper.worker = served.keeper.explainer = WorkerHere()
        opened.append(served)
        served.keeper.look()
        served.keeper.summarise_changed()
        client = TestClient(make_app(served, TOKEN), base_url="http://127.0.0.1:8763")
        client.served = served  # type: ignore[attr-defined]
        if token:
            client.cookies.set("stepscope", TOKEN)
        return client

    yield start
    for served in opened:
        served.close()
