"""CONTRIBUTING.md followed to the letter, in a copy of the repository: every example works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = (
    "src",
    "docs",
    "tests/changes",
    "tests/ui/test_remedies_page.py",
    "editors/vscode/media",
    "tests/golden",
    "tests/records",
    "CONTRIBUTING.md",
    "pyproject.toml",
)
BLOCK = re.compile(
    r"^(`{3,4})(python|diff|html|markdown)\n(.+?)\n(.+?)^\1$", re.DOTALL | re.MULTILINE
)
PATH = re.compile(r"[\w./-]+/[\w.-]+")


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """The examples by heading: language, path, text."""
    parts = (ROOT / "CONTRIBUTING.md").read_text().split("\n## A ")[1:]
    return {
        part.partition("\n")[0]: [
            (language, PATH.search(first)[0], text)  # type: ignore[index]
            for _, language, first, text in BLOCK.findall(part)
        ]
        for part in parts
    }


def test_each_thing_takes_a_file_or_two_and_a_test() -> None:
    assert sections().keys() == {
        "finding",
        "change",
        "value of a change",
        "trace format",
        "pane of the report",
    }
    for heading, blocks in sections().items():
        new = [path for language, path, _ in blocks if language != "diff"]
        tests = [path for path in new if path.startswith("tests/")]
        assert len(tests) == 1, heading
        assert len(new) - len(tests) <= 2, heading
        if "change" in heading:
            code = [path for _, path, _ in blocks if path.startswith("src/")]
            assert len(code) <= 3, heading
            assert len(new) - len(tests) <= 1, heading


def test_examples_pass_the_linter(tmp_path: Path) -> None:
    for blocks in sections().values():
        for language, path, text in blocks:
            if language == "python":
                follow(tmp_path / path, language, text)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ours = 'lint.isort.known-first-party=["stepscope"]'  # its other files are not there
    for check in (["check", "--config", ours], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *check, "--no-cache", "."]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("heading", sections())
def test_example_works(heading: str, tmp_path: Path) -> None:
    copy = tmp_path / "stepscope"
    for name in COPIED:
        put = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        put(ROOT / name, copy / name)
    for file in (ROOT / "tests").glob("*.py"):
        shutil.copy(file, copy / "tests")
    for language, path, text in sections()[heading]:
        follow(copy / path, language, text)
    tests = [path for _, path, _ in sections()[heading] if path.startswith("tests/")]
    checks = ["tests/test_house.py::test_every_finding_has_a_page_in_the_agreed_shape"]
    checks += ["tests/test_house.py::test_links_in_docs_lead_somewhere"]
    if "change" in heading:
        checks += ["tests/changes", "tests/ui/test_remedies_page.py"]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        subprocess.run([sys.executable, "docs/generate"], cwd=copy, env=environment, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, *checks],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def follow(file: Path, language: str, text: str) -> None:
    """Write a new file, or change a file as its diff says."""
    if language != "diff":
        assert not file.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    lines = text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    content = file.read_text()
    assert content.count(before) == 1, f"{file}: {before!r}"
    file.write_text(content.replace(before, after))
