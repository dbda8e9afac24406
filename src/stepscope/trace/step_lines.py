"""A line of steps.jsonl, and many of them as one array."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.limits import Bytes, Count, DurationNs, SomeDurationNs, StampNs, StepNumber  # noqa: TC001  (decoded)
from stepscope.records.packed_steps import ABSENT

if TYPE_CHECKING:
    from stepscope.records.step_columns import Ints


class StepLine(msgspec.Struct, frozen=True, gc=False):
    """A line of steps.jsonl; what it lacks is ABSENT, a mark that it lacks is not set."""

    step: StepNumber
    wall_ns: SomeDurationNs
    end_unix_ns: StampNs = ABSENT
    data_ns: DurationNs = ABSENT
    forward_ns: DurationNs = ABSENT
    backward_ns: DurationNs = ABSENT
    optimizer_ns: DurationNs = ABSENT
    evaluation_ns: DurationNs = ABSENT
    checkpoint_ns: DurationNs = ABSENT
    gc_ns: DurationNs = ABSENT
    compile_ns: DurationNs = ABSENT
    between_epochs_ns: DurationNs = ABSENT
    other_ns: DurationNs = ABSENT
    epoch_gap_ns: DurationNs = ABSENT
    device_ns: SomeDurationNs | None = ABSENT
    elements: Count = ABSENT
    allocated_bytes: Bytes | None = ABSENT
    cpu_wait_ns: DurationNs = ABSENT
    major_faults: Count = ABSENT
    retries: Count = ABSENT
    graphs: Count = ABSENT
    window: bool = False
    first: bool = False
    last: bool = False
    memory: bool = False
    skipped: bool = False
    host: bool = False


STEP_LINE_FIELDS = StepLine.__struct_fields__


def step_rows(lines: list[StepLine]) -> Ints:
    """One row per field, in the order of STEP_LINE_FIELDS; one column per step."""
    values = chain.from_iterable(map(msgspec.structs.astuple, lines))
    try:
        flat = np.fromiter(values, np.int64, len(lines) * len(STEP_LINE_FIELDS))
    except TypeError:  # a null
        values = chain.from_iterable(map(msgspec.structs.astuple, lines))
        flat = np.array([ABSENT if value is None else value for value in values], np.int64)
    return flat.reshape(len(lines), -1).T
