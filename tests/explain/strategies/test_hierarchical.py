"""Hierarchical all-reduces, by hand: which calls make one, and how long its parts take."""

from __future__ import annotations

import numpy as np

from stepscope.explain.job.hosts import find_hierarchical
from stepscope.records.job import KINDS, CollectiveCalls, Group, RankPart, RankSteps
from stepscope.ui.topics.distributed import describe_hierarchical

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
NEAR = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
FAR = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
# Kind, group (0 inside, 1 between, 2 all), bytes, start, end.
Calls = list[tuple[str, int, int, int, int]]


def part(rank: int, calls: Calls, steps: int = 1) -> RankPart:
    groups = [NEAR[rank], FAR[rank], (0, 1, 2, 3)]
    kind, group, size, start, end = (np.array(c) for c in zip(*calls, strict=True))
    long = np.int64
    zeros = np.zeros(len(calls), long)
    ones = np.ones(steps, long)
    return RankPart(
        rank=rank,
        calls=CollectiveCalls(
            groups=tuple(Group(name=str(i), size=len(g), ranks=g) for i, g in enumerate(groups)),
            kind=np.array([KINDS.index(name) for name in kind], np.int8),
            group=group.astype(np.int32), sequence=zeros, size_bytes=size.astype(long),
            peer=zeros.astype(np.int32), step=zeros.astype(np.int32), arrival_ns=start.astype(long),
            start_ns=start.astype(long), end_ns=end.astype(long), exposed_ns=zeros,
        ),
        pace=RankSteps(
            number=np.arange(steps), start_ns=0 * ones, dur_ns=1000 * ones, compute_ns=ones,
            exposed_comm_ns=ones, input_ns=0 * ones,
        ),
        host=HOSTS[rank],
    )  # fmt: skip


WHOLE: Calls = [
    ("reduce_scatter", 0, 800, 0, 30),
    ("all_reduce", 1, 400, 30, 130),
    ("all_gather", 0, 800, 130, 150),
]


def test_scattered_inside_reduced_between_gathered_inside() -> None:
    """30 + 20 ns inside the host, 100 between hosts; half of 800 bytes goes between."""
    (found,) = find_hierarchical([part(rank, WHOLE) for rank in range(4)], HOSTS)
    assert (found.inside_ns, found.between_ns) == (50, 100)
    assert (found.hosts, found.ranks_per_host, found.count) == (2, 2, 1.0)
    assert (found.reduce, found.gather, found.size_bytes) == ("reduce_scatter", "all_gather", 800)
    assert found.ranks == (0, 1, 2, 3)
    (section,) = describe_hierarchical([found])
    assert section.heading == "50 ns inside hosts, 100 ns between them, per step"


def test_times_are_per_step() -> None:
    (found,) = find_hierarchical([part(rank, WHOLE, steps=2) for rank in range(4)], HOSTS)
    assert (found.inside_ns, found.between_ns, found.count) == (25, 50, 0.5)


def test_a_reduce_and_a_broadcast_move_all_bytes() -> None:
    calls: Calls = [("reduce", 0, 800, 0, 30), ("all_reduce", 1, 800, 30, 130),
                    ("broadcast", 0, 800, 130, 150)]  # fmt: skip
    (found,) = find_hierarchical([part(0, calls), part(2, calls)], HOSTS)
    assert (found.reduce, found.gather) == ("reduce", "broadcast")


def test_sharded_parameters_keep_their_part() -> None:
    """HSDP scatters gradients inside the host and reduces them between hosts."""
    (found,) = find_hierarchical([part(rank, WHOLE[:2]) for rank in range(4)], HOSTS)
    assert found.gather is None
    assert (found.inside_ns, found.between_ns) == (30, 100)
    assert describe_hierarchical([found])[0].rows[0][-1].endswith("results stay sharded")


def test_other_orders_sizes_and_groups_are_none() -> None:
    def none(*calls: tuple[str, int, int, int, int]) -> bool:
        return not find_hierarchical([part(rank, [*calls]) for rank in range(4)], HOSTS)

    reduce_after: Calls = [("all_reduce", 1, 400, 0, 30), ("reduce_scatter", 0, 800, 30, 60)]
    assert none(*reduce_after)
    assert none(("reduce_scatter", 0, 800, 0, 30), ("all_reduce", 1, 800, 30, 60))
    assert none(("reduce_scatter", 0, 800, 0, 30), ("all_reduce", 2, 500, 30, 60))
    assert none(("reduce_scatter", 2, 1600, 0, 30), ("all_reduce", 1, 400, 30, 60))
    one_host = dict.fromkeys(HOSTS, "a")
    assert not find_hierarchical([part(rank, WHOLE) for rank in range(4)], one_host)


def test_two_at_once_keep_their_own_parts() -> None:
    second: Calls = [
        (kind, group, size, start + 5, end + 5) for kind, group, size, start, end in WHOLE
    ]
    both = sorted([*WHOLE, *second], key=lambda call: call[3])
    (found,) = find_hierarchical([part(0, both), part(2, both)], HOSTS)
    assert found.count == 2.0
    assert (found.inside_ns, found.between_ns) == (100, 200)
