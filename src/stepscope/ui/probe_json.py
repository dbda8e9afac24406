"""`probe --json` and `library --json`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.predict.operator_library import library_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.operator_times import OperatorTime
    from stepscope.records.probe_report import ProbeReport


def probe_json(report: ProbeReport) -> dict[str, Any]:
    body = msgspec.to_builtins(report)
    return {"schema": 1, **body, "difference": report.difference, "library": str(library_file())}


def library_json(times: Sequence[OperatorTime]) -> dict[str, Any]:
    return {
        "schema": 1,
        "library": str(library_file()),
        "places": [
            {"place": place, "software": software, "mode": mode, "calls": count}
            for (place, software, mode), count in count_places(times)
        ],
    }


def count_places(times: Sequence[OperatorTime]) -> list[tuple[tuple[str, str, str], int]]:
    """Timed calls by place, software and mode."""
    counts = Counter(
        (time.place, time.software, time.call.mode) for time in times if time.forward is not None
    )
    return sorted(counts.items())
