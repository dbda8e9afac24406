"""Plurals and capitals: one rule for every sentence, and names of code keep their spelling."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from stepscope.records.quality import Note, encode_json, replace_invalid
from stepscope.text.words import (
    counted,
    lazy_pattern,
    named_ranks,
    ordinal,
    plural,
    sentence,
    short_ranges,
)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 steps"),
        (1, "1 step"),
        (2, "2 steps"),
        (1024, "1,024 steps"),
        (1.0, "1 step"),
        (1.5, "1.5 steps"),
        (np.int64(1), "1 step"),
        (np.int64(2_500_000), "2,500,000 steps"),
    ],
)
def test_a_number_and_its_noun_agree(number: float, words: str) -> None:
    assert counted(number, "step") == words


def test_a_plural_that_is_not_an_s_is_given() -> None:
    assert counted(1, "micro-batch", "micro-batches") == "1 micro-batch"
    assert counted(3, "micro-batch", "micro-batches") == "3 micro-batches"
    assert plural(1, "was", "were") == "was"
    assert plural(0, "was", "were") == "were"


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (21, "21st"),
     (113, "113th"), (1001, "1,001st")],
)  # fmt: skip
def test_ordinal_numbers(number: int, words: str) -> None:
    assert ordinal(number) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("the GPU waits", "The GPU waits"),
        ("rank 3: 12 calls", "Rank 3: 12 calls"),
        ("exposed: 1 ms", "Exposed: 1 ms"),
        ("idle, then busy", "Idle, then busy"),
    ],
)
def test_plain_first_words_get_a_capital(text: str, said: str) -> None:
    assert sentence(text) == said


@pytest.mark.parametrize(
    "text",
    [
        "aten::mm: 3 calls",
        "aten::mm [2, 2]: 1 ms",
        "gloo:all_reduce takes long",
        "gloo is slow",
        "torch.compile fuses operators",
        "torch reserved 2 GB",
        "void at::native::vectorized_elementwise_kernel<4>(int)",
        "cudaLaunchKernel in aten::item: 3 calls",
        "autograd::engine::evaluate_function: AddmmBackward0",
        "train.py:3 main",
        "num_workers=4",
        "pin_memory=True and copies with non_blocking=True",
        "bf16 halves the bytes",
        "model.to(memory_format=torch.channels_last), and the input too",
        "12 calls",
        "gemm",
        "",
    ],
)
def test_names_of_code_keep_their_spelling(text: str) -> None:
    assert sentence(text) == text


def test_consecutive_numbers_are_written_as_runs() -> None:
    assert short_ranges([14, 8, 9, 10, 11]) == "8-11, 14"
    assert short_ranges([0, 2, 4, 6, 8, 10, 12]) == "0, 2, 4, 6, 8, 10, …"
    assert short_ranges([]) == ""
    assert (named_ranks([3]), named_ranks([3, 4])) == ("rank 3", "ranks 3-4")


# A lazy pattern answers as re.compile's does, and is compiled only when it is asked.


def test_it_answers_as_a_compiled_pattern() -> None:
    lazy, compiled = (make(r"a(\d)", re.IGNORECASE) for make in (lazy_pattern, re.compile))
    for text in ("", "xA1", "a12", "A1"):
        assert lazy.sub("b", text) == compiled.sub("b", text)
        for name in ("search", "match", "fullmatch"):
            ours, theirs = getattr(lazy, name)(text), getattr(compiled, name)(text)
            assert (ours and ours.groups()) == (theirs and theirs.groups())
    assert lazy.groups == compiled.groups


def test_it_is_compiled_once_and_only_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = []
    compile_ = re.compile

    def count(pattern: str, flags: int = 0) -> re.Pattern[str]:
        patterns.append(pattern)
        return compile_(pattern, flags)

    monkeypatch.setattr(re, "compile", count)
    lazy = lazy_pattern("lazy")
    assert patterns == []
    assert lazy.search("so lazy")
    assert lazy.match("lazy")
    assert patterns == ["lazy"]


# Every value becomes valid UTF-8.


def test_text_outside_utf_8_becomes_question_marks() -> None:
    note = Note(id="path\udcff", detail="a\ud800b")
    assert msgspec.json.decode(encode_json(note)) == {
        "id": "path?",
        "detail": "a?b",
        "count": None,
        "byte_offset": None,
    }
    assert encode_json({"path\udcff": ["\udcfe", 1, float("nan")]}) == b'{"path?":["?",1,null]}'


def test_valid_text_stays() -> None:
    assert replace_invalid("é ☃ 😀") == "é ☃ 😀"
    assert encode_json(["é"]) == '["é"]'.encode()
