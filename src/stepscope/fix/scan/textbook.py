"""Parallel scans as the textbook has them: small, slow, and the oracle for everything else here.

A scan gives every prefix of a list combined by an associative operation. Done one after the other
it takes n steps. Blelloch's takes 2 log n and no more work than that; Hillis and Steele's takes
log n and more work. `combine` is called with the earlier element first. Both return the elements
with the number of steps on the critical path: what one level combines could run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Element = TypeVar("Element")


@dataclass(frozen=True, slots=True)
class Scanned(Generic[Element]):
    """What a scan made, and how."""

    elements: list[Element]
    depth: int  # levels that had to wait for each other
    combined: int  # calls of `combine`


def one_after_the_other(
    elements: Sequence[Element], combine: Callable[[Element, Element], Element]
) -> Scanned[Element]:
    """Every prefix, its last element included."""
    prefixes = list(elements[:1])
    for element in elements[1:]:
        prefixes.append(combine(prefixes[-1], element))
    steps = max(0, len(elements) - 1)
    return Scanned(prefixes, steps, steps)


def hillis_steele(
    elements: Sequence[Element], combine: Callable[[Element, Element], Element]
) -> Scanned[Element]:
    """Every prefix, its last element included. On level k each looks back by 2^k."""
    prefixes, reach, depth, combined = list(elements), 1, 0, 0
    while reach < len(prefixes):
        prefixes = [
            combine(prefixes[place - reach], element) if place >= reach else element
            for place, element in enumerate(prefixes)
        ]
        combined += len(prefixes) - reach
        reach, depth = 2 * reach, depth + 1
    return Scanned(prefixes, depth, combined)


def blelloch(
    elements: Sequence[Element],
    combine: Callable[[Element, Element], Element],
    identity: Element,
    begin_level: Callable[[], object] = lambda: None,
) -> Scanned[Element]:
    """Every prefix without its last element: the first is `identity`.

    On the way up, pairs are combined into a tree of sums. On the way down, each node hands what is
    left of it to its left child, and that with the left child's sum to its right one.
    `begin_level` is called before the combinations that could run at the same time.
    """
    length = 1 << max(0, len(elements) - 1).bit_length()
    tree, depth, combined = [*elements, *[identity] * (length - len(elements))], 0, 0
    width = 2
    while width <= length:
        begin_level()
        for right in range(width - 1, length, width):
            tree[right] = combine(tree[right - width // 2], tree[right])
        combined += length // width
        depth, width = depth + 1, 2 * width
    tree[-1] = identity
    while width > 2:
        width //= 2
        begin_level()
        for right in range(width - 1, length, width):
            left = right - width // 2
            tree[left], tree[right] = tree[right], combine(tree[right], tree[left])
        combined += length // width
        depth += 1
    return Scanned(tree[: len(elements)], depth, combined)
