"""A snapshot explained: its history played back byte by byte, who allocated, what failed."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import snapshots
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.explain.explain_job import explain_job
from stepscope.explain.rank_without_steps import find_in_memory, memory_of_snapshot
from stepscope.trace.formats.snapshot import _SnapshotReader
from stepscope.ui.cli.verbs import main
from stepscope.ui.topics.explanation_json import explanation_json

from .. import build

WEIGHTS = 3_000_320  # 3,000,000 in multiples of 512
ACTIVATIONS = 5_000_192
SMALL = 1024


def _memory(device: snapshots.Device, limit: int | None = None):
    snapshot = _SnapshotReader("made", 10**9).read(device.snapshot())
    return memory_of_snapshot(snapshot, limit)[0]


def test_the_peak_is_played_back_from_the_end():
    memory = _memory(snapshots.training())
    assert memory.source == "snapshot"
    assert memory.peak_bytes == WEIGHTS + ACTIVATIONS + SMALL
    assert memory.reserved_bytes == (4 + 6) * snapshots.MB
    assert memory.categories["other"] == memory.peak_bytes
    assert memory.categories["parameters"] is None


def test_sites_add_up_to_the_peak_and_name_the_users_line():
    memory = _memory(snapshots.training())
    assert sum(site.size_bytes for site in memory.by_site) == memory.peak_bytes
    first, second, third = memory.by_site
    assert (first.file, first.line, first.function) == ("/home/me/model.py", 31, "forward")
    assert first.size_bytes == ACTIVATIONS
    assert (second.file, second.line) == ("/home/me/train.py", 8)
    assert second.size_bytes == WEIGHTS
    assert third.operator == "at::native::empty_cuda"


def test_fragmentation_at_the_peak_and_at_the_end():
    memory = _memory(snapshots.training())
    reserved = 10 * snapshots.MB
    assert memory.fragmentation.at == "peak"
    assert memory.fragmentation.share == pytest.approx(1 - memory.peak_bytes / reserved)
    assert memory.at_end.allocated_bytes == WEIGHTS
    assert memory.at_end.share == pytest.approx(1 - WEIGHTS / reserved)
    assert memory.at_end.largest_free_bytes == ACTIVATIONS


def test_a_history_that_lost_its_beginning_still_ends_right():
    device = snapshots.training()
    device.forget(6)  # the weights' allocation and the first activations'
    memory = _memory(device)
    assert memory.peak_bytes == WEIGHTS + ACTIVATIONS + SMALL
    assert sum(site.size_bytes for site in memory.by_site) == memory.peak_bytes
    # blocks that are alive at the end say themselves who made them
    assert ("/home/me/train.py", 8) in {(site.file, site.line) for site in memory.by_site}


def test_without_a_history_the_last_state_is_told():
    device = snapshots.training()
    device.events.clear()
    snapshot = device.snapshot()
    snapshot["device_traces"] = []
    memory, _ = memory_of_snapshot(_SnapshotReader("made", 10**9).read(snapshot))
    assert memory.peak_bytes == WEIGHTS
    assert memory.timeline is None
    assert memory.fragmentation.at == "end"
    assert any("no history" in note for note in memory.notes)


def test_without_stacks_it_says_how_to_get_them():
    device = snapshots.Device()
    device.alloc(1000)
    memory = _memory(device)
    assert memory.by_site[0].operator == "(no stack recorded)"
    assert any("stacks='python'" in note for note in memory.notes)


def test_a_failed_request_gives_the_limit_and_the_verdict(tmp_path):
    device = snapshots.training()
    device.fail(8_000_000, 1_000_000, snapshots.MODEL)
    memory = _memory(device)
    (failed,) = memory.out_of_memory
    assert (failed.asked_bytes, failed.device_free_bytes) == (8_000_000, 1_000_000)
    assert (failed.allocated_bytes, failed.reserved_bytes) == (WEIGHTS, 10 * snapshots.MB)
    assert memory.limit_bytes == 10 * snapshots.MB + 1_000_000
    explanation = explain_job(snapshots.write(tmp_path / "oom.pickle", device.snapshot()))
    assert explanation.verdict.startswith("Out of memory: A request for 8.00 MB")
    assert explanation.findings[0].where[0].file == "/home/me/model.py"
    assert explanation.findings[0].severity == "high"


def test_the_timeline_keeps_the_peak_and_both_levels():
    line = _memory(snapshots.training()).timeline
    assert max(line.allocated_bytes) == WEIGHTS + ACTIVATIONS + SMALL
    assert line.reserved_bytes[-1] == 10 * snapshots.MB
    assert line.time_ns[0] == 0
    assert list(line.time_ns) == sorted(line.time_ns)


@given(
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 3_000_000)), min_size=1, max_size=60),
    lost=st.integers(0, 40),
)
def test_any_history_agrees_with_counting_along(actions, lost):
    """Counted while it happens, in a way of its own: blocks alive, in multiples of 512."""
    device, alive, peaks = snapshots.Device(), [], []
    for frees, size in actions:
        if frees and alive:
            device.free(alive.pop(size % len(alive))[0])
        else:
            alive.append((device.alloc(size), -(-size // 512) * 512))
        peaks.append((len(device.events), sum(held for _, held in alive)))
    device.forget(min(lost, len(device.events) - 1))
    first = peaks[-1][0] - len(device.events)
    memory = _memory(device)
    assert memory.at_end is not None
    assert memory.at_end.allocated_bytes == peaks[-1][1]
    # the state right before an event that was kept counts where the ring begins inside a step
    seen = [held for at, held in peaks if at > first]
    assert memory.peak_bytes >= max(seen)
    if first == 0:
        assert memory.peak_bytes == max(seen)
        assert sum(site.size_bytes for site in memory.by_site) == memory.peak_bytes


def test_torchs_own_viewer_counts_the_same():
    viz = pytest.importorskip("torch.cuda._memory_viz")
    made = snapshots.training().snapshot()
    text = viz.segsum(made)
    assert "segments: 2" in text
    assert "total_reserved: 10.0MiB" in text
    assert "total_allocated: 2.9MiB" in text
    memory, _ = memory_of_snapshot(_SnapshotReader("made", 10**9).read(made))
    assert memory.at_end.reserved_bytes == 10 * snapshots.MB
    assert f"{memory.at_end.allocated_bytes / snapshots.MB:.1f}MiB" == "2.9MiB"


def test_explain_takes_a_snapshot_and_says_null_where_there_is_no_time(tmp_path):
    path = snapshots.write(tmp_path / "s.pickle", snapshots.training().snapshot())
    explanation = explain_job(path)
    said = json.loads(json.dumps(explanation_json(explanation)))
    (rank,) = said["ranks"]
    assert rank["kind"] == "cuda"
    assert rank["events"] == 22
    assert set(rank["timeline_ns"].values()) == {None}
    assert set(rank["idle_ns"].values()) == {None}
    assert said["budget"]["step_ms"] is None
    assert rank["memory"]["peak_bytes"] == WEIGHTS + ACTIVATIONS + SMALL
    assert rank["memory"]["categories"]["other"] == rank["memory"]["peak_bytes"]
    assert [note["id"] for note in rank["quality"]] == ["memory-only"]
    assert said["findings"][0]["id"] == "healthy"
    assert "5.00 MB" in said["verdict"]


def test_a_snapshot_among_other_files_is_refused(tmp_path):
    path = snapshots.write(tmp_path / "s.pickle", snapshots.training().snapshot())
    trace = build.write(tmp_path / "t.json", build.op("aten::mm", start=0, dur=1))
    with pytest.raises(UsageError, match="give it alone"):
        explain_job(path, trace)


def test_a_hostile_pickle_ends_the_command_with_3_and_a_sentence(tmp_path, capsys, monkeypatch):
    path = tmp_path / "s.pickle"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnreadableInputError):
        explain_job(path)
    monkeypatch.setattr(sys, "argv", ["stepscope", "explain", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert "Nothing of it was run" in capsys.readouterr().err


def test_a_long_history_is_thinned():
    device = snapshots.Device()
    for number in range(3000):
        address = device.alloc(1000 + number)
        device.free(address)
    line = _memory(device).timeline
    assert 2 < len(line.time_ns) <= 402
    assert max(line.allocated_bytes) == int(np.ceil(3999 / 512)) * 512


def test_a_history_that_contradicts_the_blocks_is_not_believed():
    """An allocation that the last state does not show, and an address given out twice."""
    device = snapshots.training()
    device._note("alloc", 0x1234, 1 << 40, snapshots.MODEL)
    device._note("alloc", device.segments[0]["address"], 3_000_000, snapshots.LOADING)
    memory, notes = memory_of_snapshot(_SnapshotReader("made", 10**9).read(device.snapshot()))
    assert memory.peak_bytes == WEIGHTS + ACTIVATIONS + SMALL
    assert sum(site.size_bytes for site in memory.by_site) == memory.peak_bytes
    (note,) = notes
    assert (note.id, note.count) == ("contradictions", 1)
    assert "1 allocation of the history" in note.detail


def test_reserved_is_not_known_where_the_history_gives_back_what_was_never_taken():
    device = snapshots.training()
    device._note("segment_alloc", 0x1234, 1 << 40, None)
    device.fail(8_000_000, 1_000_000, snapshots.MODEL)
    memory, notes = memory_of_snapshot(_SnapshotReader("made", 10**9).read(device.snapshot()))
    assert memory.reserved_bytes is None
    assert memory.fragmentation is None
    assert memory.timeline.reserved_bytes is None
    assert memory.limit_bytes is None
    assert memory.at_end.reserved_bytes == 10 * snapshots.MB
    assert ["reserved memory over time" in note.detail for note in notes] == [True]
    (found,) = (f for f in find_in_memory(memory) if f.id == "memory-near-limit")
    assert 0 <= found.share <= 1
    assert "the device had 1.00 MB free" in found.evidence[0]


def test_a_limit_below_the_peak_is_a_share_of_one():
    memory = _memory(snapshots.training(), limit=1_000_000)
    (found,) = (f for f in find_in_memory(memory) if f.id == "memory-near-limit")
    assert found.share == 1
    assert "800% of the available memory" in found.summary
