"""The list of public training scripts (field.toml): where each is, how it runs, its step count."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

LIST = Path(__file__).with_name("field.toml")


AnyScript = TypeVar("AnyScript", bound="Script")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One row of field.toml; paths are inside the repository that `repository` names."""

    name: str
    repository: str  # owner/name; also the path below the folder of clones
    path: str
    command: str
    steps: int | str  # the count, or a pattern whose last match in the bare output is the count
    counted_from: int = 1  # 0 if the script numbers its steps from zero
    root: str | None = None  # the folder that is copied; by default the script's own
    before: str | None = None  # runs first, without capture
    ranks: int = 1
    traced: bool = True  # false if there are too few steps to record one
    options: tuple[str, ...] = ()  # for stepscope run
    data: dict[str, str] = field(default_factory=dict)  # path in the copy -> folder under data/
    edits: dict[str, list[list[str]]] = field(default_factory=dict)  # file -> [[old, new], ...]
    env: dict[str, str] = field(default_factory=dict)
    same: str = r"(?i)loss[^0-9\n-]{0,20}(-?\d+\.\d+)"  # equal in both runs; empty: not compared
    timeout_s: float = 120.0
    note: str = ""

    @property
    def copied(self) -> Path:
        """The folder inside the repository that is copied for a run."""
        return Path(self.path).parent if self.root is None else Path(self.root)

    def own_steps(self, output: str) -> int | None:
        """The script's own count; None if its output does not show it."""
        if isinstance(self.steps, int):
            return self.steps
        numbers = re.findall(self.steps, output)
        return int(numbers[-1]) + 1 - self.counted_from if numbers else None


def read_scripts(path: Path = LIST, kind: type[AnyScript] = Script) -> list[AnyScript]:
    """Every row as a `kind` of script; an error names the row that is wrong."""
    try:
        rows = tomllib.loads(path.read_text())["script"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"{path}: not a list of [[script]] rows: {error}") from None
    scripts = [_script(path, number, row, kind) for number, row in enumerate(rows, 1)]
    names = [script.name for script in scripts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"{path}: two rows are called {', '.join(twice)}")
    return scripts


def choose(scripts: list[AnyScript], only: list[str] | None) -> list[AnyScript]:
    """The named rows, in the file's order."""
    if unknown := sorted(set(only or ()) - {script.name for script in scripts}):
        known = ", ".join(script.name for script in scripts)
        raise SystemExit(f"no script is called {', '.join(unknown)}; there are {known}")
    return [script for script in scripts if not only or script.name in only]


def _script(path: Path, number: int, row: dict[str, Any], kind: type[AnyScript]) -> AnyScript:
    where = f"{path}, row {number} ({row.get('name', 'no name')})"
    if unknown := sorted(row.keys() - {f.name for f in fields(kind)}):
        raise SystemExit(f"{where}: unknown key {', '.join(unknown)}")
    row = {**row, "options": tuple(row.get("options", ()))}
    try:
        return kind(**row)
    except TypeError as error:
        raise SystemExit(f"{where}: {error}") from None
