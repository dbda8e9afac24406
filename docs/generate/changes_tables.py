"""Make the table of docs/reference/changes.md from the what-ifs and fixes themselves."""

from __future__ import annotations

import tomllib
from pathlib import Path

from page_text import code, table

from stepscope.changes import APPLIED, CHANGES, PREDICTED
from stepscope.predict.whatifs import settings_for_remedy

NEEDS = Path(__file__).parent.parent / "reference/needs.toml"
_HEAD = (
    *("change", "what it does", "predict: `whatif --set`"),
    *("apply: `run --with`, `tune --only`", "numbers", "needs"),
)


def changes_table(_: str) -> str:
    """Return one row per change that can be applied, then per change that is only predicted."""
    needs = tomllib.loads(NEEDS.read_text())
    rows = [_applied_row(name, needs) for name in APPLIED]
    rows += [_predicted_row(name, needs["whatifs"]) for name in PREDICTED if name not in APPLIED]
    return table(_HEAD, rows)


def _applied_row(name: str, needs: dict[str, dict[str, str]]) -> tuple[str, ...]:
    application, to_predict = APPLIED[name], needs["whatifs"].get(name, "")
    settings = settings_for_remedy(name)
    return (
        code(name),
        _sentence(CHANGES[name].action),
        _set_form(name) if name in PREDICTED else " or ".join(code(str(one)) for one in settings),
        _applied_as(name),
        code(application.effect)
        + (f", may be {code(application.may_be)}" if application.may_be else ""),
        needs["fixes"][name] + (f". To predict: {to_predict}" if to_predict else ""),
    )


def _predicted_row(name: str, needs: dict[str, str]) -> tuple[str, ...]:
    others = [
        code(change.id)
        for change in CHANGES.values()
        if any(setting.partition("=")[0] == name for setting in change.predicted_as)
        and change.id not in (*APPLIED, name)
    ]
    also = f" Also as {', '.join(others)}." if others else ""
    words = _sentence(PREDICTED[name].help) + also
    return (code(name), words, _set_form(name), "", "", needs[name])


def _set_form(name: str) -> str:
    bare = code(name)
    with_value = code(f"{name}=VALUE")
    if not PREDICTED[name].takes_value:
        return bare
    return f"{bare}, {with_value}" if PREDICTED[name].value_is_optional else with_value


def _applied_as(name: str) -> str:
    application = APPLIED[name]
    if application.patch_only:
        return "patch only"
    if not application.takes_value:
        return code(name)
    values = application.values
    if not values:
        return code(f"{name}=N")
    return f"{code(name + '=' + values[0])} or {', '.join(map(code, values[1:]))}"


def _sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
