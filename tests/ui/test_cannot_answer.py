"""With --json every verb says in one form that it cannot answer, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.ui.cli.verbs import VERBS, cli
from stepscope.ui.json_text import cannot_answer
from verb_process import run_verb

GOLDEN = Path(__file__).parents[1] / "golden"
RESNET = GOLDEN / "h200-resnet18"
KINDS = {1: "defect", 2: "wrong-use", 3: "unreadable", 4: "not-captured"}


def json_verbs() -> Iterator[str]:
    for verb in VERBS:
        command: click.Command = import_module(f"stepscope.ui.cli.{verb}").command
        if any("--json" in option.opts for option in command.params):
            yield verb


@pytest.mark.parametrize("verb", list(json_verbs()))
@pytest.mark.parametrize("words", [("--json", "--no-such-option"), ("--no-such-option", "--json")])
def test_every_verb_says_in_json_that_it_was_called_wrongly(verb: str, words: list[str]) -> None:
    done = CliRunner().invoke(cli, [verb, *words])
    said = json.loads(done.stdout)["cannot_answer"]
    assert done.exit_code == 2
    assert said["kind"] == "wrong-use"
    assert "--no-such-option" in said["reason"]
    assert said["next"]


@pytest.mark.parametrize(
    ("words", "code", "kind", "reason"),
    [
        (("explain", "nowhere"), 3, "unreadable", "nowhere does not exist"),
        (("explain",), 2, "wrong-use", "Missing argument"),
        (("explain", RESNET, "--memory-limit", "lots"), 2, "wrong-use", "write 8GB"),
        (("whatif", "nowhere"), 3, "unreadable", "nowhere does not exist"),
        (("whatif", RESNET, "--set", "precision=x"), 2, "wrong-use", "choose one of"),
        (("whatif", RESNET, "--set", "no-stalls"), 4, "refused", "no stalls"),
        (("whatif", "--gpus", "nowhere"), 3, "unreadable", "nowhere does not exist"),
        (("whatif", "--history", "--bogus"), 2, "wrong-use", "--bogus"),
        (("gpus", GOLDEN / "cpu_stack_memory.json.gz"), 4, "not-captured", "no step"),
        (("compare", "a"), 2, "wrong-use", "two sides"),
        (("compare", "nowhere", RESNET), 3, "unreadable", "nowhere"),
        (("why", "no-such-finding"), 2, "wrong-use", "there is no finding"),
        (("top", "nowhere"), 3, "unreadable", "nowhere"),
        (("tune", "--", "no-such-command-here"), 2, "wrong-use", "no such command"),
    ],
)
def test_each_kind_of_error(
    words: tuple[object, ...], code: int, kind: str, reason: str, tmp_path: Path
) -> None:
    verb, *rest = words
    done = run_verb(verb, "--json", *rest, cwd=tmp_path)
    assert done.returncode == code, done
    answer = json.loads(done.stdout)
    assert answer["schema"] == 1
    assert answer["cannot_answer"].keys() == {"kind", "reason", "next"}
    assert answer["cannot_answer"]["kind"] == kind
    assert reason in answer["cannot_answer"]["reason"]
    assert done.stderr.strip()
    without = run_verb(verb, *rest, cwd=tmp_path)
    assert (without.returncode, without.stdout) == (code, "")


def test_the_option_of_the_users_command_is_not_ours(tmp_path: Path) -> None:
    done = run_verb("tune", "--", "no-such-command-here", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


def test_an_answer_that_was_printed_stays_alone(tmp_path: Path) -> None:
    """--fail-on-slower gives the answer, and then ends with code 5."""
    fast, slow = tmp_path / "fast.csv", tmp_path / "slow.csv"
    fast.write_text("".join(f"{10 + step % 3}\n" for step in range(60)))
    slow.write_text("".join(f"{20 + step % 3}\n" for step in range(60)))
    done = run_verb("compare", fast, slow, "--json", "--fail-on-slower", "1%")
    assert done.returncode == 5
    assert json.loads(done.stdout)["verdict"] == "slower"


def test_a_defect_has_the_same_form() -> None:
    said = cannot_answer(ZeroDivisionError("division by zero"))["cannot_answer"]
    assert said["kind"] == "defect"
    assert "ZeroDivisionError" in said["reason"]


def test_the_lines_below_a_message_say_what_to_do() -> None:
    said = cannot_answer(UnreadableInputError("it is gone", "look for it", "or not"))
    assert said["cannot_answer"]["next"] == "look for it; or not"


def test_names_in_a_reason_are_made_printable() -> None:
    said = cannot_answer(StepscopeError("a\x1b[2J\nb\u202e"))["cannot_answer"]
    assert said["reason"].isprintable()
