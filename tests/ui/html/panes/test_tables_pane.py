"""Tables carry the explanation's rows; a missing one says what was not recorded."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.ui.html.panes.tables import rank_tables


@pytest.fixture
def rank(make_trace, explain):
    return explain(make_trace())


def tables(rank):
    return {table["title"]: table for table in rank_tables(rank)}


def test_every_row_has_a_cell_for_every_column(rank):
    assert len(rank_tables(rank)) > 1
    for table in rank_tables(rank):
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert table["sort"] < len(table["columns"])


def test_missing_stacks_are_said_to_be_missing(rank):
    found = tables(replace(rank, lines=(), modules=()))
    assert "with_stack=True" in found["Python lines"]["absent"]
    assert "with_stack=True" in found["Modules"]["absent"]


def test_a_model_without_modules_or_copies_is_not_called_unrecorded(rank):
    found = tables(replace(rank, modules=(), copies=()))
    assert found["Modules"]["absent"] == ""
    assert found["Copies"]["absent"] == ""


def test_shapes_are_left_out_where_none_were_recorded(rank):
    bare = tuple(replace(operator, shapes="") for operator in rank.operators)
    labels = [label for label, _ in tables(replace(rank, operators=bare))["Operators"]["columns"]]
    assert "Input shapes" not in labels
    assert "Device self" in labels


def test_a_rate_over_no_time_is_absent(rank):
    copies = (replace(rank.copies[0], gb_s=float("inf")),)
    assert tables(replace(rank, copies=copies))["Copies"]["rows"][0][-1] is None


def test_a_cpu_trace_has_no_device_columns(rank):
    found = tables(replace(rank, kind="cpu", kernels=()))
    labels = [label for label, _ in found["Operators"]["columns"]]
    assert not any(label.startswith("Device") for label in labels)
    assert found["Work on the CPU"]["absent"] == ""
