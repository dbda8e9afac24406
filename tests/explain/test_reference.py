"""Every number of the timeline on every real trace, against a plain second implementation."""

from __future__ import annotations

from pathlib import Path

from stepscope import explain_rank, read_trace

from .reference import account_for


def test_every_nanosecond_is_where_the_plain_reference_puts_it(unlike_trace: Path) -> None:
    ours = explain_rank(read_trace(unlike_trace, cache=False))
    theirs = account_for(unlike_trace)
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
