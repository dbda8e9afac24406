"""Find what predicts a change, in either spelling: `whatif --set` and `run --with` take both.

A file of this folder is imported when one of its changes is first predicted: changes/ names the
functions. Each gets the context and the value and gives an Outcome. It raises Refused if there is
nothing to change or the trace does not hold enough to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stepscope.changes import CHANGES, PREDICTED, WHATIF_OF, did_you_mean
from stepscope.changes.change import Code, WhatIf
from stepscope.errors import UsageError
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from stepscope.predict.declaration import Outcome
    from stepscope.predict.step_context import StepContext


def find_prediction(name: str) -> WhatIf:
    """Return how a change is predicted, or raise UsageError for a name that nothing has."""
    if name in PREDICTED:
        return PREDICTED[name]
    predicted = predicted_ids()
    if name in CHANGES and name not in predicted:
        raise UsageError(CHANGES[name].why_not_predicted())
    hint = did_you_mean(name, [*PREDICTED, *sorted(predicted)])
    listed = f". There are {', '.join(sorted(PREDICTED))}"
    raise UsageError(f"there is no change {name!r} to predict{hint or listed}")


def predict_change(name: str, context: StepContext, value: str) -> Outcome:
    """Make one change to a step."""
    part = find_prediction(name).part
    outcome: Outcome = (part.load() if isinstance(part, Code) else part)(context, value)
    return outcome


def parse_setting(text: str) -> Setting:
    """Read NAME or NAME=VALUE of a what-if, or the same change as `run --with` spells it."""
    setting = Setting.parse(text)
    if str(setting) in WHATIF_OF and not text.strip().endswith("="):
        return Setting.parse(WHATIF_OF[str(setting)])
    stands_for = () if setting.name in PREDICTED else settings_for_remedy(setting.name)
    takes_value = not stands_for and find_prediction(setting.name).takes_value
    if setting.value and not takes_value:
        raise UsageError(f"{setting}: {setting.name} takes no value. Write --set {setting.name}")
    return stands_for[0] if stands_for else setting


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """Sort changes into the order in which they are made: by stage, then by name and value."""
    return sorted(
        settings,
        key=lambda setting: (find_prediction(setting.name).stage, setting.name, setting.value),
    )


def predicted_ids() -> set[str]:
    """Return the changes, as findings and fixes name them, that a what-if can predict."""
    return {name for name, change in CHANGES.items() if change.setting or change.predicted_as}


def settings_for_remedy(remedy: str) -> tuple[Setting, ...]:
    """Return what predicts a change of findings and fixes: the best one counts. May be none."""
    change = CHANGES.get(remedy)
    if change is None:
        return (Setting.parse(WHATIF_OF[remedy]),) if remedy in WHATIF_OF else ()
    return tuple(map(Setting.parse, change.predicted_as or filter(None, (change.setting,))))
