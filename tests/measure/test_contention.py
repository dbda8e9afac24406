"""An all-reduce and compute at the same time: what is measured, and what is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stepscope.predict.collective_times import fit_contention

if TYPE_CHECKING:
    from collections.abc import Iterator

KB = 1 << 10


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one rank: the calls are made, nothing is sent."""
    pytest.importorskip("torch.distributed")
    import torch.distributed as dist

    from stepscope.measure.calibrate.collectives import GroupPlace

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield GroupPlace(handle=dist.group.WORLD, ranks=(0,), rank=0)
    finally:
        dist.destroy_process_group()


def test_each_size_is_measured_alone_and_beside_compute(alone: Any) -> None:
    import torch

    from stepscope.measure.calibrate.collectives import Buffers, ContentionTimer

    buffers = Buffers.allocate(512 * KB // 4, torch.device("cpu"))
    (found,) = ContentionTimer(alone, buffers).run(512 * KB, quick=True)
    assert found["size_bytes"] == 256 * KB  # 1 MiB does not fit
    assert set(found) == {"size_bytes", "alone_ns", "compute_ns", "slowed_ns", "lasts_ns"}
    # How they compare is the machine's affair: each is a median of rounds of its own.
    assert all(value > 0 for value in found.values())


def row(size: int, alone: float, compute: float, slowed: float, lasts: float) -> dict[str, float]:
    return {
        "size_bytes": size, "alone_ns": alone, "compute_ns": compute, "slowed_ns": slowed,
        "lasts_ns": lasts,
    }  # fmt: skip


def test_what_compute_loses_is_a_share_of_what_the_all_reduces_take() -> None:
    rows = [row(1000, 10, 100, 104, 30), row(3000, 30, 300, 324, 50)]
    found = fit_contention(2, rows)
    assert found is not None
    assert found.lost == pytest.approx(28 / 40)
    (line,) = found.beside
    assert (line.alpha_ns, line.beta_ns_per_byte) == (pytest.approx(20), pytest.approx(0.01))


def test_it_never_lasts_shorter_beside_compute_than_alone() -> None:
    found = fit_contention(2, [row(1000, 10, 100, 100, 8), row(2000, 20, 100, 100, 15)])
    assert found is not None
    assert found.lost == 0
    assert found.beside[0].at(2000) == pytest.approx(20)


def test_nothing_measured_is_nothing_said() -> None:
    assert fit_contention(2, []) is None
