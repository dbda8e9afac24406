"""Rows of the list in words, and which of them a search asks for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from stepscope.records.figures import milliseconds, percent, size
from stepscope.records.words import counted
from stepscope.ui.serve.run_index import ORDERS
from stepscope.ui.serve.run_summary import BROKEN, FAILED, OPEN, RUNNING
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepscope.ui.serve.run_index import IndexedRun

PER_PAGE = 1000
_TAG = "tag:"
_TONES = {RUNNING: "running", FAILED: "bad", BROKEN: "bad", OPEN: "open"}
_HEADS = (
    ("Run", "name"),
    ("State", "state"),
    ("Verdict", None),
    ("Step", "step_ms"),
    ("MFU", "mfu"),
    ("Memory", "peak_bytes"),
    ("Device", "device"),
    ("Script", "script"),
    ("Started", "started_unix"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """What of the list is asked for, as in the page's address."""

    search: str = ""
    order: str = "started_unix"
    descending: bool = True
    page: int = 1

    @classmethod
    def from_address(cls, given: Mapping[str, str]) -> ListQuery:
        """Anything odd is as if it were not given."""
        order = given.get("sort", "")
        page = given.get("page", "1")
        return cls(
            search=given.get("q", "")[:200],
            order=order if order in ORDERS else "started_unix",
            descending=given.get("down", "1") != "0",
            page=int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 6 else 1,
        )

    def address(self, **changes: Any) -> str:
        given = {
            "q": self.search,
            "sort": self.order,
            "down": int(self.descending),
            "page": self.page,
        } | changes
        return f"/?{urlencode(given, errors='replace')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWords:
    """One run as the pages print it."""

    id: str
    name: str
    kind: str
    state: str
    tone: str
    verdict: str
    problem: str
    step: str
    mfu: str
    memory: str
    device: str
    script: str
    script_path: str
    trend: str
    started: str
    command: str
    tags: tuple[str, ...]
    comparable: bool


def describe(run: IndexedRun, tags: tuple[str, ...] = ()) -> RunWords:
    state = run.state or "being read"
    ranks = f" × {run.world_size}" if run.world_size and run.world_size > 1 else ""
    return RunWords(
        id=run.id,
        name=run.name,
        kind=run.kind,
        state="tune" if run.kind == "tune" and state != BROKEN else state,
        tone=_TONES.get(state, "done"),
        verdict=run.verdict or _without_verdict(run),
        problem=run.problem or "",
        step=or_dash(run.step_ms, milliseconds),
        mfu=or_dash(run.mfu, percent),
        memory=or_dash(run.peak_bytes, size),
        device=f"{run.device}{ranks}" if run.device else "-",
        script=Path(run.script).name if run.script else "",
        script_path=run.script or "",
        trend=trend_address(run) if has_trend(run) else "",
        started=when(run.started_unix),
        command=run.command or "",
        tags=tags,
        comparable=run.kind == "run" and not (run.step_ms is None and run.verdict is None),
    )


def _without_verdict(run: IndexedRun) -> str:
    if run.state == RUNNING:
        return "training: its page shows it live"
    return run.problem or ("" if run.explained else "…")


def has_trend(run: IndexedRun) -> bool:
    """Whether the page of its series has a place for this run."""
    return run.kind == "run" and bool(run.script and run.step_ms)


def trend_address(run: IndexedRun) -> str:
    """The runs that this one can be compared with: same script, device and ranks."""
    series = {
        "script": run.script or "",
        "device": run.device or "",
        "ranks": run.world_size or 1,
    }
    return f"/trends?{urlencode(series, errors='replace')}"


def compare_address(a: IndexedRun, b: IndexedRun, page: str = "/compare") -> str:
    return f"{page}?{urlencode({'a': a.id, 'b': b.id})}"


def when(unix: float | None) -> str:
    """Local time, to the minute."""
    if unix is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    except (OverflowError, ValueError, OSError):  # a clock that is off by ages
        return "-"


def matching(
    runs: Iterable[IndexedRun], search: str, tags: Mapping[str, tuple[str, ...]]
) -> list[IndexedRun]:
    """Runs that hold every word; tag:NAME asks for the whole tag."""
    words = search.lower().split()
    wanted = {word.removeprefix(_TAG) for word in words if word.startswith(_TAG)}
    words = [word for word in words if not word.startswith(_TAG)]
    if not words and not wanted:
        return list(runs)
    return [
        run
        for run in runs
        if wanted <= {word for tag in tags.get(run.id, ()) for word in tag.lower().split()}
        and _holds(run, tags.get(run.id, ()), words)
    ]


def _holds(run: IndexedRun, tags: tuple[str, ...], words: Iterable[str]) -> bool:
    parts = (run.name, run.script, run.verdict, run.device, run.state, run.problem, run.id, *tags)
    text = "\n".join(part for part in parts if part).lower()
    return all(word in text for word in words)


def list_context(
    runs: list[IndexedRun], query: ListQuery, tags: Mapping[str, tuple[str, ...]], waiting: int
) -> dict[str, Any]:
    """What rows.html.j2 prints: one page of the runs that the query asks for."""
    found = matching(runs, query.search, tags)
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(query.page, pages)
    shown = found[(page - 1) * PER_PAGE : page * PER_PAGE]
    return {
        "rows": [describe(run, tags.get(run.id, ())) for run in shown],
        "heads": [_head(name, column, query) for name, column in _HEADS],
        "pages": [
            (number, query.address(page=number), number == page) for number in range(1, pages + 1)
        ],
        "summary": _summary(len(runs), len(found), waiting),
    }


def _head(name: str, column: str | None, query: ListQuery) -> tuple[str, str | None, str | None]:
    if column is None:
        return name, None, None
    is_sorted = column == query.order
    descending = not query.descending if is_sorted else column not in ("name", "script", "state")
    direction = "descending" if query.descending else "ascending"
    target = query.address(sort=column, down=int(descending), page=1)
    return name, target, direction if is_sorted else None


def _summary(runs: int, found: int, waiting: int) -> str:
    if not runs:
        return "No run yet: `stepscope run -- COMMAND` makes one."
    words = counted(runs, "run") if found == runs else f"{found:,} of {counted(runs, 'run')}"
    return f"{words}; {waiting:,} still being read" if waiting else words


def run_json(run: IndexedRun, tags: tuple[str, ...]) -> dict[str, Any]:
    """One row of /runs.json."""
    return {
        "id": run.id,
        "name": run.name,
        "kind": run.kind,
        "state": run.state,
        "script": run.script,
        "command": run.command,
        "started_unix": run.started_unix,
        "device": run.device,
        "world_size": run.world_size,
        "step_ms": run.step_ms,
        "low_ms": run.low_ms,
        "high_ms": run.high_ms,
        "steps": run.steps,
        "mfu": run.mfu,
        "peak_bytes": run.peak_bytes,
        "verdict": run.verdict,
        "problem": run.problem,
        "tags": list(tags),
    }
