"""What can be changed: one file per what-if, each with one record, `WHATIF`.

`apply(context, value)` gives an Outcome. It raises Refused if there is nothing to change or the
trace does not hold enough to tell. A file is imported when its what-if is first asked for.
"""

from __future__ import annotations

import re
from collections import UserDict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """Raises UsageError for a name that nothing has."""
    if name in WHATIFS:
        return WHATIFS[name]
    from difflib import get_close_matches

    names = [*WHATIFS, *remedy_ids()]
    words = set(re.split(r"[-_ ]", name.lower()))
    near = get_close_matches(name, names, 1) or [
        known for known in names if words & set(known.split("-"))
    ]
    hint = f", did you mean {near[0]}?" if near else ";"
    raise UsageError(f"there is no what-if {name!r}{hint} there are {', '.join(sorted(WHATIFS))}")


def parse_setting(text: str) -> Setting:
    """NAME, NAME=VALUE or the id of a remedy, as on the command line."""
    setting = Setting.parse(text)
    stands_for = () if setting.name in WHATIFS else settings_for_remedy(setting.name)
    takes_value = not stands_for and find_whatif(setting.name).takes_value
    if setting.value and not takes_value:
        raise UsageError(f"{setting}: {setting.name} takes no value; leave it out to go without it")
    return stands_for[0] if stands_for else setting


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """The order in which changes are made: by stage, then by name and value."""
    return sorted(
        settings, key=lambda setting: (find_whatif(setting.name).stage, setting.name, setting.value)
    )


def remedy_ids() -> set[str]:
    """Remedies that a what-if can predict."""
    return {remedy for whatif in WHATIFS.values() for remedy in whatif.remedies}


def settings_for_remedy(remedy: str) -> tuple[Setting, ...]:
    """What predicts a remedy; none for a remedy without a what-if. The best one counts."""
    return tuple(
        Setting(name=whatif.name, value=value)
        for whatif in WHATIFS.values()
        for value in whatif.remedies.get(remedy, ())
    )
