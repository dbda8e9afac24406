"""Bus bandwidths of the shared recordings, by hand from what stands in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import explain_job


def test_two_a100(shared: Path) -> None:
    """The first bucket: 2,049,000 floats in three steps. With two ranks busbw = algbw."""
    found = explain_job(shared / "traces/third_party/a100_nccl_rank0of2.json.gz")
    row = next(row for row in found.ranks[0].collectives if row.size_bytes == 4 * 2_049_000)
    assert (row.kind, row.group_size, row.count) == ("all_reduce", 2, 3)
    assert row.algbw_gb_s == pytest.approx(3 * 4 * 2_049_000 / row.total_ns)
    assert row.busbw_gb_s == pytest.approx(row.algbw_gb_s)


def test_two_of_128_ranks(shared: Path) -> None:
    """Sizes stand on the `nccl:` annotations; the job has one group of all 128."""
    third_party = shared / "traces/third_party"
    found = explain_job(
        third_party / "pair_rank0of128.json.gz", third_party / "pair_rank1of128.json.gz"
    )
    by_hand = {
        # kind, bytes: factor of the definitions with n = 128
        ("all_reduce", 4 * 19_618_307): 2 * 127 / 128,
        ("all_gather", 128 * 16_777_216): 127 / 128,
        ("all_to_all", 419_430_400): 127 / 128,
    }
    rows = [row for rank in found.ranks for row in rank.collectives]
    for (kind, size), factor in by_hand.items():
        row = next(row for row in rows if (row.kind, row.size_bytes) == (kind, size))
        assert row.group_size == 128
        assert row.busbw_gb_s == pytest.approx(size * row.count / row.total_ns * factor)
    reduced = [row for row in rows if row.size_bytes == 4 * 19_618_307]
    assert [row.count for row in reduced] == [1, 2]
    assert found.job is not None
    joined = next(row for row in found.job.collectives if row.size_bytes == 4 * 19_618_307)
    # the ranks' kernels of the first lasted 11.727 and 8.370 ms: 78.47 MB / 8.370 ms * 254 / 128
    assert joined.transfer_ns == 8_370_000
    assert joined.busbw_gb_s == pytest.approx(18.605, abs=0.001)
