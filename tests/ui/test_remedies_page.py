"""docs/remedies.md lists every remedy that can be applied, with what it does to the numbers."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.fix.remedies import FIXES
from stepscope.records.remedies import REMEDIES

PAGE = Path(__file__).parents[2] / "docs/remedies.md"
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| `([a-z-]+)`(, may be `([a-z-]+)`)? \|", re.MULTILINE)


def listed() -> dict[str, str]:
    return {
        name: effect for name, effect, _, _ in ROW.findall(PAGE.read_text()) if name in REMEDIES
    }


def test_every_remedy_is_listed_with_its_effect() -> None:
    assert listed() == {name: str(FIXES[name].effect) for name in FIXES}


def test_what_may_turn_out_better_is_said() -> None:
    listed_best = {name: best for name, _, _, best in ROW.findall(PAGE.read_text()) if best}
    declared = {name: str(FIXES[name].may_be) for name in FIXES if FIXES[name].may_be}
    assert listed_best == declared


def test_values_that_are_tried_are_named() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if ROW.match(line)]
    by_name = {found[1]: line for line in rows if (found := ROW.match(line))}
    for name in FIXES:
        values = [value for value in FIXES[name].values if value and not value.isalpha()]
        assert [value for value in values if value not in by_name[name]] == []


def test_nothing_is_listed_twice_or_unknown() -> None:
    names = [name for name, _, _, _ in ROW.findall(PAGE.read_text())]
    effects = {"bit-identical", "rounding", "random", "training"}
    assert sorted(set(names) - effects) == sorted(set(names) & REMEDIES.keys())
    assert len(names) == len(set(names))
