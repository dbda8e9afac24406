"""Which answers the benchmark of hosts counts as right."""

from __future__ import annotations

from typing import Any

import pytest

from hosts import Planted, judge


def planted(plant: str, hosts: int = 2, ranks: int = 2) -> Planted:
    """Rank 2 or node1 is slow: with two ranks on each host, rank 2 is node1's first."""
    return Planted(plant=plant, hosts=hosts, ranks=ranks, rank=2, host="node1")


def entry(scope: str, **more: Any) -> dict[str, Any]:
    nothing = {"rank": None, "host": None, "link": None, "cause": "compute"}
    return {**nothing, "scope": scope, **more}


RANK = entry("rank", rank=2, host="node1")
HOST = entry("host", host="node1", ranks=[2, 3])
LINK = entry("link", cause="link", host="node1", link=["node1", "node0"])


def test_nobody_is_named() -> None:
    assert judge(planted("even"), []) == "right"
    assert judge(planted("slow-host"), []) == "silent"


@pytest.mark.parametrize(
    ("plant", "right"), [("slow-rank", RANK), ("slow-host", HOST), ("slow-link", LINK)]
)
def test_only_what_was_planted_is_right(plant: str, right: dict[str, Any]) -> None:
    for named in (RANK, HOST, LINK):
        assert judge(planted(plant), [named]) == ("right" if named is right else "wrong")
    assert judge(planted(plant), [right, entry("rank", rank=0, host="node0")]) == "wrong"
    assert judge(planted("even"), [right]) == "wrong"


def test_a_host_with_one_rank_is_that_rank() -> None:
    alone = Planted(plant="slow-host", hosts=4, ranks=1, rank=0, host="node1")
    assert judge(alone, [entry("rank", rank=1, host="node1")]) == "right"
    assert judge(alone, [entry("rank", rank=2, host="node2")]) == "wrong"


def test_two_hosts_have_one_link_and_four_have_one_each() -> None:
    either = entry("link", cause="link", link=["node0", "node1"])
    assert judge(planted("slow-link"), [either]) == "right"
    assert judge(planted("slow-link", hosts=4), [either]) == "wrong"
    assert judge(planted("slow-link", hosts=4), [LINK]) == "right"
