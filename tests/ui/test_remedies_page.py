"""docs/reference/changes.md lists every what-if and every fix, with what it does to the numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from stepscope.changes import APPLIED, PREDICTED
from stepscope.predict.whatifs import parse_setting

PAGE = (Path(__file__).parents[2] / "docs/reference/changes.md").read_text()
TABLE = PAGE.split("<!-- generated: changes -->")[1].split("<!-- end of generated -->")[0]
ROWS = [line.strip("|").split("|") for line in TABLE.splitlines() if line.startswith("|`")]
BY_NAME = {row[0].strip("`"): row for row in ROWS}


def test_every_whatif_and_every_fix_has_one_row() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert set(BY_NAME) == {*APPLIED, *PREDICTED}


def test_a_fix_says_what_it_does_to_the_numbers() -> None:
    for name in APPLIED:
        fix = APPLIED[name]
        better = f", may be `{fix.may_be}`" if fix.may_be else ""
        assert BY_NAME[name][4] == f"`{fix.effect}`{better}"


def test_values_that_are_tried_are_named() -> None:
    for name in APPLIED:
        shown = BY_NAME[name][3]
        assert [value for value in APPLIED[name].values if value not in shown] == [] or (
            shown == "patch only"
        )


def test_what_predicts_a_change_is_understood() -> None:
    for name, row in BY_NAME.items():
        forms = [form for form in re.findall(r"`([^`]+)`", row[2]) if "VALUE" not in form]
        for form in forms:
            assert parse_setting(form).name in PREDICTED, name


def test_what_excludes_each_other_is_listed() -> None:
    families = defaultdict(set)
    for name in APPLIED:
        families[APPLIED[name].family or name].add(name)
    several = {frozenset(names) for names in families.values() if len(names) > 1}
    listed = PAGE.split("## What excludes what")[1].split("##")[0]
    lines = [line for line in listed.splitlines() if line.startswith("- ")]
    assert {frozenset(re.findall(r"`([^`]+)`", line)) for line in lines} == several


def test_every_effect_is_explained() -> None:
    effects = {str(APPLIED[name].effect) for name in APPLIED}
    explained = PAGE.split("## What a change does to the numbers")[1].split("##")[0]
    assert {effect for effect in effects if f"|`{effect}`|" not in explained} == set()
