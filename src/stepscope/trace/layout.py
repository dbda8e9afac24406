"""Names in a folder of traces: which may be traces, and which lie next to one in a run folder."""

from __future__ import annotations

ENDINGS = (".json", ".json.gz", ".json.zst", ".sqlite")
# The files that capture writes next to a rank's trace and `explain` reads.
SIDE_FILES = ("steps.jsonl", "clock.json", "rank.json", "comms.jsonl", "memory.json")
_NOT_TRACES = frozenset((*SIDE_FILES, "run.json", "samples.json"))


def is_trace_name(name: str) -> bool:
    return name.endswith(ENDINGS) and name not in _NOT_TRACES
