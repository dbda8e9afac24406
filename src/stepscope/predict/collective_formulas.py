"""The textbook formula of each algorithm: steps, bytes sent and bytes added by the busiest rank.

time = steps alpha + sent n beta + added n gamma, for p ranks and n bytes; r ranks on each of h
hosts. halving_doubling and recursive_doubling are exact for powers of two; other numbers need two
more steps, which schedule_cost counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable


class CollectiveTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Multiples of alpha, and of the vector's bytes."""

    steps: float
    sent: float
    added: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFormula:
    """As people write it, and as a function of p and r."""

    words: str
    terms: Callable[[int, int], CollectiveTerms]


def _terms(steps: float, sent: float, added: float) -> CollectiveTerms:
    return CollectiveTerms(steps=steps, sent=sent, added=added)


def _others(p: int) -> float:
    return (p - 1) / p


def _up(p: int) -> int:
    """log2, rounded up."""
    return (p - 1).bit_length()


FORMULAS = {
    ("ring", "all_reduce"): CollectiveFormula(
        words="2(p-1)·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(2 * (p - 1), 2 * _others(p), _others(p)),
    ),
    ("ring", "all_gather"): CollectiveFormula(
        words="(p-1)·α + (p-1)/p·nβ", terms=lambda p, _: _terms(p - 1, _others(p), 0)
    ),
    ("ring", "reduce_scatter"): CollectiveFormula(
        words="(p-1)·α + (p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(p - 1, _others(p), _others(p)),
    ),
    ("binomial_tree", "all_reduce"): CollectiveFormula(
        words="2⌈log p⌉·(α + nβ) + ⌈log p⌉·nγ",
        terms=lambda p, _: _terms(2 * _up(p), 2 * _up(p), _up(p)),
    ),
    ("binomial_tree", "all_gather"): CollectiveFormula(
        words="2⌈log p⌉·α + (⌈log p⌉ + (p-1)/p)·nβ",
        terms=lambda p, _: _terms(2 * _up(p), _up(p) + _others(p), 0),
    ),
    ("binomial_tree", "reduce_scatter"): CollectiveFormula(
        words="2⌈log p⌉·α + (⌈log p⌉ + (p-1)/p)·nβ + ⌈log p⌉·nγ",
        terms=lambda p, _: _terms(2 * _up(p), _up(p) + _others(p), _up(p)),
    ),
    ("halving_doubling", "all_reduce"): CollectiveFormula(
        words="2 log p·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(2 * math.log2(p), 2 * _others(p), _others(p)),
    ),
    ("halving_doubling", "all_gather"): CollectiveFormula(
        words="log p·α + (p-1)/p·nβ", terms=lambda p, _: _terms(math.log2(p), _others(p), 0)
    ),
    ("halving_doubling", "reduce_scatter"): CollectiveFormula(
        words="log p·α + (p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(math.log2(p), _others(p), _others(p)),
    ),
    ("recursive_doubling", "all_reduce"): CollectiveFormula(
        words="log p·(α + nβ + nγ)",
        terms=lambda p, _: _terms(math.log2(p), math.log2(p), math.log2(p)),
    ),
    ("bruck", "all_reduce"): CollectiveFormula(
        words="2⌈log p⌉·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(2 * _up(p), 2 * _others(p), _others(p)),
    ),
    ("bruck", "all_gather"): CollectiveFormula(
        words="⌈log p⌉·α + (p-1)/p·nβ", terms=lambda p, _: _terms(_up(p), _others(p), 0)
    ),
    ("bruck", "reduce_scatter"): CollectiveFormula(
        words="⌈log p⌉·α + (p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(_up(p), _others(p), _others(p)),
    ),
    ("direct", "all_reduce"): CollectiveFormula(
        words="2·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, _: _terms(2, 2 * _others(p), _others(p)),
    ),
    ("direct", "all_gather"): CollectiveFormula(
        words="α + (p-1)/p·nβ", terms=lambda p, _: _terms(1, _others(p), 0)
    ),
    ("direct", "reduce_scatter"): CollectiveFormula(
        words="α + (p-1)/p·nβ + (p-1)/p·nγ", terms=lambda p, _: _terms(1, _others(p), _others(p))
    ),
    ("hierarchical", "all_reduce"): CollectiveFormula(
        words="2(r-1+h-1)·α + 2(p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, r: _terms(2 * (r + p // r - 2), 2 * _others(p), _others(p)),
    ),
    ("hierarchical", "all_gather"): CollectiveFormula(
        words="(r-1+h-1)·α + (p-1)/p·nβ",
        terms=lambda p, r: _terms(r + p // r - 2, _others(p), 0),
    ),
    ("hierarchical", "reduce_scatter"): CollectiveFormula(
        words="(r-1+h-1)·α + (p-1)/p·nβ + (p-1)/p·nγ",
        terms=lambda p, r: _terms(r + p // r - 2, _others(p), _others(p)),
    ),
}
# Both halves of its all-reduce in one; apart from each other they cost what the halves do.
for _half in ("all_gather", "reduce_scatter"):
    FORMULAS["recursive_doubling", _half] = FORMULAS["halving_doubling", _half]
