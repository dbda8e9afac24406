"""What the README and the docs promise, and rules of the code, as far as a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

import house
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
        "fix",
        "read_trace",
        "region",
        "watch",
        "whatif",
        "write_report",
    ]
    for name in stepscope.__all__:
        assert getattr(stepscope, name) is not None
    for name in {*stepscope.__all__} - {"__version__", "fix"}:
        assert callable(getattr(stepscope, name))
    assert callable(stepscope.fix.apply)
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
        "NotPredictedError": 4,
        "SlowerError": 5,
    }
    for code in {0, *codes.values()}:
        assert f"|{code}|" in (ROOT / "docs/reference/json.md").read_text()


def test_the_printed_tree_names_every_folder_and_nothing_else() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("src/stepscope/\n")[1].split("tests/")[0]
    printed = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    on_disk = {
        entry.name
        for entry in SOURCE.iterdir()
        if not entry.name.startswith("__pyc") and entry.name != "py.typed"
    }
    assert printed == on_disk


def test_every_finding_has_a_page_in_the_agreed_shape() -> None:
    rules = [rule for scope in FINDINGS for rule in load_rules(scope)]
    pages = {page.stem for page in (ROOT / "docs/findings").glob("*.md")} - {"README"}
    assert {rule.id for rule in rules} == pages
    index = (ROOT / "docs/findings/README.md").read_text()
    for rule in rules:
        text = (ROOT / f"docs/findings/{rule.id}.md").read_text()
        head, _, says = text.partition("```\n")
        assert head == f"# {rule.id}\n## What it says\n"
        said = says.partition("\n  ")[0].lower()
        assert all(word in said for word in rule.title.lower().split()), rule.id
        assert f"[{rule.id}]({rule.id}.md)" in index


def test_every_verb_has_a_page_and_a_file() -> None:
    for verb in VERBS:
        assert (SOURCE / f"ui/cli/{verb}.py").exists()
        page = ROOT / f"docs/reference/cli/{verb}.md"
        assert page.read_text().startswith(f"# stepscope {verb}\n")


def test_every_note_id_is_documented() -> None:
    written = {
        name
        for file in SOURCE.rglob("*.py")
        for name in re.findall(r'Note\(\s*id="([a-z-]+)"', file.read_text())
    }
    assert written
    documented = (ROOT / "docs/reference/formats.md").read_text()
    assert {name for name in written if f"`{name}`" not in documented} == set()


def test_input_files_are_opened_in_one_place_only() -> None:
    """Exceptions: measure/, records/folders.py and processors.py read the system's counters, the
    cache reads its own entries and checks them itself, and the package reads its own resources."""
    opens = re.compile(
        r"(?<![\w.])open\(|\.open\(|read_bytes|read_text|np\.(?:load|fromfile|memmap)"
        r"|fdopen"
    )
    writes = re.compile(r'open\([^)]*"[wxa]|open\(os\.devnull|fdopen\([^)]*"w')
    ours = re.compile(r'files\("stepscope\.|Path\(__file__\)')
    own = (
        "trace/files.py",
        "records/folders.py",
        "processors.py",
        "cache.py",
        "choice_cache.py",
    )
    elsewhere = [
        f"{file.relative_to(SOURCE)}: {line.strip()}"
        for file in SOURCE.rglob("*.py")
        if "measure" not in file.parts and not str(file).endswith(own)
        for line in file.read_text().splitlines()
        if opens.search(line) and not writes.search(line) and not ours.search(line)
    ]
    assert elsewhere == []


def test_links_in_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = re.sub(r"(?ms)^(`{3,4}).*?^\1$", "", page.read_text())
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['stepscope', '--help']\n"
        "from stepscope.ui.cli.verbs import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'msgspec', 'rich', 'jinja2', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert verb in done.stdout


def test_the_house_stays_as_small_as_it_is() -> None:
    none_of(
        f"{row.what}: {row.now:,}, and {row.limit:,} is the limit"
        for row in house.measure()
        if not row.kept
    )


OTHERS = {"train.py", "a.py", "b.py", "resource.py", "json.py", "token.py", "types.py"}  # of users
OTHERS |= {"cudagraph_trees.py", "default_worker.py"}  # of torch and of Ray
OTHERS |= {"spawn.py", "_contextlib.py", "convert_frame.py"}  # of torch


def test_files_that_comments_name_exist() -> None:
    files = {
        file.name
        for folder in ("src", "tests", "benchmarks")
        for file in house.files(ROOT / folder)
    }
    none_of(
        f"{file.relative_to(SOURCE)}: {name}"
        for file in house.files(SOURCE)
        for name in re.findall(r"(?<![\w/*.])[a-z_]+\.py\b", file.read_text())
        if name not in files | OTHERS
    )


MOST_LINES = 700  # a file is a subject: cut where another subject begins, not at a number


def test_no_product_file_is_too_long_for_one_subject() -> None:
    lengths = {
        file.relative_to(SOURCE): len(file.read_text().splitlines())
        for suffix in ("py", "js", "mjs")
        for file in SOURCE.rglob(f"*.{suffix}")
    }
    none_of(f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MOST_LINES)


def test_no_two_test_files_have_one_name() -> None:
    """Outside packages pytest would leave one of them out, and report it as an error only."""
    by_name = defaultdict(list)
    for path in (house.ROOT / "tests").rglob("test_*.py"):
        if not (path.parent / "__init__.py").exists():
            by_name[path.name].append(path)
    assert not [paths for paths in by_name.values() if len(paths) > 1]


def test_a_class_name_has_one_meaning() -> None:
    modules = defaultdict(list)
    for module, tree in house.trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module)
    none_of(f"{name}: {', '.join(where)}" for name, where in modules.items() if len(where) > 1)


def test_no_import_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    imports = house.imports()
    reach = {module: reachable(imports, module) for module in imports}
    circles = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in imports
        if module in reach[module]
    }
    none_of(" <-> ".join(sorted(circle)) for circle in circles)


def none_of(broken: Iterable[str]) -> None:
    """Fail with all of them, one per line."""
    listed = sorted(broken)
    assert not listed, f"{len(listed)}:\n" + "\n".join(listed)


def reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Modules that `start` imports, directly or through others; itself only in a circle."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


# Counts (.0f, .4g) and data that is only shortened (.7g) are no such numbers.
ROUNDED = re.compile(r"\{[^{}]*:[+,]*\.(?:0%|[1-5][f%e]|[1-3]g)\}")
# A position in a drawing: an attribute, a percentage of the width, a path, a transformation.
COORDINATE = re.compile(r'[\w-]+="[^"]*\{|f\}%"|"L"\.join|translate\(|rotate\(')
OTHER_NUMBERS = {
    "text/figures.py",  # the formatter itself
    "bench/demo.py",  # the loss that a training script prints
    "measure/calibrate/__main__.py",  # progress, sent to the parent process
    "ui/html/svg.py",  # coordinates
}


def test_numbers_in_text_are_written_by_records_figures_only() -> None:
    none_of(
        f"{name}:{number}: {line.strip()}"
        for file in SOURCE.rglob("*.py")
        if (name := str(file.relative_to(SOURCE))) not in OTHER_NUMBERS
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if ROUNDED.search(line) and not COORDINATE.search(line)
    )
