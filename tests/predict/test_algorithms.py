"""The formulas against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.predict.collective_times import compare_algorithms, hop_of_line
from stepscope.records.hardware import CollectiveFit, Segment


def test_eight_ranks_by_hand() -> None:
    """alpha 10 µs, beta 0.1 ns/B, 8 MB: ring 14a + 1.75nb, tree 6a + 2nb, halving 6a + 1.75nb."""
    found = compare_algorithms(8_000_000, 8, 10_000.0, 0.1)
    assert found.times_ns == pytest.approx(
        {"ring": 1_540_000, "tree": 1_660_000, "halving_doubling": 1_460_000}
    )
    assert found.fastest == ("halving_doubling",)
    assert found.reduce_scatter_ns == found.all_gather_ns == pytest.approx(770_000)
    # 8a = 0.25nb
    (crossover,) = found.crossovers
    assert (crossover.below, crossover.above) == ("tree", "ring")
    assert crossover.size_bytes == pytest.approx(3_200_000)


def test_two_ranks_make_ring_and_halving_the_same() -> None:
    found = compare_algorithms(1000, 2, 5.0, 1.0)
    assert found.times_ns == pytest.approx({"ring": 1010, "tree": 2010, "halving_doubling": 1010})
    assert found.fastest == ("ring", "halving_doubling")
    assert found.crossovers == ()


def test_no_bytes_cost_only_hops() -> None:
    found = compare_algorithms(0, 4, 7.0, 1.0)
    assert found.times_ns == pytest.approx({"ring": 42, "tree": 28, "halving_doubling": 28})
    assert found.fastest == ("tree", "halving_doubling")


def test_a_hop_comes_out_of_a_measured_ring() -> None:
    """4 ranks: 6 alphas and 1.5 times the bytes."""
    segments = (
        Segment(from_bytes=1024, to_bytes=65536, alpha_ns=60_000, beta_ns_per_byte=2.0),
        Segment(from_bytes=65536, to_bytes=1 << 28, alpha_ns=90_000, beta_ns_per_byte=0.3),
    )
    fit = CollectiveFit(
        kind="all_reduce", group="world", group_size=4, segments=segments, measured=(),
        passes=4, noise=0.0, held_out=0.0, held_out_sizes=0.0,
    )  # fmt: skip
    hop = hop_of_line(fit.segments, fit.group_size)
    assert (hop.alpha_ns, hop.beta_ns_per_byte) == pytest.approx((10_000, 0.2))


@given(
    ranks=st.integers(3, 4096),
    alpha_ns=st.floats(1, 1e6),
    beta=st.floats(1e-4, 10),
)
def test_at_a_crossover_both_take_the_same(ranks: int, alpha_ns: float, beta: float) -> None:
    crossovers = compare_algorithms(1, ranks, alpha_ns, beta).crossovers
    assert crossovers
    for crossover in crossovers:
        if crossover.size_bytes < 1000:
            continue  # rounded to whole bytes below
        times = compare_algorithms(round(crossover.size_bytes), ranks, alpha_ns, beta).times_ns
        assert times[crossover.below] == pytest.approx(times[crossover.above], rel=1e-2)


@pytest.mark.parametrize("wrong", [(1, 1, 1.0, 1.0), (-1, 2, 1.0, 1.0), (1, 2, -1.0, 1.0)])
def test_wrong_use_is_said(wrong: tuple[int, int, float, float]) -> None:
    with pytest.raises(UsageError):
        compare_algorithms(*wrong)
