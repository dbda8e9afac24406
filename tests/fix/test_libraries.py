"""The libraries of fix/ stand alone: without a library's folder and its line, all else works."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
LIBRARIES = ("ddp", "fuse", "scan", "server")
REGISTERED = ("ddp", "scan")  # have a line in changes/
# What a library's own verb is made of; it goes with the library.
OWN_VERBS = {"fuse": ("ui/cli/sweep.py",)}


def imported(file: Path) -> Iterator[str]:
    """Names that the file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_outside_imports_it(library: str) -> None:
    package, name = SOURCE / "stepscope", f"stepscope.fix.{library}"
    own = {package / file for file in OWN_VERBS.get(library, ())}
    found = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if package / "fix" / library not in file.parents and file not in own
        if any(one == name or one.startswith(f"{name}.") for one in imported(file))
    }
    assert not found


CHECK = """
import sys
from stepscope.changes import APPLIED, PREDICTED

from stepscope.explain.findings import FINDINGS, load_rules
assert all(change.part.load() for change in (*APPLIED.values(), *PREDICTED.values()))
assert [load_rules(scope) for scope in FINDINGS]
assert "torch" not in sys.modules
import stepscope
print(stepscope.explain(sys.argv[1]).verdict)
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_its_folder_and_its_line_all_else_works(
    library: str, golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(SOURCE, tmp_path / "src")
    fix = tmp_path / "src/stepscope/fix"
    shutil.rmtree(fix / library)
    removed = 0
    for file in (tmp_path / "src/stepscope/changes").glob("*.py"):
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines if f'Code("fix.{library}.' not in line]
        removed += len(lines) - len(kept)
        file.write_text("".join(kept))
    assert removed == (library in REGISTERED)
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(golden / "h200-gpt")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
