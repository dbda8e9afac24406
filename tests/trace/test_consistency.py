"""Every reader keeps the rules, and each broken rule is seen (the others: test_cache.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from nsys_export import small
from stepscope import read_trace
from stepscope.records.trace import HostEvents
from stepscope.trace.cache import find_inconsistency
from stepscope.trace.formats.plausible_values import column_types

if TYPE_CHECKING:
    from pathlib import Path


def test_traces_of_every_reader_are_consistent(golden: Path, tmp_path: Path) -> None:
    names = ("cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph")
    files = [
        *(golden / f"{name}.json.gz" for name in names),
        small().write(tmp_path / "run.sqlite"),
    ]
    assert {find_inconsistency(read_trace(file, cache=False)) for file in files} == {None}


def test_the_broken_rule_is_named(golden: Path) -> None:
    trace = read_trace(golden / "cpu_step.json.gz", cache=False)
    negative = np.full(len(trace.host), -1)
    broken = replace(trace, host=replace(trace.host, dur_ns=negative))
    assert "a duration is negative" in (find_inconsistency(broken) or "")
    short = replace(trace, host=replace(trace.host, name=trace.host.name[:-1]))
    assert find_inconsistency(short) == "column name of HostEvents has another type or length"


def test_types_of_columns_are_those_that_the_record_declares() -> None:
    types = column_types(HostEvents)
    assert list(types) == list(HostEvents.__struct_fields__)
    assert (types["kind"], types["name"], types["dur_ns"]) == (np.int8, np.int32, np.int64)
