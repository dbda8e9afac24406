"""Which ranks are on which host, and whether a group stays inside one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.records.job import RankPart, Reach
    from stepscope.records.network_place import NetworkPlace


class HostColumns(msgspec.Struct, frozen=True, kw_only=True):
    """A host, and the columns of its ranks in a matrix of (steps, ranks)."""

    host: str
    columns: tuple[int, ...]


def columns_by_host(ranks: Sequence[int], hosts: Mapping[int, str]) -> tuple[HostColumns, ...]:
    """In the order of their first ranks; nothing unless every rank's host is known and they have
    several."""
    places: dict[str, list[int]] = {}
    for column, rank in enumerate(ranks):
        if rank not in hosts:
            return ()
        places.setdefault(hosts[rank], []).append(column)
    if len(places) < 2:
        return ()
    return tuple(HostColumns(host=host, columns=tuple(on)) for host, on in places.items())


def hosts_of(parts: Sequence[RankPart]) -> dict[int, str]:
    """The host of every rank whose host is known."""
    return {part.rank: part.host for part in parts if part.host}


def places_of(parts: Sequence[RankPart]) -> dict[str, NetworkPlace]:
    """Where each host stands in the network, by the first of its ranks that tells."""
    places: dict[str, NetworkPlace] = {}
    for part in parts:
        if part.host and part.network_place:
            places.setdefault(part.host, part.network_place)
    return places


def ranks_by_host(hosts: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """In the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        ranks.setdefault(hosts[rank], []).append(rank)
    return {host: tuple(on) for host, on in ranks.items()}


def reach_of(ranks: Iterable[int], size: int | None, hosts: Mapping[int, str]) -> Reach | None:
    """Whether these ranks of a group of `size` are on one host. One rank that is missing may be on
    another host, so a group is inside a host only if all of it is known."""
    known = [rank for rank in set(ranks) if rank in hosts]
    if len({hosts[rank] for rank in known}) > 1:
        return "between hosts"
    return "inside host" if known and len(known) == size else None
