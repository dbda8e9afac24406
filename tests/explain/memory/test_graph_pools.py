"""Pools of CUDA graphs in the account: no false fragmentation, no false promise of a batch."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import stepscope
from benches import analyse
from stepscope.errors import NotCapturedError
from stepscope.explain.memory.captured import (
    UNKNOWN_POOLS,
    batch_line,
    is_known_to_grow,
    predict_peak,
)
from stepscope.explain.rank import POOLS_NOT_RECORDED, explain_memory
from stepscope.explain.rank_without_steps import memory_of_snapshot
from stepscope.records.explanation import RankExplanation
from stepscope.trace.formats.snapshot import read_snapshot

from .. import build
from ..conftest import Read
from . import training

GB = 1_000_000_000


def graphed_run(golden: Path, tmp_path: Path, unknown: int) -> RankExplanation:
    """The recorded ResNet-18 as a graph: `unknown` of its activations are in a pool, unnamed."""
    folder = tmp_path / "rank-00000"
    shutil.copytree(golden / "h200-resnet18/rank-00000", folder)
    content = json.loads((folder / "memory.json").read_text())
    held = [content["peak"]["categories"]]
    if content.get("growing"):
        held.append(content["growing"]["categories"])
    held += [phase["categories"] for phase in content["phases"] if phase["phase"] == "forward"]
    for categories in held:
        categories["activations"] -= unknown
        categories["temporaries"] += unknown
    content |= {"pools": [{"pool": "0.1", "bytes": unknown}], "pools_unknown_bytes": unknown}
    (folder / "memory.json").write_text(json.dumps(content))
    (rank,) = stepscope.explain_job(tmp_path, cache=False).ranks
    return rank


def test_a_pool_of_unknown_content_promises_no_batch(golden: Path, tmp_path: Path) -> None:
    memory = graphed_run(golden, tmp_path, 2 * GB).memory
    assert memory is not None
    assert sum(size or 0 for size in memory.categories.values()) == memory.peak_bytes
    assert [(pool.pool, pool.size_bytes) for pool in memory.pools] == [("0.1", 2 * GB)]
    assert memory.largest_batch is None
    assert UNKNOWN_POOLS in memory.notes
    with pytest.raises(NotCapturedError, match="CUDA graphs"):
        predict_peak(memory, 2.0)


def test_a_small_unknown_part_widens_the_range(golden: Path, tmp_path: Path) -> None:
    memory = graphed_run(golden, tmp_path, GB // 2).memory
    assert memory is not None
    middle, low, high = predict_peak(memory, 2.0)
    assert middle - low >= GB // 2  # all of it may be fixed
    assert low < middle < high


def test_pools_grow_in_the_optimizers_step_too() -> None:
    held: dict[str, int | None] = {"parameters": 100, "temporaries": 50, "activations": 0}
    line = batch_line("peak", held, pools_bytes=30, in_optimizer=True)
    assert (line.fixed_bytes, line.scaling_bytes, line.maybe_fixed_bytes) == (120, 30, 30)
    assert not is_known_to_grow((line,), 30)
    assert is_known_to_grow((line,), 15)
    assert not is_known_to_grow((), 0)


def test_a_snapshots_pools_are_not_fragmentation(tmp_path: Path) -> None:
    def segment(address: int, pool: tuple[int, int], live: int) -> dict[str, Any]:
        blocks = [
            {"size": live, "requested_size": live, "address": address, "state": "active_allocated"},
            {"size": GB - live, "requested_size": 0, "address": address + live}
            | {"state": "inactive"},
        ]
        row = {"address": address, "total_size": GB, "device": 0, "segment_pool_id": pool}
        return row | {"blocks": blocks}

    path = tmp_path / "snapshot.pickle"
    segments = [segment(GB, (0, 0), 800_000_000), segment(4 * GB, (0, 1), 100_000_000)]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": []}))
    memory, _ = memory_of_snapshot(read_snapshot(path))
    assert memory.at_end is not None
    assert memory.at_end.share == pytest.approx(0.1)
    assert memory.at_end.largest_free_bytes == 200_000_000
    assert any("900 MB" in note for note in memory.notes)


def test_a_trace_of_graphs_says_that_pools_are_missing(read: Read) -> None:
    plain = explain_memory(analyse(read(*training.train())))
    assert plain is not None
    assert plain.fragmentation is not None
    assert plain.largest_batch is not None
    replay = build.graph([build.kernel("gemm", start=360, dur=9)], launched_at=350)
    memory = explain_memory(analyse(read(*training.train(), replay)))
    assert memory is not None
    assert memory.peak_bytes == plain.peak_bytes
    assert (memory.fragmentation, memory.largest_batch) == (None, None)
    assert POOLS_NOT_RECORDED in memory.notes
