"""The world and the groups inside it, each under a name.

All groups of a name work at the same time, as in a training, and share the machine's links.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from stepscope.measure.calibrate.collectives import GroupPlace

_ENOUGH_FOR_PAIRS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGroup:
    """A name, the size of its groups, and this rank's place in one of them (if any)."""

    name: str
    size: int
    place: GroupPlace | None


def make_groups() -> list[NamedGroup]:
    """world; intra-host and inter-host where there are several hosts; pairs from 4 ranks on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = tuple(range(world))
    everywhere = GroupPlace(handle=dist.group.WORLD, ranks=everyone, rank=rank)
    groups = [NamedGroup(name="world", size=world, place=everywhere)]
    for name, parts in partitions(gather_hosts()).items():
        place = None
        for ranks in parts:
            handle = dist.new_group(list(ranks))  # every rank has to make every group
            if rank in ranks:
                place = GroupPlace(handle=handle, ranks=ranks, rank=rank)
        groups.append(NamedGroup(name=name, size=len(parts[0]), place=place))
    return groups


def gather_hosts() -> list[str]:
    """Which host each rank is on: the launcher's number for it, else its name."""
    world = dist.get_world_size()
    mine = os.environ.get("GROUP_RANK") or socket.gethostname()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, mine)
    return hosts


def ranks_by_host(hosts: list[str]) -> list[tuple[int, ...]]:
    """The ranks of each host, hosts in the order of their first rank."""
    return [
        tuple(rank for rank in range(len(hosts)) if hosts[rank] == host)
        for host in dict.fromkeys(hosts)
    ]


def partitions(hosts: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Groups by name, given every rank's host; no grouping appears under two names."""
    world = len(hosts)
    by_host = ranks_by_host(hosts)
    groupings: dict[str, list[tuple[int, ...]]] = {}
    if len(by_host) > 1 and len({len(ranks) for ranks in by_host}) == 1:
        groupings["intra-host"] = by_host
        groupings["inter-host"] = list(zip(*by_host, strict=True))
    if world >= _ENOUGH_FOR_PAIRS:
        groupings["pairs"] = [(rank, rank + 1) for rank in range(0, world - 1, 2)]
    seen: list[list[tuple[int, ...]]] = [[tuple(range(world))]]
    for name in list(groupings):
        if groupings[name] in seen or len(groupings[name][0]) < 2:
            del groupings[name]
        else:
            seen.append(groupings[name])
    return groupings
