"""Blelloch's scan: the prefixes of a plain loop, in few levels."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import pytest

from stepscope.fix.scan.chain import blelloch

LENGTHS = (1, 2, 3, 5, 8, 13, 64, 100)


def letters(count: int) -> list[str]:
    return [chr(ord("a") + place % 26) for place in range(count)]


def scanned(
    count: int, combine: Callable[[str, str], str] = str.__add__
) -> tuple[list[str], list[None]]:
    """Prefixes and levels; `+` of strings is not commutative, so a wrong order shows."""
    levels: list[None] = []
    return blelloch(letters(count), combine, "", lambda: levels.append(None)), levels


@pytest.mark.parametrize("count", LENGTHS)
def test_every_prefix_without_its_last_element(count: int) -> None:
    assert scanned(count)[0] == ["", *list(accumulate(letters(count)))[:-1]]


@pytest.mark.parametrize("count", LENGTHS[1:])
def test_the_critical_path_is_logarithmic(count: int) -> None:
    assert len(scanned(count)[1]) == 2 * math.ceil(math.log2(count))


def test_it_does_about_twice_the_work() -> None:
    """64 elements: 63 up and 63 down."""
    pairs = []

    def counted(a: str, b: str) -> str:
        pairs.append((a, b))
        return a + b

    scanned(64, counted)
    assert len(pairs) == 63 + 63
