"""Make the table of docs/reference/changes.md from the what-ifs and fixes themselves."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from page_text import code, table

from stepscope.fix.remedies import FIXES
from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
from stepscope.records.remedies import REMEDIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.fix.declaration import Fix
    from stepscope.predict.declaration import WhatIf

NEEDS = Path(__file__).parent.parent / "reference/needs.toml"
_HEAD = (
    *("change", "what it does", "predict: `whatif --set`"),
    *("apply: `run --with`, `tune --only`", "numbers", "needs"),
)


def changes_table(_: str) -> str:
    """Return one row per fix and per what-if that no fix stands for."""
    needs = tomllib.loads(NEEDS.read_text())
    rows = [_fix_row(FIXES[name], needs) for name in FIXES]
    rows += [_whatif_row(whatif, needs["whatifs"]) for whatif in _only_predicted()]
    return table(_HEAD, rows)


def _fix_row(fix: Fix, needs: dict[str, dict[str, str]]) -> tuple[str, ...]:
    to_predict = needs["whatifs"].get(fix.id, "")
    return (
        code(fix.id),
        _sentence(REMEDIES[fix.id].action),
        _predicted_by(fix.id),
        _applied_as(fix),
        code(fix.effect) + (f", may be {code(fix.may_be)}" if fix.may_be else ""),
        needs["fixes"][fix.id] + (f". To predict: {to_predict}" if to_predict else ""),
    )


def _whatif_row(whatif: WhatIf, needs: dict[str, str]) -> tuple[str, ...]:
    others = [code(name) for name in whatif.remedies if name not in FIXES and name != whatif.name]
    also = f" Also as {', '.join(others)}." if others else ""
    return (
        code(whatif.name),
        _sentence(whatif.help) + also,
        _set_form(whatif),
        "",
        "",
        needs[whatif.name],
    )


def _only_predicted() -> Iterator[WhatIf]:
    """Yield what-ifs that have no fix of the same name."""
    for name in WHATIFS:
        if name not in FIXES:
            yield WHATIFS[name]


def _predicted_by(fix: str) -> str:
    if fix in WHATIFS:
        return _set_form(WHATIFS[fix])
    return " or ".join(code(str(setting)) for setting in settings_for_remedy(fix))


def _set_form(whatif: WhatIf) -> str:
    bare = code(whatif.name)
    with_value = code(f"{whatif.name}=VALUE")
    if not whatif.takes_value:
        return bare
    return f"{bare}, {with_value}" if whatif.value_is_optional else with_value


def _applied_as(fix: Fix) -> str:
    if fix.is_proposal:
        return "patch only"
    values = [value for value in fix.values if value]
    if fix.values_of is not None or not values:
        return code(f"{fix.id}=N" if fix.values_of is not None else fix.id)
    return f"{code(fix.id + '=' + values[0])} or {', '.join(map(code, values[1:]))}"


def _sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
