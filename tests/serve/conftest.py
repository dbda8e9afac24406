"""A served folder with runs of every kind, and clients that know the token or do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from served_folders import TOKEN
from served_here import serve_here
from stepscope.ui.serve.app import make_app
from stepscope.ui.serve.served_runs import ServedRuns


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


@pytest.fixture
def serve(root: Path) -> Iterator[Any]:
    """Serve the folder as it is now: the list is complete, and only `look` brings it up to date."""
    opened: list[ServedRuns] = []

    def start(*, token: bool = True, rebuild: bool = False) -> Any:
        served = serve_here(root, rebuild=rebuild)
        opened.append(served)
        client = TestClient(make_app(served, TOKEN), base_url="http://127.0.0.1:8763")
        client.served = served  # type: ignore[attr-defined]
        if token:
            client.get("/", params={"token": TOKEN})  # the browser keeps a cookie
        return client

    yield start
    for served in opened:
        served.close()
