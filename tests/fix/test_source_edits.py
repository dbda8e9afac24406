"""Edits of a source file: they add up, whatever order they are asked for in."""

from __future__ import annotations

import ast
from itertools import permutations

import pytest

from stepscope.fix.proposal import edited
from stepscope.fix.python_source import Edit, PythonSource

LOOP = b"""\
for batch in batches:
    out = model(batch)
    text = f'''one
two'''
    loss = f(out)
    loss.backward()
"""


def _source(text: bytes = LOOP) -> PythonSource:
    source = PythonSource.parse("train.py", text)
    assert source is not None
    return source


def _edited(edits: tuple[Edit, ...], text: bytes = LOOP) -> str:
    changed = edited(edits, lambda _file: text)["train.py"].decode()
    ast.parse(changed)
    return changed


def _at(source: PythonSource, line: int) -> ast.stmt:
    statement = source.statement_at(line)
    assert statement is not None
    return statement


def test_lines_in_strings_are_not_indented() -> None:
    source = _source()
    changed = _edited(source.wrap(_at(source, 2), _at(source, 5), "with a:"))
    assert changed.splitlines()[1:7] == [
        "    with a:",
        "        out = model(batch)",
        "        text = f'''one",
        "two'''",
        "        loss = f(out)",
        "    loss.backward()",
    ]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_headers_and_lines_in_any_order(order: tuple[int, ...]) -> None:
    source = _source()
    asked = [
        *source.wrap(_at(source, 2), _at(source, 5), "with inner:"),
        *source.wrap(_at(source, 2), _at(source, 6), "with outer:"),
        source.insert_before(_at(source, 2), "before()"),
        source.insert_before(_at(source, 5), "between()"),
    ]
    changed = _edited(tuple(asked[number] for number in order))
    assert changed.splitlines()[1:] == [
        "    before()",
        "    with outer:",
        "        with inner:",
        "            out = model(batch)",
        "            text = f'''one",
        "two'''",
        "            between()",
        "            loss = f(out)",
        "        loss.backward()",
    ]


def test_two_headers_of_the_same_lines() -> None:
    source = _source()
    edits = (
        *source.wrap(_at(source, 2), _at(source, 5), "with a:"),
        *source.wrap(_at(source, 2), _at(source, 5), "with b:"),
    )
    assert "    with a:\n        with b:\n            out = model(batch)\n" in _edited(edits)


def test_tabs_stay_tabs() -> None:
    text = b"def train():\n\tout = model(x)\n\tout.backward()\n"
    source = _source(text)
    edits = (
        *source.wrap(_at(source, 2), _at(source, 2), "with a:"),
        source.insert_before(_at(source, 3), "after()"),
    )
    assert _edited(edits, text).splitlines()[1:] == [
        "\twith a:",
        "\t\tout = model(x)",
        "\tafter()",
        "\tout.backward()",
    ]


def test_text_around_an_expression_that_begins_a_wrapped_line() -> None:
    text = b"out = model(x)\nloss(out).backward()\n"
    source = _source(text)
    statement = _at(source, 2)
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert isinstance(statement.value.func, ast.Attribute)
    edits = (
        *source.surround(statement.value.func.value, "scale(", ")"),
        *source.wrap(_at(source, 1), statement, "with a:"),
    )
    assert _edited(edits, text) == (
        "with a:\n    out = model(x)\n    scale(loss(out)).backward()\n"
    )


def test_a_place_is_changed_once() -> None:
    source = _source()
    twice = (source.replace(_at(source, 5), "a"), source.replace(_at(source, 5), "b"))
    with pytest.raises(ValueError, match="the same place"):
        _edited(twice)
