"""Bytes while one node of a pass runs, without what is there in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


class NodeLevel(msgspec.Struct, frozen=True, kw_only=True):
    place: int
    peak_bytes: float
    kept_bytes: float  # for backward: in forward with what the node keeps, in backward before it
    gradients_bytes: float = 0.0  # of the parameters, afterwards
    joined_bytes: float = 0.0  # that only a list of the script still holds, if it does


def level_at(nodes: Sequence[NodeLevel], place: int) -> float:
    """The highest level while a node runs; 0 for a node that does not."""
    return next((node.peak_bytes for node in nodes if node.place == place), 0.0)


def find_nearest(
    nodes: Sequence[NodeLevel],
    kept_bytes: float,
    gradients_bytes: float | None,
    *,
    within: float,
    likely: Container[int] = (),
) -> NodeLevel | None:
    """The node that ran when so much was kept: of those that fit best, one at the `likely` places,
    and the highest; None if none fits `within` so many bytes."""

    def distance(node: NodeLevel) -> float:
        gradients = gradients_bytes if gradients_bytes is not None else node.gradients_bytes
        return abs(node.kept_bytes - kept_bytes) + abs(node.gradients_bytes - gradients)

    nearest = min(map(distance, nodes), default=within + 1.0)
    if nearest > within:
        return None
    fitting = [node for node in nodes if distance(node) <= nearest + 1.0]
    return max(fitting, key=lambda node: (node.place in likely, node.peak_bytes))
