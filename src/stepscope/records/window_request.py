"""A window that somebody asks a running job for: the files through which both sides talk.

Whoever wants a window writes REQUEST into the run folder. The first rank that sees it chooses the
steps and writes the plan; every rank records those steps.
"""

from __future__ import annotations

import re

REQUEST = "window-request.json"  # {"schema", "id", "asked_unix"}
SCHEMA = 1
ID = re.compile(r"[0-9a-f]{16}")


def plan_name(request: str) -> str:
    """{"schema", "id", "first", "warmup", "active", "refused"} for the request with this id."""
    return f"window-{request}.json"


def step_trace(first_active: int) -> str:
    """The trace of a window that has a file of its own."""
    return f"trace-step-{first_active}.json.gz"
