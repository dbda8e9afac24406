"""Every command of docs/start and docs/how-to runs, or at least its options exist.

A ```console block is run: `$ ` begins a command, and the other lines are some that it prints. The
first word of each of these lines must be printed again.
Commands elsewhere (```sh blocks, inline code) need a cluster, a GPU or minutes: only their
`stepscope` calls are parsed. A ```python block that begins with a file's name is that file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from stepscope.ui.cli.verbs import VERBS, cli

REPO = Path(__file__).parents[2]
GOLDEN = REPO / "tests/golden"
FIRST_RUN = REPO / "docs/start/first-run.md"
PAGES = sorted([*(REPO / "docs/start").glob("*.md"), *(REPO / "docs/how-to").glob("*.md")])
PATIENCE_S = 300


class Command(NamedTuple):
    words: str
    shown: tuple[str, ...]  # lines that the page shows


class Answer(NamedTuple):
    code: int
    output: str


def blocks(page: Path, *languages: str) -> list[str]:
    wanted = "|".join(languages)
    return re.findall(rf"^```(?:{wanted})\n(.*?)^```$", page.read_text(), re.M | re.S)


def commands_to_run(page: Path) -> list[Command]:
    """Return the commands of the console blocks, in order."""
    found: list[Command] = []
    for block in blocks(page, "console"):
        first, *parts = re.split(r"^\$ ", block, flags=re.M)
        assert first == "", f"{page.name}: a console block begins with `$ `"
        for part in parts:
            words, *shown = part.splitlines()
            found.append(Command(words, tuple(shown)))
    return found


def calls_of_stepscope(page: Path) -> list[str]:
    """Return every `stepscope VERB ...` of the page that names a verb, without running it."""
    shells = [block.replace("\\\n", " ") for block in blocks(page, "sh", "console")]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in shells for line in block.splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    found = (re.search(r"(?:^|[ (])stepscope ([a-z][^|>\")]*)", line) for line in lines)
    return [call[1] for call in found if call is not None]


def parse(call: str) -> None:
    """Fail if the verb or one of its options does not exist. Nothing runs."""
    name, *words = shlex.split(call, comments=True)
    words = words[: words.index("--")] if "--" in words else words
    assert name in VERBS or name == "help", call
    command = cli.get_command(click.Context(cli), name)
    if command is None:
        return
    for mode, verb in getattr(command, "modes", {}).items():
        if mode in words:
            words.remove(mode)
            command = import_module(f"stepscope.ui.cli.{verb}").command
    context = click.Context(command, **command.context_settings)
    command.make_parser(context).parse_args(words)


class Reader:
    """Somebody who types what the pages say, in a folder of their own."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = ("CACHE_DIR", "PROFILES", "RECORD", "LIBRARY", "TAGS")
        folders = {f"STEPSCOPE_{name}": str(home / name.lower()) for name in own}
        self._environment = {**os.environ, **folders, "PATH": path, "OMP_NUM_THREADS": "1"}
        self._environment.pop("COLUMNS", None)

    def run(self, words: str) -> Answer:
        done = subprocess.run(
            ["bash", "-c", words],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        return Answer(done.returncode, done.stdout)

    def write_files(self, page: Path) -> None:
        for block in blocks(page, "python"):
            name = re.match(r"# (\w+\.py)\n", block)
            if name is not None:
                (self.folder / name[1]).write_text(block)

    def follow(self, page: Path) -> None:
        """Type the page's commands in turn; each must print what the page shows."""
        self.write_files(page)
        for command in commands_to_run(page):
            answer = self.run(command.words)
            assert answer.code == 0, f"{command.words}\n{answer.output[-3000:]}"
            for line in command.shown:
                word = re.match(r"[A-Za-z][\w.=%-]*", line)
                if word is not None:
                    assert word[0] in answer.output, f"{command.words}: no {word[0]!r}\n{line}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: train.py, its runs before and after a change, runs and a trace
    of other machines, a list of prices."""
    scratch = tmp_path_factory.mktemp("how-to")
    folder = scratch / "work"
    (folder / "runs").mkdir(parents=True)
    shutil.copytree(GOLDEN / "h200-resnet18", folder / "runs/gpu")
    shutil.copytree(GOLDEN / "cpu-ddp-slow-rank", folder / "runs/job")
    shutil.copy(GOLDEN / "cuda_step.json.gz", folder / "trace.json.gz")
    (folder / "prices.csv").write_text("L4,0.70\nA100-SXM4-80GB,1.80\nH100,2.90\n")
    Reader(folder, scratch / "home").follow(FIRST_RUN)
    return folder


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if commands_to_run(page)],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_every_command_runs_and_prints_what_the_page_shows(
    page: Path, prepared: Path, tmp_path: Path
) -> None:
    if page == FIRST_RUN:  # `prepared` has followed it
        assert (prepared / "runs/after/report.html").is_file()
        return
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    Reader(folder, prepared.parent / "home").follow(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_verbs_and_options_exist(page: Path) -> None:
    for call in calls_of_stepscope(page):
        try:
            parse(call)
        except (click.UsageError, ValueError) as error:
            pytest.fail(f"{page.name}: stepscope {call}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_python_on_the_page_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def test_the_notebook_page_computes_what_it_says(prepared: Path) -> None:
    (block,) = blocks(REPO / "docs/how-to/notebooks.md", "python")
    reader = Reader(prepared, prepared.parent / "home")
    answer = reader.run(f"python -c {shlex.quote(block)}")
    assert answer.code == 0, answer.output


def test_every_page_is_in_the_index() -> None:
    index = (REPO / "docs/how-to/README.md").read_text()
    names = [page.name for page in (REPO / "docs/how-to").glob("*.md") if page.stem != "README"]
    assert [name for name in names if f"]({name})" not in index] == []
