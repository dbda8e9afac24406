"""Lines of steps.jsonl have the fields of packed parts, whoever reads them."""

from __future__ import annotations

import msgspec

from stepscope.records.folders import (
    ABSENT,
    END,
    EXTRA_FIELDS,
    MARKS,
    OTHER,
    PHASE_FIELDS,
    STEP,
    WALL,
)
from stepscope.trace.run_folder.step_files import STEP_LINE_FIELDS, StepLine, step_rows


def test_a_line_has_the_fields_of_a_packed_part() -> None:
    packed = (STEP, WALL, END, *PHASE_FIELDS, OTHER, *EXTRA_FIELDS, *MARKS)
    assert packed == STEP_LINE_FIELDS


def test_lines_become_rows_of_fields() -> None:
    text = b'{"step": 3, "wall_ns": 9, "device_ns": null, "window": true}'
    rows = step_rows([msgspec.json.decode(text, type=StepLine), StepLine(step=4, wall_ns=8)])
    fields = dict(zip(STEP_LINE_FIELDS, rows.tolist(), strict=True))
    assert (fields["step"], fields["wall_ns"]) == ([3, 4], [9, 8])
    assert fields["device_ns"] == fields["elements"] == [ABSENT, ABSENT]
    assert fields["window"] == [1, 0]
