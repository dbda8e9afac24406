"""How folders that say little about themselves are listed: never as a run that ended well."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from served_folders import add_run
from shared_traces import GOLDEN


def _listed(client: Any) -> dict[str, Any]:
    while client.served.keeper.explain_next():
        pass
    return {row["name"]: row for row in client.get("/runs.json").json()["runs"]}


def _rank(root: Path, name: str) -> Path:
    rank = root / name / "rank-00000"
    rank.mkdir(parents=True)
    return rank


def test_only_a_command_or_readable_traces_make_a_finished_run(serve: Any, root: Path) -> None:
    (root / "no-facts").mkdir()
    (root / "no-facts" / "run.json").write_text('{"schema": 1}')
    _rank(root, "empty-rank")
    (_rank(root, "damaged-trace") / "trace.json.gz").write_bytes(b"\x1f\x8bno gzip")
    shutil.copy(GOLDEN / "cpu_step.json.gz", _rank(root, "traces") / "trace.json.gz")
    add_run(root, "ended")
    listed = _listed(serve())
    assert {name: row["state"] for name, row in listed.items()} == {
        "no-facts": "broken",
        "empty-rank": "broken",
        "damaged-trace": "broken",
        "traces": "finished",
        "ended": "finished",
    }
    assert "does not say how it ended" in listed["no-facts"]["problem"]
    assert "holds no trace" in listed["empty-rank"]["problem"]
    assert listed["empty-rank"]["device"] is None


def test_a_name_that_is_no_utf_8_breaks_no_page(serve: Any, root: Path) -> None:
    add_run(root, b"bad-\xff")
    client = serve()
    (run,) = _listed(client).values()
    for part in ("", "/report", "/predictions"):
        answer = client.get(f"/runs/{run['id']}{part}")
        assert answer.status_code in (200, 422), part
        assert "a defect in stepscope" not in answer.text
