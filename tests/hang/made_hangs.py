"""Run folders as ranks leave them when no step ends, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTICED = 1_790_000_000.0
GROUP = {"name": "0", "description": "default_pg", "backend": "gloo"}


def write_run(folder: Path, records: list[dict[str, Any]], **run: Any) -> Path:
    """A rank's folder for each record."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"status": "running", "hang_after": 30.0, **run}))
    for record in records:
        rank = folder / f"rank-{record['rank']:05d}"
        rank.mkdir()
        (rank / "hang.json").write_text(json.dumps(record))
        facts = {"rank": record["rank"], "world_size": len(records), "status": "running"}
        (rank / "rank.json").write_text(json.dumps(facts))
    return folder


def frame(line: int, *, file: str = "/job/train.py", text: str = "", own: bool = True) -> Any:
    function = "main" if own else "all_reduce"
    return {"file": file, "line": line, "function": function, "own": own, "text": text}


LIBRARY = "/site-packages/torch/distributed/distributed_c10d.py"


def in_collective(
    rank: int, ranks: int, *, sequence: int = 441, group: str = "0", kind: str = "all_reduce"
) -> dict[str, Any]:
    """A rank that waits in this collective of the group."""
    frames = [frame(3_000, file=LIBRARY, own=False), frame(31, text="loss.backward()")]
    last = {"kind": kind, "group": group, "sequence": sequence, "input_sizes": [[4]]}
    last |= {"created_ns": round(NOTICED * 1e9) - 10**9, "ended": False, "dtype": "float32"}
    return record(rank, ranks, frames, last=[last], reached={group: {"entered": sequence}})


def elsewhere(rank: int, ranks: int, *, sequence: int = 440, **more: Any) -> dict[str, Any]:
    """A rank that has not come so far."""
    frames = [frame(88, file="/job/data.py", text="time.sleep(1000)")]
    call = {"call": "clock_nanosleep", **more.pop("thread", {})}
    reached = {"0": {"entered": sequence, "ended": sequence}}
    return record(rank, ranks, frames, reached=reached, thread=call, **more)


def record(
    rank: int,
    ranks: int,
    frames: list[Any],
    *,
    last: list[Any] | None = None,
    reached: dict[str, Any] | None = None,
    thread: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    main = {"name": "MainThread", "trains": True, "state": "S", "call": "futex", **(thread or {})}
    groups = [{**GROUP, "name": name, "size": ranks, "ranks": list(range(ranks))} for name in "01"]
    return {
        "schema": 1,
        "rank": rank,
        "world_size": ranks,
        "noticed_unix": NOTICED,
        "suspects": True,
        "silent_s": 31.0,
        "phase": "forward",
        "step": 220,
        "threads": [{**main, "frames": frames}],
        "collectives": {"groups": groups, "reached": reached or {}, "last": last or []},
        **more,
    }
