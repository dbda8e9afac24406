"""Every number of the timeline on every real trace, against a plain second implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stepscope import explain_rank, read_trace

from .conftest import TRACES
from .reference import account_for

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(TRACES.glob("*/*.json.gz"))


@pytest.mark.skipif(not FILES, reason="no real traces beside the repository (../shared/traces)")
def test_all_real_traces_are_compared() -> None:
    assert len(FILES) == 28


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
def test_every_nanosecond_is_where_the_plain_reference_puts_it(path: Path) -> None:
    ours, theirs = explain_rank(read_trace(path, cache=False)), account_for(path)
    timeline, idle = ours.timeline, ours.idle
    assert {
        "span": timeline.span_ns,
        "compute": timeline.compute_ns,
        "exposed_comm": timeline.exposed_comm_ns,
        "exposed_memory": timeline.exposed_memory_ns,
        "idle": timeline.idle_ns,
    } == theirs.timeline_ns
    assert {
        "host": idle.host_ns,
        "launch": idle.launch_ns,
        "other": idle.other_ns,
    } == theirs.idle_ns
    assert timeline.comm_ns == theirs.comm_ns
    assert timeline.memory_ns == theirs.memory_ns
    assert timeline.hidden_comm_ns == theirs.hidden_comm_ns
    overlap = theirs.hidden_comm_ns / theirs.comm_ns if theirs.comm_ns else None
    assert timeline.overlap == overlap
    assert {(k.name, k.kind): (k.count, k.total_ns) for k in ours.kernels} == theirs.kernels
    assert ours.launches.unlinked == theirs.unlinked
