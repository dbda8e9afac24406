"""Which cores each rank of a machine gets, so that none shares its cores or spans NUMA nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Cores = tuple[int, ...]


def share_cores(
    nodes: Mapping[int, Cores],
    ranks: int,
    first_sibling: Callable[[int], int],
    homes: Sequence[int | None] = (),
) -> list[Cores]:
    """Cores of rank 0, 1, ...; empty if there are fewer physical cores than ranks.

    `homes` are the nodes of the ranks' devices. Without them ranks are spread over the nodes in
    order. Cores that share arithmetic units (SMT) go to the same rank.
    """
    known = [node for node in homes if node is not None and node in nodes]
    if len(known) == ranks:
        return _share_at_home(nodes, known, first_sibling)
    if ranks % len(nodes) == 0 or ranks == 1:
        order = list(nodes)
        return _share_at_home(
            nodes, [order[rank * len(order) // ranks] for rank in range(ranks)], first_sibling
        )
    return _split([core for node in nodes.values() for core in node], ranks, first_sibling)


def _share_at_home(
    nodes: Mapping[int, Cores], homes: Sequence[int], first_sibling: Callable[[int], int]
) -> list[Cores]:
    shares: dict[int, list[Cores]] = {
        node: _split(nodes[node], homes.count(node), first_sibling) for node in set(homes)
    }
    if not all(shares.values()):
        return []
    return [shares[node].pop(0) for node in homes]


def _split(cores: Sequence[int], parts: int, first_sibling: Callable[[int], int]) -> list[Cores]:
    """Whole physical cores, neighbours together; the first parts may have one more."""
    physical: dict[int, list[int]] = {}
    for core in cores:
        physical.setdefault(first_sibling(core), []).append(core)
    groups = list(physical.values())
    if len(groups) < parts:
        return []
    each, more = divmod(len(groups), parts)
    shares, start = [], 0
    for part in range(parts):
        end = start + each + (part < more)
        shares.append(tuple(sorted(core for group in groups[start:end] for core in group)))
        start = end
    return shares
