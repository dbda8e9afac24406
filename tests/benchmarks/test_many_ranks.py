"""The job that the benchmark writes is one that ranks could have recorded."""

import pytest

import many_ranks
from stepscope import explain_job


@pytest.fixture
def few_variants(monkeypatch):
    """Each takes a while to write."""
    monkeypatch.setattr(many_ranks, "VARIANTS", 3)
    monkeypatch.setattr(many_ranks, "LATE_RANK", 1)


def test_every_rank_is_there_with_its_collectives_and_its_clock(tmp_path, few_variants):
    text_bytes, file_bytes = many_ranks.write_job(tmp_path / "job", "json", 3, 100_000)
    assert 100_000 <= text_bytes <= file_bytes < 200_000
    found = explain_job(tmp_path / "job", cache=False)
    assert [(rank.rank, rank.world_size) for rank in found.ranks] == [(0, 3), (1, 3), (2, 3)]
    for rank in found.ranks:
        (reduces,) = rank.collectives
        assert (reduces.kind, reduces.size_bytes) == ("all_reduce", 25_000_000)
        assert reduces.count == 6 * len(rank.steps.steps)
        assert not [note for note in rank.quality if note.id in ("malformed", "truncated")]
    assert len({rank.steps.steps[0].start_ns for rank in found.ranks}) == 3


def test_the_late_rank_waits_least(tmp_path, few_variants):
    many_ranks.write_job(tmp_path / "job", "json", 3, 60_000)
    ranks = explain_job(tmp_path / "job", cache=False).ranks
    assert min(ranks, key=lambda rank: rank.timeline.comm_ns).rank == 1


def test_a_packed_rank_is_as_long_as_it_says(tmp_path, few_variants):
    text_bytes, file_bytes = many_ranks.write_job(tmp_path / "job", "gz", 1, 60_000)
    assert text_bytes > 10 * file_bytes
    (rank,) = explain_job(tmp_path / "job", cache=False).ranks
    assert rank.events > 5000
