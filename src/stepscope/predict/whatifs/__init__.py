"""What can be changed: one file per what-if, each with one record, `WHATIF`.

`apply(context, value)` gives an Outcome. It raises Refused if there is nothing to change or the
trace does not hold enough to tell. A file is imported when its what-if is first asked for.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.records.prediction import Setting
from stepscope.records.remedies import REMEDIES, WHATIF_OF, did_you_mean

if TYPE_CHECKING:
    from stepscope.predict.declaration import WhatIf

# In the order in which they are listed and tried.
_NAMES = (
    "precision",
    "optimizer",
    "compile",
    "cuda-graphs",
    "threads",
    "no-breaks",
    "no-sync",
    "no-data-wait",
    "loader-workers",
    "no-stalls",
    "scan",
    "batch",
    "fuse",
    "accumulate",
    "checkpoint",
    "save-memory",
    "workers",
    "hosts",
    "zero",
    "bucket-mb",
    "bandwidth",
    "latency",
    "no-straggler",
    "consistency",
    "gpu",
    "remove",
    "scale",
)


class _WhatIfs(UserDict[str, Any]):
    """Name -> declaration, read from its file on first use."""

    def __getitem__(self, name: str) -> WhatIf:
        if self.data[name] is None:
            file = import_module(f"{__name__}.{name.replace('-', '_')}")
            self.data[name] = file.WHATIF
        whatif: WhatIf = self.data[name]
        return whatif


WHATIFS = _WhatIfs(dict.fromkeys(_NAMES))


def find_whatif(name: str) -> WhatIf:
    """Return the declaration, or raise UsageError for a name that nothing has."""
    if name in WHATIFS:
        return WHATIFS[name]
    if name in REMEDIES and name not in remedy_ids():
        raise UsageError(
            f"stepscope cannot predict the change {name!r}. `stepscope tune --only {name}` "
            "measures it if stepscope can apply it, and `stepscope ab` compares two versions"
        )
    hint = did_you_mean(name, [*WHATIFS, *sorted(remedy_ids())])
    raise UsageError(f"there is no change {name!r} to predict{hint or '. ' + _known()}")


def _known() -> str:
    return f"There are {', '.join(sorted(WHATIFS))}"


def parse_setting(text: str) -> Setting:
    """Read NAME or NAME=VALUE of a what-if, or the same change as `run --with` spells it."""
    setting = Setting.parse(text)
    if str(setting) in WHATIF_OF and not text.strip().endswith("="):
        return Setting.parse(WHATIF_OF[str(setting)])
    stands_for = () if setting.name in WHATIFS else settings_for_remedy(setting.name)
    takes_value = not stands_for and find_whatif(setting.name).takes_value
    if setting.value and not takes_value:
        raise UsageError(f"{setting}: {setting.name} takes no value. Write --set {setting.name}")
    return stands_for[0] if stands_for else setting


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """The order in which changes are made: by stage, then by name and value."""
    return sorted(
        settings, key=lambda setting: (find_whatif(setting.name).stage, setting.name, setting.value)
    )


def remedy_ids() -> set[str]:
    """Return the changes, as findings and fixes name them, that a what-if can predict."""
    fixes = {fix for fix in WHATIF_OF if "=" not in fix}
    return fixes | {remedy for whatif in WHATIFS.values() for remedy in whatif.remedies}


def settings_for_remedy(remedy: str) -> tuple[Setting, ...]:
    """Return what predicts a change of findings and fixes: the best one counts. May be none."""
    declared = tuple(
        Setting(name=whatif.name, value=value)
        for whatif in WHATIFS.values()
        for value in whatif.remedies.get(remedy, ())
    )
    if declared or remedy not in WHATIF_OF:
        return declared
    return (Setting.parse(WHATIF_OF[remedy]),)
