"""All-reduces that overlap share the link: by hand."""

from __future__ import annotations

import numpy as np

from stepscope.predict.data_parallel import carried_bytes, list_all_reduces
from stepscope.records.job import KINDS, CollectiveCalls, Group


def calls(*spans: tuple[int, int, int]) -> CollectiveCalls:
    """All-reduces as (start, end, bytes)."""
    start, end, size = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    nothing = np.zeros(len(spans), np.int64)
    return CollectiveCalls(
        groups=(Group(name="0", size=2, ranks=(0, 1)),),
        kind=np.full(len(spans), KINDS.index("all_reduce"), np.int8),
        group=nothing.astype(np.int32),
        sequence=nothing,
        size_bytes=size,
        peer=nothing.astype(np.int32),
        step=nothing.astype(np.int32),
        arrival_ns=start,
        start_ns=start,
        end_ns=end,
        exposed_ns=nothing,
    )


OVERLAPPING = calls((300, 400, 50), (0, 100, 100), (50, 200, 300))


def test_two_at_once_count_as_one_of_all_their_bytes() -> None:
    """100 and 300 bytes from 0 to 200; 50 bytes alone for 100."""
    found = list_all_reduces(OVERLAPPING, np.ones(3, np.bool_), ranks=2)
    assert found.size_bytes.tolist() == [400, 50]
    assert found.dur_ns.tolist() == [200, 100]


def test_while_a_bucket_is_on_its_way_the_link_carries_others_too() -> None:
    """400 bytes in 200 ns: 200 in the 100 ns of the first, 300 in the 150 of the second."""
    carried = carried_bytes(OVERLAPPING, np.arange(3))
    assert carried is not None
    assert carried.tolist() == [50, 200, 300]


def test_one_after_the_other_each_has_the_link() -> None:
    alone = calls((0, 100, 100), (100, 200, 300))
    assert carried_bytes(alone, np.arange(2)) is None
    found = list_all_reduces(alone, np.ones(2, np.bool_), ranks=2)
    assert found.size_bytes.tolist() == [100, 300]


def test_unknown_sizes_share_nothing() -> None:
    assert carried_bytes(calls((0, 100, -1), (50, 200, 300)), np.arange(2)) is None
