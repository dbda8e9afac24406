"""A step's operators are timed by a made-up prober; what-ifs then use the times."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from traced_times import call_key, traced_times

from stepscope.errors import NotCapturedError, UsageError
from stepscope.predict.operator_library import library_file, read_times, software_of
from stepscope.records.hardware import ProbedDevice
from stepscope.records.prediction import Prediction, Setting
from stepscope.ui.api import open_bench
from stepscope.ui.probe import modes_of, probe_step

TracedTimes = dict[tuple[str, str], tuple[float, float]]
H200 = ProbedDevice(kind="cuda", device="NVIDIA H200")
BF16 = Setting(name="precision", value="bf16")


class MadeUpProber:
    """Forward takes 0.1 ms, backward twice as long, or both as long as `traced`; in bf16 a quarter
    of it. Counts its clock."""

    def __init__(
        self, device: ProbedDevice = H200, fails: str = "", traced: TracedTimes | None = None
    ) -> None:
        self._device, self._fails, self._traced = device, fails, traced or {}
        self.now = 0.0
        self.timed: list[tuple[str, str]] = []

    def device(self) -> ProbedDevice:
        return self._device

    def clock(self) -> float:
        return self.now

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if request["name"] == self._fails:
            return {"error": "its process ended (signal SIGSEGV)"}
        if request["do"] == "describe":
            first = next((dims for dims in request["shapes"] if dims), [])
            return {"outputs": [[first, "float", True]]}
        self.now += seconds
        self.timed.append((request["name"], request["mode"]))
        times_ns = self._traced.get(call_key(request), (100_000.0, 200_000.0))
        gain = 4 if request["mode"] == "bf16" else 1
        timing = {"spread": 0.01, "repeats": 9}
        forward, backward = ({"ns": ns / gain, **timing} for ns in times_ns)
        return {"forward": forward, "backward": backward}


@pytest.fixture
def bench(golden: Path) -> Any:
    return open_bench(str(golden / "h200-resnet18"), cache=False, quiet=True)[0]


def same_software(bench: Any) -> ProbedDevice:
    """As the golden trace's torch and driver."""
    versions = dict(part.split(" ", 1) for part in software_of(bench.context))
    return replace(H200, **versions)


def probe(bench: Any, prober: MadeUpProber, *modes: str, budget_s: float = 20.0) -> Any:
    return probe_step(bench.context, modes, prober, budget_s=budget_s, clock=prober.clock)


def assumed(prediction: Prediction) -> str:
    return " ".join(prediction.assumptions)


def test_nearly_all_device_time_belongs_to_calls_that_can_be_timed(bench: Any) -> None:
    report = probe(bench, MadeUpProber())
    assert report.probed_share == pytest.approx(1.0)
    assert report.traced_ms == pytest.approx(bench.context.graph.tasks.dur_ns.sum() / 1e6)
    assert sum(row.traced_ms for row in report.operators) == pytest.approx(report.traced_ms)
    convolutions = [row for row in report.operators if row.name == "aten::conv2d"]
    assert convolutions
    assert all(row.probed_ms == pytest.approx(0.3 * row.count) for row in convolutions)


def test_the_optimizer_is_timed_without_a_backward_and_in_no_other_precision(bench: Any) -> None:
    prober = MadeUpProber()
    report = probe(bench, prober, "bf16")
    updates = [row for row in report.operators if row.name.startswith("aten::_f")]
    assert updates
    for row in updates:
        assert row.probed_ms == pytest.approx(0.1 * row.count)
        assert row.modes_ms["bf16"] == row.probed_ms
    assert {mode for name, mode in prober.timed if name == updates[0].name} == {""}


def test_the_most_expensive_calls_come_first_until_the_budget_is_over(bench: Any) -> None:
    prober = MadeUpProber()
    report = probe(bench, prober, budget_s=0.05)
    assert 0 < len(prober.timed) < len(report.operators)
    timed = [row.probed_ms is not None for row in report.operators]
    assert timed == sorted(timed, reverse=True)
    assert {row.why for row in report.unprobed} == {"the budget was over before its turn"}
    assert sum(row.share for row in report.unprobed) == pytest.approx(1 - report.probed_share)


def test_a_call_that_crashes_is_listed_with_its_share_and_the_rest_goes_on(bench: Any) -> None:
    report = probe(bench, MadeUpProber(fails="aten::max_pool2d"), "bf16")
    (as_traced, narrow) = report.unprobed
    assert as_traced.name == narrow.name == "aten::max_pool2d"
    assert "SIGSEGV" in as_traced.why
    assert report.probed_share == pytest.approx(1 - as_traced.share)


