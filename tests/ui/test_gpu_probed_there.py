"""A step on another GPU by a probe of its operators there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from traced_times import call_key, traced_times

from stepscope.errors import UnreadableInputError
from stepscope.predict.operator_library import (
    find_probed_elsewhere,
    library_file,
    read_places,
    read_times,
    save_times,
    software_of,
)
from stepscope.predict.other_gpu.gpu import find_gpu
from stepscope.predict.other_gpu.step import move_context
from stepscope.records.hardware import ProbedDevice
from stepscope.ui.api import open_bench
from stepscope.ui.probe import probe_step


class FixedProber:
    """Every pass of every call takes the same time, or `ns` times what it took in a trace."""

    def __init__(self, device: str, torch: str, ns: float, traced: Any = None) -> None:
        self._device = ProbedDevice(kind="cuda", device=device, torch=torch)
        self._ns, self._traced = ns, traced

    def device(self) -> ProbedDevice:
        return self._device

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert seconds > 0
        if request["do"] == "describe":
            return {"outputs": []}
        timing = {"spread": 0.01, "repeats": 9}
        each = self._traced[call_key(request)] if self._traced else (1.0, 1.0)
        forward, backward = ({"ns": self._ns * ns, **timing} for ns in each)
        return {"forward": forward, "backward": backward}


@pytest.fixture
def bench(golden: Path) -> Any:
    return open_bench(str(golden / "h200-resnet18"), cache=False, quiet=True)[0]


def probe(bench: Any, device: str, ns: float, traced: Any = None) -> Any:
    versions = dict(part.split(" ", 1) for part in software_of(bench.context))
    prober = FixedProber(device, versions.get("torch", ""), ns, traced)
    return probe_step(bench.context, (), prober, budget_s=1e6)


def test_operators_timed_there_replace_the_model(bench: Any) -> None:
    blind = move_context(bench.context, find_gpu("L4"))
    report = probe(bench, "NVIDIA L4", 1e6)
    assert any("`whatif --set gpu=` and `gpus` use these times" in note for note in report.notes)
    moved = move_context(bench.context, find_gpu("L4"))
    words = " ".join(moved.assumptions)
    assert "probed there" in words
    assert "operator times" in words
    assert moved.doubt < blind.doubt
    probe(bench, "NVIDIA L4", 2e6)
    slower = move_context(bench.context, find_gpu("L4"))
    ratio = slower.context.graph.device_ns / moved.context.graph.device_ns
    assert ratio == pytest.approx(2.0, rel=0.02)


def test_a_probe_on_both_gpus_gives_the_ratio(bench: Any) -> None:
    """Twice the probed time is twice the traced time, whatever a call takes alone."""
    traced = traced_times(bench.context)
    probe(bench, "NVIDIA H200", 0.8, traced)
    probe(bench, "NVIDIA L4", 1.6, traced)
    before = bench.context.graph.tasks.dur_ns
    after = move_context(bench.context, find_gpu("L4")).context.graph.tasks.dur_ns
    assert after.sum() == pytest.approx(2.0 * before.sum(), rel=0.02)


def test_times_of_other_gpus_do_not_count(bench: Any) -> None:
    probe(bench, "NVIDIA L4", 1e6)
    for name in ("A100-SXM4-80GB", "T4"):
        assert "not measured there" in move_context(bench.context, find_gpu(name)).assumptions[0]


def test_kernels_that_were_not_timed_follow_their_family(bench: Any) -> None:
    """Half of the calls are forgotten. The known ones take far longer than the model says, so the
    others are taken to be slower as well."""
    blind = move_context(bench.context, find_gpu("L4")).context.graph.tasks.dur_ns
    probe(bench, "NVIDIA L4", 1e9)
    times = [time for time in read_times() if time.forward]
    library_file().unlink()
    save_times(times[::2])
    moved = move_context(bench.context, find_gpu("L4"))
    probed, _ = find_probed_elsewhere(bench.context, lambda place: place == "NVIDIA L4")
    assert probed is not None
    assert 0.05 < probed.modelled_share < 0.95
    rest = ~probed.known & (blind > 1e5)
    assert (moved.context.graph.tasks.dur_ns[rest] > 1.05 * blind[rest]).all()


def test_a_damaged_library_is_said_and_worked_without(bench: Any) -> None:
    probe(bench, "NVIDIA L4", 1e6)
    assert read_places() == ["NVIDIA L4"]
    library_file().write_bytes(b"no database" * 100)
    moved = move_context(bench.context, find_gpu("L4"))
    assert "does not use them" in " ".join(moved.assumptions)
    assert moved.context.graph.device_ns > 0


def test_an_exported_library_is_not_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "l4.json"
    file.write_text('{"schema": 1, "times": []}')
    with pytest.raises(UnreadableInputError, match="stepscope probe import"):
        find_gpu(str(file))


def test_a_trace_of_the_same_gpu_stays(bench: Any) -> None:
    probe(bench, "NVIDIA H200", 1e6)
    moved = move_context(bench.context, find_gpu("H200"))
    assert "nothing changes" in moved.assumptions[0]
    assert moved.context.graph.device_ns == bench.context.graph.device_ns
