"""What `explain --json` says of a run, as far as loggers read it."""

from __future__ import annotations

from typing import Any

EXPLAINED: dict[str, Any] = {
    "verdict": "Waiting for data:\n my_model waits <b>",
    "why": "40 of 100 ms",
    "next": "more *workers*",
    "budget": {"step_ms": 100.0, "parts": [{"id": "compute", "ms": 60.0, "share": 0.6}]},
    "findings": [{"id": "data-loading", "share": 0.4, "summary": "x | y"}],
    "ranks": [{"efficiency": None, "memory": {"peak_bytes": 7}}],
}
