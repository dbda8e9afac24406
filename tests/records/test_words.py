"""Plurals and capitals: one rule for every sentence, and names of code keep their spelling."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.text.words import counted, named_ranks, ordinal, plural, sentence, short_ranges


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
