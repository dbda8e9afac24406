"""What a change would bring is predicted in one place: findings say what was measured."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import stepscope.explain.findings

FOLDER = Path(stepscope.explain.findings.__file__).parent
# Sentences of the kind "in tf32 they would take about 12%".
PROMISE = re.compile(
    r"\b(?:would|could|will)\s+(?:\w+\s+){0,2}(?:take|save|be saved|be \w+er|run|gain|cost)\b"
    r"|\bsaves up to\b|\btimes faster with\b"
)


def texts(file: Path) -> list[str]:
    """Strings of a module, parts of f-strings joined; without docstrings."""
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    plain = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings | inside
    ]
    parts = [
        "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)
        for node in joined
    ]
    return plain + parts


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.stem)
def test_no_finding_promises_a_change(file: Path) -> None:
    assert not [text for text in texts(file) if PROMISE.search(text)]


def test_the_rule_sees_a_promise_in_an_f_string(tmp_path: Path) -> None:
    file = tmp_path / "promising.py"
    file.write_text('summary = f"in {dtype} they " f"would take about {share}."\n')
    assert [text for text in texts(file) if PROMISE.search(text)]
