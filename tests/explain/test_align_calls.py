"""Operators of a compiled graph and the calls of its code, in time that grows with their number."""

from __future__ import annotations

from stepscope.explain.compiled.graph_calls import align_operators
from stepscope.records.compiled import GraphKernel


class Name(str):
    """Counts how often names are compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def calls(names: str) -> list[GraphKernel]:
    return [GraphKernel(name="extern", operator=Name(name)) for name in names]


def test_operators_that_the_code_does_not_have_are_left_out() -> None:
    assert align_operators(list("axab"), calls("aab")) == [0, -1, 1, 2]
    assert align_operators(list("abab"), calls("abb")) == [0, 1, -1, 2]
    assert align_operators(list("ba"), calls("cab")) == [2, -1]


def test_many_operators_take_no_more_time_each_than_few() -> None:
    number = 400
    names = [Name(name) for name in "ab" * number]
    Name.compared = 0
    found = align_operators(names, calls("a" * number + "b" * number))
    assert found[:4] == [0, number, -1, number + 1]
    assert Name.compared < 30 * number
