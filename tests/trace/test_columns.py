"""Columns that grow by pieces."""

from __future__ import annotations

import numpy as np

from stepscope.trace.formats.columns import Table, is_constant


def repeated(value: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.broadcast_to(np.int32(value), count)


def finished(*pieces: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    table = Table()
    for piece in pieces:
        table.add(x=piece)
    return table.finish(x=np.int32)["x"]


def test_pieces_are_appended_in_order() -> None:
    pieces = [np.arange(count, dtype=np.int32) for count in (3, 1, 0, 50, 2)]
    assert finished(*pieces).tolist() == np.concatenate(pieces).tolist()
    assert finished().dtype == np.int32


def test_one_value_in_all_rows_takes_no_memory() -> None:
    column = finished(repeated(7, 3), repeated(7, 5))
    assert column.tolist() == [7] * 8
    assert is_constant(column)


def test_a_second_value_gives_every_row_its_own() -> None:
    for other in (repeated(8, 2), np.array([7, 9], np.int32)):
        column = finished(repeated(7, 3), repeated(7, 1), other, repeated(7, 2))
        assert column.tolist() == [7] * 4 + other.tolist() + [7] * 2
        assert column.dtype == np.int32


def test_a_column_can_be_read_while_it_grows() -> None:
    table = Table()
    assert len(table.column("x")) == 0
    table.add(x=np.array([1]))
    table.add(x=np.array([2, 3]))
    assert table.column("x").tolist() == [1, 2, 3]
