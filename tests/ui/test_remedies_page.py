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
    page = listed()
    declared = {name: str(FIXES[name].effect) for name in FIXES}
    assert {name: page.get(name) for name in declared} == declared


def test_nothing_is_listed_twice_or_unknown() -> None:
    names = [name for name, _, _, _ in ROW.findall(PAGE.read_text())]
    effects = {"bit-identical", "rounding", "random", "training"}
    assert sorted(set(names) - effects) == sorted(set(names) & REMEDIES.keys())
    assert len(names) == len(set(names))
