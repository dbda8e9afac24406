"""Tiny traces made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest

from stepscope import explain_rank, read_trace
from stepscope.records.explanation import RankExplanation
from stepscope.records.trace import Trace

from . import build


class Read(Protocol):
    def __call__(self, *events: build.Events, **head: Any) -> Trace: ...


class Explain(Protocol):
    def __call__(self, *events: build.Events, **head: Any) -> RankExplanation: ...


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Events -> a file -> a Trace."""

    def reading(*events: build.Events, **head: Any) -> Trace:
        return read_trace(build.write(tmp_path / "trace.json", *events, **head), cache=False)

    return reading


@pytest.fixture
def explained(read: Read) -> Explain:
    """Events -> a file -> everything explained."""

    def explaining(*events: build.Events, **head: Any) -> RankExplanation:
        return explain_rank(read(*events, **head))

    return explaining
