"""How findings put what they rest on: a few lines, each with the place it comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.explain.nccl.groups import Group, Member
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.explanation import Place
    from stepscope.records.nccl import Link, NcclLog

SHOWN = 4
DIGITS = re.compile(r"0x[0-9a-f]+|\d+")

Chosen = tuple[Group, Member, "Link"]


def chosen_links(groups: list[Group], wanted: Callable[[Link], bool]) -> list[Chosen]:
    return [
        (group, member, link) for group in groups for member, link in group.links() if wanted(link)
    ]


def link_lines(chosen: list[Chosen]) -> list[str]:
    """A line a communicator and transport, with one example of where it stands."""
    by_way: dict[tuple[str, str], list[Chosen]] = {}
    for each in chosen:
        by_way.setdefault((each[0].id, each[2].transport), []).append(each)
    lines = []
    for (_, transport), found in list(by_way.items())[:SHOWN]:
        group, member, link = found[0]
        pairs = sorted({(each.from_rank, each.to_rank or 0) for _, _, each in found})
        channels = sorted({channel for _, _, each in found for channel in each.channels})
        shown = ", ".join(f"{a} -> {b}" for a, b in pairs[:SHOWN])
        shown += f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
        lines.append(
            f"{group.words()}: ranks {shown} on {plural('channel', channels)} via {transport} "
            f"({member.at(link.line)})"
        )
    return [*lines, *more(len(by_way) - SHOWN, "other way")]


def facts(logs: Sequence[NcclLog], beginning: str) -> list[str]:
    """What NCCL said, once a host."""
    said: dict[tuple[str, str], str] = {}
    for log in logs:
        for process in log.processes:
            for fact in process.facts:
                if fact.text.startswith(beginning):
                    at = f"{Path(log.path).name}:{fact.line}"
                    key = process.host, DIGITS.sub("#", fact.text)
                    said.setdefault(key, f"{process.host} said: {fact.text} ({at})")
    return list(said.values())[:SHOWN]


def count_pairs(chosen: list[Chosen]) -> int:
    ends = ({link.from_rank, link.to_rank} for _, _, link in chosen)
    return len({(g.id, frozenset(end)) for (g, _, _), end in zip(chosen, ends, strict=True)})


def places(chosen: list[Chosen]) -> tuple[Place, ...]:
    """One a file."""
    first: dict[str, Place] = {}
    for _, member, link in chosen:
        first.setdefault(member.log.path, member.place(link.line))
    return tuple(list(first.values())[:SHOWN])


def plural(word: str, numbers: list[int]) -> str:
    """channel 3; ranks 0-3, 6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    shown += f" and {len(runs) - 8} more ranges" if len(runs) > 8 else ""
    return f"{word}{'' if len(set(numbers)) == 1 else 's'} {shown}"


def more(left: int, words: str) -> list[str]:
    return [f"{counted(left, words)} more"] if left > 0 else []
