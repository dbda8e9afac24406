"""`tune --apply` is refused before the first trial where its end can be foreseen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.ui.tune.patch import require_applicable


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "notes.txt").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_script_and_a_module_are_taken(project: Path) -> None:
    require_applicable(("python", "train.py", "--lr", "0.1"), project)
    require_applicable(("python", str(project / "train.py")), Path("/"))
    require_applicable(("python", "-m", "train"), project)


def test_changes_elsewhere_do_not_matter(project: Path) -> None:
    (project / "notes.txt").write_text("two\n")
    require_applicable(("python", "train.py", "notes.txt"), project)


def test_a_script_that_was_changed_is_refused(project: Path) -> None:
    (project / "train.py").write_text("print(2)\n")
    with pytest.raises(UsageError, match=r"train\.py: some changes are not committed"):
        require_applicable(("torchrun", "--nproc-per-node", "2", "train.py"), project)


def test_a_script_that_git_does_not_have_is_refused(project: Path) -> None:
    (project / "new.py").write_text("")
    with pytest.raises(UsageError, match=r"git does not track new\.py"):
        require_applicable(("python", "new.py"), project)


def test_without_git_nothing_could_be_brought_back(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only in a git work tree"):
        require_applicable(("python", "-m", "train"), tmp_path)
