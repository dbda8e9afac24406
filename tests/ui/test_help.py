"""Help that explains: every option of every verb says in a sentence what it is for."""

from __future__ import annotations

from importlib import import_module

import click
import pytest

from stepscope.ui.cli.verbs import VERBS

OPTIONS = [
    pytest.param(verb, option, id=f"{verb} {option.opts[0]}")
    for verb in VERBS
    for option in import_module(f"stepscope.ui.cli.{verb}").command.params
    if isinstance(option, click.Option)
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
    for name in ("--json", "--step-on"):
        assert len(said[name]) == 1, said[name]
