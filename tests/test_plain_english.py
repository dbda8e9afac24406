"""What a user reads is plain English, in the words of the glossary."""

from __future__ import annotations

from pathlib import Path

import pytest

from plain_english import GLOSSARY, complaints, product_files, words_to_avoid


def test_messages_and_pages_are_plain_english() -> None:
    found = [str(complaint) for path in product_files() for complaint in complaints(path)]
    assert not found, f"{len(found)}:\n" + "\n".join(found)


def test_the_glossary_has_words_to_avoid() -> None:
    assert {"matrix product", "remedy", "promised", "late rank"} <= set(words_to_avoid())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('say("the remedy was applied to the step")', "says 'remedy'"),
        ('say(f"{count} steps are slow, much of it is had again")', "says 'is had'"),
        (f'say("One, {"word " * 30}")', "31 words in a sentence"),
        (f'say(f"One, {"word " * 29}{{more}}")', "31 words in a sentence"),
    ],
)
def test_a_hard_message_is_found(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "message.py"
    file.write_text(text)
    assert what in [complaint.what for complaint in complaints(file)]


@pytest.mark.parametrize(
    "text",
    [
        'say("The GPU is idle because the CPU launches too slowly.")',
        'KEYS = ["remedies", "promised_ms"]',
        f'NAMES = "{"name " * 40}".split()',
        f'say("{"word " * 20}. {"word " * 20}")',
        '"""Of the remedies that were promised, so many."""',
    ],
)
def test_plain_messages_names_and_comments_pass(tmp_path: Path, text: str) -> None:
    file = tmp_path / "message.py"
    file.write_text(text)
    assert list(complaints(file)) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Fine.\n\n```\nthe remedy\n```\nA promise.\n", 6),
        ("| a | b |\n|---|---|\n| `remedies` | the remedy |\n", 3),
        (f"- one\n- {'word ' * 31}\n", 2),
    ],
)
def test_a_page_is_read_without_its_code(tmp_path: Path, text: str, line: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (complaint,) = complaints(page)
    assert complaint.place == f"{page}:{line}"


def test_records_of_measurements_are_not_held_to_it() -> None:
    files = product_files()
    assert GLOSSARY in files
    assert not [file for file in files if "records" in file.parts and file.suffix == ".md"]
