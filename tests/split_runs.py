"""A run folder taken apart into one folder per host, as separate disks would have it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def split_run(run: Path, into: Path) -> list[Path]:
    """One folder per file in hosts/; each closes its own part, and lists its own ranks."""
    whole = json.loads((run / "run.json").read_text())
    ranks = {rank: _read(rank / "rank.json") for rank in sorted(run.glob("rank-*"))}
    parts = []
    for file in sorted((run / "hosts").glob("*.json")):
        host = _read(file)
        part = into / host["host"]
        (part / "hosts").mkdir(parents=True)
        shutil.copy(file, part / "hosts")
        own = {rank for rank, facts in ranks.items() if facts["host"] == host["host"]}
        for rank in own:
            shutil.copytree(rank, part / rank.name)
        names = {rank.name for rank in own}
        about = {
            **{name: host[name] for name in ("started_unix", "ended_unix", "exit_code", "command")},
            "ranks": [rank for rank in whole["ranks"] if rank["folder"] in names],
            "hosts": [one for one in whole["hosts"] if one["host"] == host["host"]],
        }
        (part / "run.json").write_text(json.dumps({**whole, **about}))
        parts.append(part)
    return parts


def without_paths(value: Any) -> Any:
    """An answer of explain --json without the names of files."""
    if isinstance(value, dict):
        return {
            name: without_paths(inner)
            for name, inner in value.items()
            if name not in ("path", "files")
        }
    return [without_paths(inner) for inner in value] if isinstance(value, list) else value


def _read(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text())
    return record


BEGAN_S = {0: 1794784053.0, 1: 1794784051.0}  # node1 came first, and ended first
ENDED_S = {0: 1794784078.0, 1: 1794784076.5}


def two_host_run(golden: Path, into: Path, **more: Any) -> Path:
    """The recorded job of two ranks, as two hosts with a shared disk would have left it."""
    shutil.copytree(golden / "cpu-two-ranks", into)
    whole = _read(into / "run.json")
    (into / "hosts").mkdir()
    for place in (0, 1):
        host = {
            "stepscope": "0.1.0",
            "job": "torchrun g",
            "place": place,
            "places": 2,
            "host": f"node{place}",
            "status": "finished",
            "exit_code": 0,
            "command": whole["command"],
            "started_unix": BEGAN_S[place],
            "ended_unix": ENDED_S[place],
            **more,
        }
        (into / "hosts" / f"{place:05d}.json").write_text(json.dumps(host))
        change_rank(into / f"rank-{place:05d}", host=f"node{place}", pid=100 + place)
    whole |= {"hosts": [{"host": "node0"}, {"host": "node1"}]}
    (into / "run.json").write_text(json.dumps(whole))
    return into


def change_rank(folder: Path, **facts: Any) -> None:
    file = folder / "rank.json"
    file.write_text(json.dumps({**_read(file), **facts}))


def change_host(run: Path, place: int, **facts: Any) -> None:
    file = run / "hosts" / f"{place:05d}.json"
    file.write_text(json.dumps({**_read(file), **facts}))
