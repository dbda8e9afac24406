"""memory.json of run folders, first of all of one recorded on an H200."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

import stepscope
from stepscope.explain.explain_job import JobTraces
from stepscope.explain.memory.captured import capture_lines, peak_at, predict_peak
from stepscope.explain.rank import truncate_tables
from stepscope.records.memory import CATEGORIES, CapturedMemory, CapturedPeak
from stepscope.ui.topics.explanation_json import explanation_json


@pytest.fixture(scope="module")
def memory():
    golden = Path(__file__).parents[2] / "golden"
    (rank,) = stepscope.explain_job(golden / "h200-resnet18", cache=False).ranks
    assert rank.memory is not None
    return rank.memory


def test_categories_add_up_to_the_peak_to_the_byte(memory):
    assert memory.source == "capture"
    assert memory.peak_bytes == 3_074_728_616
    assert sum(memory.categories.values()) == memory.peak_bytes
    assert list(memory.categories) == list(CATEGORIES)
    for moment in memory.moments:
        assert sum(moment.categories.values()) == moment.allocated_bytes


def test_the_peak_stands_between_the_moments_in_order(memory):
    assert [moment.name for moment in memory.moments] == [
        "before the step",
        "peak",
        "after forward",
        "after backward",
        "after optimizer",
    ]
    assert memory.phase == "forward"
    assert memory.growth.bytes_per_step == 0


def test_what_is_reserved_and_unused(memory):
    assert memory.reserved_bytes == 5_096_079_360
    assert memory.fragmentation.share == pytest.approx(1 - 3_074_728_616 / 5_096_079_360)


def test_modules_add_up_to_the_activations_alive_together(memory):
    assert sum(each.size_bytes for each in memory.by_module) == 2_762_500_612


def test_theory_takes_the_models_own_bytes(memory):
    four = 4 * 11_689_512  # fp32 parameters, their gradients, SGD's momentum
    theory = memory.theory
    assert (theory.parameters_bytes, theory.gradients_bytes, theory.optimizer_bytes) == (
        four,
        four,
        four,
    )
    by = {(row.stage, row.ranks): row.size_bytes for row in theory.zero}
    assert by[0, 8] == 3 * four
    assert by[1, 8] == 2 * four + four // 8
    assert by[3, 8] == 3 * four // 8
    assert theory.activations is None  # no transformer: measured per sample


def test_the_batch_is_known_and_the_device_limits_it(memory):
    fit = memory.largest_batch
    assert (fit.batch, fit.limit_bytes, fit.limit_from) == (128, 150_109_880_320, "device")
    assert fit.low < fit.largest < fit.high
    middle, low, high = predict_peak(memory, 2.0)
    assert low < middle < high
    assert predict_peak(memory, 1.0)[0] == memory.peak_bytes
    states = 3 * 4 * 11_689_512 + 38_560
    assert middle < 2 * memory.peak_bytes - states


def _run(golden, tmp_path, change):
    folder = tmp_path / "rank-00000"
    shutil.copytree(golden / "h200-resnet18/rank-00000", folder)
    content = json.loads((folder / "memory.json").read_text())
    change(content)
    (folder / "memory.json").write_text(json.dumps(content))
    (rank,) = stepscope.explain_job(tmp_path, cache=False).ranks
    return rank


def test_what_was_not_captured_stays_unknown(golden, tmp_path):
    def cpu(content):
        content["peak"] |= {"allocated_bytes": None, "reserved_bytes": None, "phase": "forward"}
        content["peak"]["categories"] |= {"temporaries": None, "other": None}
        content["device"] = "cpu"

    memory = _run(golden, tmp_path, cpu).memory
    assert memory.categories["temporaries"] is None
    assert memory.reserved_bytes is None
    assert memory.fragmentation is None
    assert memory.limit_bytes is None
    assert memory.peak_bytes == sum(held or 0 for held in memory.categories.values())
    assert memory.largest_batch.largest is None


def test_a_damaged_file_is_said_and_nothing_else_is_lost(golden, tmp_path):
    folder = tmp_path / "rank-00000"
    shutil.copytree(golden / "h200-resnet18/rank-00000", folder)
    (folder / "memory.json").write_text('{"device": "cuda", "peak"')
    (rank,) = stepscope.explain_job(tmp_path, cache=False).ranks
    assert rank.memory is None
    assert "memory-unreadable" in {note.id for note in rank.quality}
    assert rank.kernels


def test_a_limit_given_takes_the_devices_place(golden):
    path = golden / "h200-resnet18"
    explanation, _ = JobTraces([path], cache=False, memory_limit=3_100_000_000).explain()
    (rank,) = explanation.ranks
    assert rank.memory.largest_batch.limit_from == "given"
    assert "memory-near-limit" in {finding.id for finding in rank.findings}


def test_the_json_has_the_contracts_names_and_the_rest(golden):
    explanation = stepscope.explain_job(golden / "h200-resnet18", cache=False)
    found = explanation_json(explanation)["ranks"][0]["memory"]
    assert found["peak_bytes"] == sum(found["categories"].values())
    assert list(found["categories"]) == list(CATEGORIES)
    assert set(found) >= {
        "reserved_bytes",
        "by_module",
        "by_site",
        "timeline",
        "fragmentation",
        "growth",
        "theory",
        "largest_batch",
        "limit_bytes",
        "source",
    }
    assert msgspec.json.decode(msgspec.json.encode(found)) == json.loads(json.dumps(found))


def test_shortened_tables_still_add_up(memory, golden):
    (rank,) = stepscope.explain_job(golden / "h200-resnet18", cache=False).ranks
    short = truncate_tables(rank, 3).memory
    assert len(short.by_module) == 4
    assert short.by_module[-1].module == "(others)"
    assert sum(each.size_bytes for each in short.by_module) == 2_762_500_612
    assert short.categories == memory.categories


def test_a_larger_batch_has_its_peak_where_most_of_what_grows_is_held():
    """Of few samples the optimizer's update is the peak: activations are gone then."""
    update = CapturedPeak(phase="optimizer", categories={"parameters": 100, "temporaries": 300})
    loss = CapturedPeak(phase="backward", categories={"parameters": 100, "activations": 200})
    held = CapturedMemory(device="cuda", peak=update, growing=loss)
    assert [line.moment for line in capture_lines(held, 0)] == ["peak", "in backward"]
    assert peak_at(capture_lines(held, 0), 1.0)[0] == 400
    assert peak_at(capture_lines(held, 0), 4.0)[0] == 100 + 4 * 200
    older = CapturedMemory(device="cuda", peak=update)
    assert [line.moment for line in capture_lines(older, 0)] == ["peak"]


def test_batches_prepared_for_later_grow_like_the_steps_own():
    peak = CapturedPeak(phase="backward", categories={"activations": 200, "other": 100})
    held = CapturedMemory(device="cuda", peak=peak, inputs_bytes=10, prepared_bytes=70)
    assert peak_at(capture_lines(held, 0), 0.5)[0] == 20 + (200 + 80) / 2
