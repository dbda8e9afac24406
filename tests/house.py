"""Measure how the code is cut: `make house` prints the table, test_house.py keeps the budgets."""

from __future__ import annotations

import ast
import functools
import gc
import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/stepscope"
TRACE = ROOT / "tests/golden/h200-resnet18"

# Counts what one command loads and enters, in a process of its own, as a user's command runs.
COUNTER = """
import json, sys
from stepscope.__main__ import run
code = set()
def note(frame, event, argument):
    if event == "call":
        code.add(frame.f_code)
sys.argv = json.loads(sys.argv[1])
sys.stdout, out = open("/dev/null", "w"), sys.stdout
sys.setprofile(note)
try:
    run()
except SystemExit:
    pass
sys.setprofile(None)
ours = {c for c in code if "/stepscope/" in c.co_filename and not c.co_name.startswith("<")}
modules = [name for name in sys.modules if name.split(".")[0] == "stepscope"]
print(json.dumps([len({c.co_filename for c in ours}), len(ours), len(modules)]), file=out)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What one command needs of the product."""

    files: int
    functions: int
    modules: int  # loaded


@functools.cache
def entered_by(*arguments: str) -> Entered:
    command = (sys.executable, "-c", COUNTER, json.dumps(["stepscope", *arguments, "--no-cache"]))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files, functions, modules = json.loads(done.stdout.splitlines()[-1])
    return Entered(files=files, functions=functions, modules=modules)


def lines_of(folder: Path) -> int:
    """Count the Python lines that are not blank."""
    return sum(
        bool(line.strip()) for file in files(folder) for line in file.read_text().split("\n")
    )


def comment_lines(folder: Path) -> int:
    return sum(
        line.lstrip().startswith("#")
        for file in files(folder)
        for line in file.read_text().split("\n")
    )


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by the module's name."""
    found = {}
    gc.disable()  # Python 3.11 fails in ast.parse if a finalizer of somebody else runs in it
    try:
        for file in files(SOURCE):
            parts = ("stepscope", *file.relative_to(SOURCE).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = ast.parse(file.read_text())
    finally:
        gc.enable()
    return found


@functools.cache
def imports(*, types: bool = True) -> dict[str, set[str]]:
    """Return the modules that each module imports, in functions too."""
    return {
        module: imported_modules(tree if types else without_types(tree), {*trees()}) - {module}
        for module, tree in trees().items()
    }


def without_types(tree: ast.Module) -> ast.Module:
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.Module(body=kept, type_ignores=[])


def imported_modules(tree: ast.Module, modules: set[str]) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in modules else node.module)
    return names & modules


def folder_sizes() -> Counter[str]:
    """Return the number of modules in each folder, without its __init__."""
    return Counter(
        str(file.parent.relative_to(SOURCE)) for file in files(SOURCE) if file.stem != "__init__"
    )


def for_one_neighbour() -> list[str]:
    """Return the modules that exactly one other module imports, and that one lies beside them."""
    importers = defaultdict(set)
    for module, imported in imports().items():
        for other in imported:
            importers[other].add(module)
    return sorted(
        module
        for module, users in importers.items()
        if len(users) == 1 and parent(module) == parent(next(iter(users)))
    )


def parent(module: str) -> str:
    return module.rpartition(".")[0]


def longest_chain() -> list[str]:
    """Return the longest chain of imports that starts at a verb."""
    needed = imports(types=False)

    @functools.cache
    def chain_from(module: str) -> tuple[str, ...]:
        others = needed[module] - {
            "stepscope"
        }  # whose names load what they need when they are used
        return (module, *max((chain_from(other) for other in others), key=len, default=()))

    verbs = [module for module in needed if parent(module) == "stepscope.ui.cli"]
    return list(max(map(chain_from, verbs), key=len))


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    lines: int
    arguments: int  # 0 where others decide them: a kernel, a command, a rule for one of torch's own


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return sum(map(len, (node.args.posonlyargs, node.args.args, node.args.kwonlyargs)))


@functools.cache
def functions() -> list[Function]:
    return [
        Function(
            name=f"{module}.{node.name}",
            lines=(node.end_lineno or node.lineno) - node.lineno + 1,
            arguments=0 if node.decorator_list else arguments_of(node),
        )
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@dataclass(frozen=True, slots=True)
class Budget:
    """One row of the table: what is counted, how much there is, and how much there may be.

    `limit` only ever comes closer to `goal`: a change that passes it makes the house worse."""

    what: str
    now: float
    limit: float
    goal: float
    least: bool = False  # limit and goal are lower ones

    @property
    def kept(self) -> bool:
        return self.now >= self.limit if self.least else self.now <= self.limit

    @property
    def reached(self) -> bool:
        return self.now >= self.goal if self.least else self.now <= self.goal


def measure() -> list[Budget]:
    explain = entered_by("explain", str(TRACE))
    whatif = entered_by("whatif", str(TRACE), "--set", "precision=bf16")
    lengths = sorted(function.lines for function in functions())
    source = lines_of(SOURCE)
    comments = round(100 * comment_lines(SOURCE) / source, 1)
    return [
        Budget("Python lines of src, without blanks", source, 133_000, 95_000),
        Budget("Python lines of tests, without blanks", lines_of(ROOT / "tests"), 91_600, 60_000),
        Budget("modules of src", len(trees()), 604, 620),
        Budget("explain of a small trace: files entered", explain.files, 156, 170),
        Budget("explain of a small trace: functions", explain.functions, 1_830, 1_500),
        Budget("explain of a small trace: modules loaded", explain.modules, 190, 200),
        Budget("whatif --set precision=bf16: files entered", whatif.files, 140, 150),
        Budget("modules in one folder", max(folder_sizes().values()), 26, 25),
        Budget("longest chain of imports from a verb", len(longest_chain()), 21, 14),
        Budget("modules that one neighbour alone imports", len(for_one_neighbour()), 53, 60),
        Budget("lines of a function, nine of ten", lengths[len(lengths) * 9 // 10], 30, 30),
        Budget("lines of the longest function", lengths[-1], 120, 120),
        Budget("functions of over 7 arguments", sum(f.arguments > 7 for f in functions()), 18, 10),
        Budget("comment lines in a hundred", comments, 2, 2, least=True),
    ]


def main() -> None:
    print(f"{'':<46} {'now':>9} {'limit':>9} {'goal':>9}")
    for row in measure():
        mark = "" if row.reached else "  <- not there yet"
        print(f"{row.what:<46} {row.now:>9,} {row.limit:>9,} {row.goal:>9,}{mark}")


if __name__ == "__main__":
    main()
