"""A short run of every mutator with a fixed seed, and every input that ever failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.mutate import KINDS
from fuzz.runner import Failure, attempt, run_case

CORPUS = Path(__file__).parent / "corpus"
ONCE_FAILED = sorted(path for kind in KINDS for path in (CORPUS / kind).glob("*"))
CASES = 15


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_get_an_answer_or_a_refusal(kind: str) -> None:
    for case in range(CASES):
        assert_fine(run_case(kind, 14, case))


@pytest.mark.parametrize("path", ONCE_FAILED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_inputs_that_once_failed_no_longer_fail(path: Path, tmp_path: Path) -> None:
    assert_fine(attempt(path.parent.name, 0, path, tmp_path))


def assert_fine(outcome: str | Failure) -> None:
    if isinstance(outcome, Failure):
        pytest.fail(f"case {outcome.case}: {outcome.cause}\n{outcome.details}", pytrace=False)
