"""The scans as they are taught: the same prefixes, by how many steps."""

from __future__ import annotations

import math

import pytest

from stepscope.fix.scan.chain import blelloch, hillis_steele, one_after_the_other

LENGTHS = (1, 2, 3, 5, 8, 13, 64, 100)


def joined(a: str, b: str) -> str:
    """Associative, not commutative: a wrong order shows."""
    return a + b


def letters(count: int) -> list[str]:
    return [chr(ord("a") + place % 26) for place in range(count)]


@pytest.mark.parametrize("count", LENGTHS)
def test_every_scan_gives_every_prefix(count: int) -> None:
    word = "".join(letters(count))
    prefixes = [word[: place + 1] for place in range(count)]
    assert one_after_the_other(letters(count), joined).elements == prefixes
    assert hillis_steele(letters(count), joined).elements == prefixes
    assert blelloch(letters(count), joined, "").elements == ["", *prefixes[:-1]]


@pytest.mark.parametrize("count", LENGTHS[1:])
def test_the_critical_path_is_logarithmic(count: int) -> None:
    levels = math.ceil(math.log2(count))
    assert one_after_the_other(letters(count), joined).depth == count - 1
    assert hillis_steele(letters(count), joined).depth == levels
    assert blelloch(letters(count), joined, "").depth == 2 * levels


def test_blelloch_does_about_twice_the_work_and_hillis_steele_log_times() -> None:
    """64 elements: 63 up and 63 down; 6 levels of 64, less what has nothing to look back to."""
    assert blelloch(letters(64), joined, "").combined == 63 + 63
    assert hillis_steele(letters(64), joined).combined == 6 * 64 - 63
