"""Help that teaches: a sentence for every option, examples that work, a link, groups of verbs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from catalogue import VerbEntry, catalogue
from click.testing import CliRunner

from stepscope.ui.cli.options import options_of
from stepscope.ui.cli.verbs import cli
from stepscope.ui.front_page import ALSO, GROUPS, NEWER, VERBS

OPTIONS = [
    pytest.param(verb, option, id=f"{verb} {option.opts[0]}")
    for verb in VERBS
    for option in import_module(f"stepscope.ui.cli.{verb}").command.params
    if isinstance(option, click.Option)
]
ENTRIES = [
    pytest.param(entry, id=entry.name)
    for verb in catalogue()
    for entry in (verb, *verb.subcommands)
]


@pytest.mark.parametrize(("verb", "option"), OPTIONS)
def test_an_option_is_explained_in_a_sentence(verb: str, option: click.Option) -> None:
    words = (option.help or "").split()
    assert len(words) >= 4, f"stepscope {verb} {option.opts[0]}: {option.help!r}"
    assert words[0][0].isupper() or not words[0][0].isalpha()
    assert words[-1].endswith((".", ")."))


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_explained_before_its_options(verb: str) -> None:
    command = import_module(f"stepscope.ui.cli.{verb}").command
    assert len((command.help or "").split()) >= 8


def test_options_of_one_name_mean_the_same_everywhere() -> None:
    said: dict[str, set[str]] = {}
    for each in OPTIONS:
        _, option = each.values
        said.setdefault(option.opts[0], set()).add(option.help)
    for name in ("--json", "--step-on", "--no-cache"):
        assert len(said[name]) == 1, said[name]


def test_times_sizes_and_folders_are_written_one_way() -> None:
    spelled = {
        option.spelling.split()[-2].rstrip(","): option.spelling
        for verb in catalogue()
        for section in verb.sections
        for option in section.options
        if " " in option.spelling
    }
    for name in ("--budget", "--probe-budget", "--interval", "--seconds"):
        assert spelled[name].endswith(" TIME"), spelled[name]
    for name in ("--memory-limit", "--max-bytes", "--compare"):
        assert spelled[name].endswith(" SIZE"), spelled[name]
    assert spelled["--out"] == "-o, --out FOLDER"


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_has_a_summary_two_examples_and_a_link(entry: VerbEntry) -> None:
    done = CliRunner().invoke(cli, [*entry.name.split(), "--help"])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert entry.summary in shown
    assert entry.summary.count(".") == 1
    assert entry.summary.endswith(".")
    assert len(entry.summary.split()) <= 22
    assert len(entry.examples) >= 2
    for line, comment in entry.examples:
        assert f"# {comment}\n  {line}\n" in done.output
    assert entry.url in done.output
    for section in entry.sections:
        for option in section.options:
            assert " ".join(option.help.split()) in shown


@pytest.mark.parametrize("entry", ENTRIES)
def test_examples_use_options_that_exist(entry: VerbEntry) -> None:
    for line, _ in entry.examples:
        words = shlex.split(line)
        if entry.name == "completion" or words[0] == "torchrun":
            continue
        verb, *rest = words[words.index("stepscope") + 1 :]
        known = known_options(verb, rest)
        given = rest[: rest.index("--")] if "--" in rest else rest
        assert {word for word in given if word.startswith("-")} <= known, line


def known_options(verb: str, words: list[str]) -> set[str]:
    """Return every spelling of an option that `stepscope VERB WORDS` takes."""
    command = import_module(f"stepscope.ui.cli.{verb}").command
    commands = [command]
    for word in words:
        if word in command.modes:
            commands.append(import_module(f"stepscope.ui.cli.{command.modes[word]}").command)
            command = commands[-1]
        if isinstance(command, click.Group) and word in command.commands:
            commands.append(command.commands[word])
    return {name for one in commands for option in options_of(one) for name in option.opts}


def test_verbs_are_in_groups_and_the_first_list_is_short() -> None:
    first = [verb for verbs in GROUPS.values() for verb in verbs]
    assert len(first) <= 14
    assert sorted([*first, *ALSO, *NEWER]) == sorted(VERBS)
    shown = CliRunner().invoke(cli, ["--help"]).output
    places = [shown.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("old", NEWER)
def test_an_older_name_names_its_new_form(old: str) -> None:
    shown = CliRunner().invoke(cli, [old, "--help"]).output
    assert f"New form: {import_module(f'stepscope.ui.cli.{old}').command.newer}" in shown


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (["whatif", "--gpus"], ["gpus"]),
        (["whatif", "--history"], ["record"]),
        (["whatif", "--history", "forget"], ["record", "forget"]),
        (["run", "--check"], ["health"]),
        (["run", "--wait", "5", "--check"], ["health"]),
        (["compare", "--run"], ["ab"]),
        (["probe", "show"], ["library", "show"]),
        (["probe", "export"], ["library", "export"]),
        (["probe", "import"], ["library", "import"]),
    ],
)
def test_a_verb_includes_another(new: list[str], old: list[str]) -> None:
    runner = CliRunner()
    shown, known = (runner.invoke(cli, [*words, "--help"]).output for words in (new, old))
    assert "New form" not in shown
    assert shown.partition("Examples:")[2] == known.partition("Examples:")[2] != ""


def test_a_word_that_is_a_path_chooses_no_other_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show").mkdir()
    assert "Time the operators" in CliRunner().invoke(cli, ["probe", "show", "--help"]).output


def test_words_of_the_command_choose_no_other_verb() -> None:
    shown = CliRunner().invoke(cli, ["run", "--help", "--", "x", "--check"]).output
    assert "What to record:" in shown
    shown = CliRunner().invoke(cli, ["run", "--help", "x", "--check"]).output
    assert "What to record:" in shown


@pytest.mark.parametrize("columns", [40, 70, 200])
def test_the_first_page_is_the_same_without_click(columns: int) -> None:
    environment = {**os.environ, "COLUMNS": str(columns)}
    command = [sys.executable, "-X", "importtime", "-m", "stepscope"]
    fast, slow = (
        subprocess.run([*command, word], capture_output=True, text=True, env=environment)
        for word in ("--help", "help")
    )
    assert fast.stdout == slow.stdout != ""
    assert (" click" in fast.stderr, " click" in slow.stderr) == (False, True)


def test_help_is_a_verb_too() -> None:
    runner = CliRunner()
    for words in (["run"], ["probe", "show"], ["whatif", "--gpus"], []):
        asked = runner.invoke(cli, ["help", *words])
        assert asked.output == runner.invoke(cli, [*words, "--help"]).output
        assert asked.exit_code == 0
    assert runner.invoke(cli, ["-V"]).output == runner.invoke(cli, ["--version"]).output


def test_option_groups_name_options_that_exist() -> None:
    for verb in VERBS:
        command = import_module(f"stepscope.ui.cli.{verb}").command
        names = [name for group in command.groups.values() for name in group]
        assert len(names) == len(set(names))
        assert set(names) <= {name for option in options_of(command) for name in option.opts}


def test_only_old_names_of_an_option_are_not_shown() -> None:
    shown = CliRunner().invoke(cli, ["compare", "--help"]).output
    assert "--prediction ID" in shown
    assert "--promise" not in shown
