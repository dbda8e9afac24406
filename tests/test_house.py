"""The promises of the README and the docs that a machine can keep true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope import errors
from stepscope.explain.findings import FINDINGS, load_rules
from stepscope.ui.cli.verbs import VERBS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/stepscope"


def test_public_names_are_exactly_these() -> None:
    assert stepscope.__all__ == [
        "NotCapturedError",
        "StepscopeError",
        "UnreadableInputError",
        "UsageError",
        "__version__",
        "compare",
        "explain",
        "explain_job",
        "explain_rank",
        "explain_together",
        "read_trace",
        "region",
        "watch",
        "whatif",
        "write_report",
    ]
    for name in stepscope.__all__:
        assert getattr(stepscope, name) is not None
    for name in {*stepscope.__all__} - {"__version__"}:
        assert callable(getattr(stepscope, name))
    assert dir(stepscope) == sorted(stepscope.__all__)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = stepscope.no_such_name


def test_exit_codes_are_the_documented_ones() -> None:
    codes = {
        error.__name__: error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.StepscopeError)
    }
    assert codes == {
        "StepscopeError": 1,
        "UsageError": 2,
        "UnreadableInputError": 3,
        "NotCapturedError": 4,
        "SlowerError": 5,
    }
    for code in {0, *codes.values()}:
        assert f"| {code} |" in (ROOT / "docs/json.md").read_text()


def test_readme_tree_names_every_room_and_nothing_else() -> None:
    tree = (ROOT / "README.md").read_text().split("src/stepscope/\n")[1].split("tests/")[0]
    told = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    there = {
        entry.name
        for entry in SOURCE.iterdir()
        if not entry.name.startswith("__pyc") and entry.name != "py.typed"
    }
    assert told == there


def test_every_finding_has_a_page_in_the_agreed_shape() -> None:
    rules = [rule for scope in FINDINGS for rule in load_rules(scope)]
    pages = {page.stem for page in (ROOT / "docs/findings").glob("*.md")} - {"README"}
    assert {rule.id for rule in rules} == pages
    index = (ROOT / "docs/findings/README.md").read_text()
    for rule in rules:
        text = (ROOT / f"docs/findings/{rule.id}.md").read_text()
        assert text.startswith(f"# {rule.id}\n## What it says\n```\n{rule.title}")
        assert f"[{rule.id}]({rule.id}.md)" in index


def test_every_verb_has_a_page_and_a_file() -> None:
    for verb in VERBS:
        assert (SOURCE / f"ui/cli/{verb}.py").exists()
        assert (ROOT / f"docs/{verb}.md").read_text().startswith(f"# stepscope {verb}\n")


def test_every_note_id_is_documented() -> None:
    written = {
        name
        for file in SOURCE.rglob("*.py")
        for name in re.findall(r'Note\(\s*id="([a-z-]+)"', file.read_text())
    }
    assert written
    documented = (ROOT / "docs/formats.md").read_text()
    assert {name for name in written if f"`{name}`" not in documented} == set()


def test_files_of_others_are_opened_in_one_place_only() -> None:
    """measure/ and process_identity.py read the system's own counters, the cache its own entries,
    which it checks itself; resources of ours lie in the package."""
    opens = re.compile(
        r"(?<![\w.])open\(|\.open\(|read_bytes|read_text|np\.(?:load|fromfile|memmap)"
        r"|fdopen"
    )
    writes = re.compile(r'open\([^)]*"w|open\(os\.devnull|fdopen\([^)]*"w')
    ours = re.compile(r'files\("stepscope\.|Path\(__file__\)')
    own = ("regular_files.py", "process_identity.py", "cache.py", "cache_entry.py")
    found = [
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for file in SOURCE.rglob("*.py")
        if "measure" not in file.parts and file.name not in own
        for line in file.read_text().splitlines()
        if opens.search(line) and not writes.search(line) and not ours.search(line)
    ]
    assert found == []


def test_links_in_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['stepscope', '--help']\n"
        "from stepscope.ui.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'msgspec', 'rich', 'jinja2', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert verb in done.stdout
