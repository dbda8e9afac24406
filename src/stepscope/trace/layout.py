"""Names in a folder of traces: which may be traces, and which lie next to one in a run folder."""

from __future__ import annotations

import re

from stepscope.records.packed_steps import TAIL, part_number
from stepscope.records.saved_memory import FILE as SAVED_MEMORY

ENDINGS = (".json", ".json.gz", ".json.zst", ".sqlite")
# The files that capture writes next to a rank's trace and `explain` reads; see is_side_file.
SIDE_FILES = (TAIL, "clock.json", "links.json", "rank.json", "comms.jsonl", "memory.json")
_MORE_SIDE_FILES = ("samples.json", "compiler.jsonl", "graphs.jsonl", SAVED_MEMORY)
# What else stepscope writes into its folders.
_OTHER_FILES = (
    *("run.json", "lines.json", "probe.json", "script.json", "trial.json", "losses.json"),
    *("window-request.json", "tune.json", "bench.json", "ab.json"),
)
_NOT_TRACES = frozenset((*SIDE_FILES, *_MORE_SIDE_FILES, *_OTHER_FILES))
_COLLECTIVES = re.compile(r"collectives-[^/]*\.json\.gz")


def is_trace_name(name: str) -> bool:
    return name.endswith(ENDINGS) and name not in _NOT_TRACES and not _is_part(name)


def is_side_file(name: str) -> bool:
    """Whether `explain` reads it next to a trace: one of SIDE_FILES, or a part of a long list."""
    return name in (*SIDE_FILES, *_MORE_SIDE_FILES) or _is_part(name)


def _is_part(name: str) -> bool:
    return part_number(name) is not None or _COLLECTIVES.fullmatch(name) is not None