def test_whatif_uses_probed_times_and_says_their_share(bench: Any) -> None:
    modelled = bench.predict([BF16])
    assert "library" not in assumed(modelled)
    probe(bench, MadeUpProber(same_software(bench)), "bf16")
    probed = bench.predict([BF16])
    assert "probed, 0% from similar operators" in assumed(probed)
    assert probed.device_ms != pytest.approx(modelled.device_ms, rel=0.01)


def test_times_of_another_torch_are_remembered_not_probed(bench: Any) -> None:
    older = MadeUpProber(replace(H200, torch="1.0"), traced=traced_times(bench.context))
    probe(bench, older, "bf16")
    words = assumed(bench.predict([BF16]))
    assert ": 0% probed, 100% from similar operators" in words


def test_a_probe_far_from_the_trace_does_not_count(bench: Any) -> None:
    """It ran something else, such as groups of rows of other sizes: the model stays."""
    modelled = bench.predict([BF16])
    traced = traced_times(bench.context)
    for factor, counts in ((1.4, True), (1 / 1.4, True), (1.6, False), (1 / 1.6, False)):
        slower = {call: (factor * one, factor * two) for call, (one, two) in traced.items()}
        probe(bench, MadeUpProber(same_software(bench), traced=slower), "bf16")
        probed = bench.predict([BF16])
        assert (probed.device_ms == pytest.approx(modelled.device_ms)) != counts
        assert ("100% probed" in assumed(probed)) == counts


def test_a_step_that_is_not_all_probed_keeps_its_model_for_the_rest(bench: Any) -> None:
    prober = MadeUpProber(fails="aten::batch_norm")
    report = probe(bench, prober, "bf16")
    assert report.probed_share < 0.9
    words = assumed(bench.predict([BF16]))
    assert "modelled" in words
    assert "100% probed" not in words


def test_a_probe_elsewhere_does_not_count_for_this_trace(bench: Any) -> None:
    other = ProbedDevice(kind="cuda", device="NVIDIA L4")
    report = probe(bench, MadeUpProber(other), "bf16")
    (note,) = report.notes
    assert "the trace ran on NVIDIA H200, the probe on NVIDIA L4" in note
    assert "library" not in assumed(bench.predict([BF16]))
    assert {time.place for time in read_times()} == {"NVIDIA L4"}


def test_a_damaged_library_is_reported_and_worked_without(bench: Any) -> None:
    library_file().parent.mkdir(parents=True)
    library_file().write_bytes(b"x" * 5000)
    report = probe(bench, MadeUpProber(), "bf16")
    assert report.saved == 0
    assert "is damaged" in report.notes[0]
    prediction = bench.predict([BF16])
    assert prediction.applied
    assert "does not use them" in assumed(prediction)


def test_a_trace_without_shapes_cannot_be_probed(write_trace: Callable[..., Path]) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": n, "dur": 1}
        for n in range(0, 20, 2)
    ]
    mark = {"cat": "user_annotation", "name": "ProfilerStep#1", "dur": 20}
    events.append(events[0] | mark)
    bench = open_bench(str(write_trace(events)), cache=False, quiet=True)[0]
    with pytest.raises(NotCapturedError, match="no operator shapes"):
        probe(bench, MadeUpProber())


def test_only_precisions_and_batches_can_be_asked_for() -> None:
    twice = Setting(name="batch", value="x2")
    assert modes_of([BF16, BF16, Setting(name="precision", value="tf32")]) == ("bf16", "tf32")
    assert modes_of([BF16, twice]) == ("bf16", "batch=x2")
    with pytest.raises(UsageError, match="with precision"):
        modes_of([Setting(name="workers", value="2")])
    with pytest.raises(UsageError, match="choose one of tf32, bf16, fp16"):
        modes_of([Setting(name="precision", value="fp8")])


def test_every_number_of_the_probe_has_an_entry(bench: Any) -> None:
    from stepscope.ui.topics.measurements import probe_json

    body = json.loads(json.dumps(probe_json(probe(bench, MadeUpProber(fails="aten::relu")))))
    content = (Path(__file__).parents[2] / "docs/reference/fields.toml").read_text()
    tables = [table for table in tomllib.loads(content)["table"] if table["at"] == "probe:"]
    keys = ", ".join(key for table in tables for key in table["fields"])
    entries = set(re.findall(r"(\w+)(?:\[\])?(?:\.\*)?(?:,|$)", keys))
    names = {*body, *body["operators"][0], *body["unprobed"][0]}
    words = {"schema", "place", "traced_place", "software", "modes", "operators", "unprobed"}
    words |= {"notes", "library", "name", "shapes", "mode", "why"}
    assert names - words - entries == set()
