"""Run folders of a parameter server that never ran: events worked out on paper, written as its
workers and shards write them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from stepscope.fix.server.membership import (
    Pull,
    PullServed,
    Push,
    ServerFacts,
    ShardFacts,
    UpdateApplied,
    event_line,
    shard_file,
    worker_file,
)
from stepscope.records.folders import SERVER_FILE, SERVER_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.fix.server.membership import ServerEvent
    from stepscope.records.change_values import Mode

MS = 1_000_000
BEGAN_NS = 1_790_000_000_000_000_000
PULL_NS, PUSH_NS = 2 * MS, 3 * MS
PARAMETER_BYTES = 4_000


def write_server(
    run: Path, mode: Mode, bound: int | None = None, shards: int = 1, replicas: int = 0
) -> Path:
    folder = run / SERVER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    facts = ServerFacts(
        mode=mode,
        bound=bound,
        shards=tuple(
            ShardFacts(shard=shard, tensors=1, size_bytes=PARAMETER_BYTES // shards)
            for shard in range(shards)
        ),
        replicas=replicas,
        optimizer="SGD",
        compression=None,
        deadline_s=10.0,
        started_unix_ns=BEGAN_NS,
    )
    (folder / SERVER_FILE).write_text(json.dumps(asdict(facts)))
    return folder


def write_events(file: Path, events: Sequence[ServerEvent]) -> None:
    file.write_text("".join(map(event_line, events)))


def write_run(
    run: Path,
    own_ms: Sequence[Sequence[float]],  # a row per step, a column per worker: compute alone
    *,
    mode: Mode = "strong",
    bound: int | None = 0,
    loss: bool = True,
) -> Path:
    """Workers that pull in 2 ms, compute, push in 3 ms, and are blocked as the consistency says."""
    folder = write_server(run, mode, bound)
    workers = len(own_ms[0])
    gap = bound if mode in ("strong", "bounded") else None
    done = [[BEGAN_NS] * workers]  # by clock: when each worker's push was done
    events: list[list[ServerEvent]] = [[] for _ in range(workers)]
    served: list[ServerEvent] = []
    for clock, row in enumerate(own_ms):
        ends = []
        for worker, ms in enumerate(row):
            asked = done[clock][worker]
            needed = done[max(0, clock - gap)] if gap is not None else [asked]
            start = max(asked, *needed)
            reached = [_clock_at(done, other, start) for other in range(workers) if other != worker]
            last = max(range(len(needed)), key=lambda place: needed[place])
            compute = round(ms * MS)
            push_at = start + PULL_NS + compute
            events[worker] += [
                Pull(
                    worker=worker,
                    life=0,
                    clock=clock,
                    at_unix_ns=asked,
                    blocked_ns=start - asked,
                    transfer_ns=PULL_NS,
                    size_bytes=PARAMETER_BYTES,
                    gap=max(0, clock - min(reached, default=clock)),
                    waited_for=last if start > asked else None,
                ),
                Push(
                    worker=worker,
                    life=0,
                    clock=clock,
                    at_unix_ns=push_at,
                    compute_ns=compute,
                    step=clock,
                    took_ns=PUSH_NS,
                    refused_ns=0,
                    size_bytes=PARAMETER_BYTES,
                    loss=1.0 / (clock + 1) if loss else None,
                ),
            ]
            common = {"shard": 0, "epoch": 1, "clock": clock, "queue": 1, "waited_ns": MS}
            name = f"{worker}.0"
            served += [
                PullServed(member=name, at_unix_ns=start, took_ns=MS, size_bytes=4_000, **common),
                UpdateApplied(update=0, members=(name,), at_unix_ns=push_at, took_ns=MS, **common),
            ]
            ends.append(push_at + PUSH_NS)
        done.append(ends)
    for worker, lines in enumerate(events):
        write_events(folder / worker_file(worker, 0), lines)
    write_events(folder / shard_file(0, 1), served)
    return run


def _clock_at(done: list[list[int]], worker: int, when: int) -> int:
    """How many pushes of this worker are done by then."""
    return sum(row[worker] <= when for row in done[1:])
