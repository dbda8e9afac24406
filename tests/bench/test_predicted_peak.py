"""Peak memory predicted before the run, against what torch's own CPU allocator hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.bench import catalogue, predict_peak
from stepscope.bench.predict_peak import (
    FakePlace,
    MeasuredNeeds,
    MemoryLedger,
    OperatorNeeds,
    RealTensor,
    train_fake,
    train_for_real,
)
from stepscope.bench.results import PeakRequest, PredictedPeak
from stepscope.bench.task import BenchTask
from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.ui.bench import suite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.bench.workload import Config, Step, TrainingPlace
from stepscope.fix.memory_meters import meter_on_host

CPU = torch.device("cpu")
GOAL = 0.03  # of the allocator's peak


def _build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.rand(config.batch, 32, device=place.device) for _ in range(config.batches)]

    def step(number: int) -> torch.Tensor:
        out = model(batches[number % len(batches)])
        if config.reads:
            out = out[out.sum(1) > 0]
        loss: torch.Tensor = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


WORKLOAD = TrainingWorkload(
    name="made",
    task="",
    source="",
    samples="rows",
    sizes={"tiny": {"batch": 512, "batches": 5, "reads": 0}},
    targets={"tiny": Target(loss=1.0, steps=24)},
    build=_build,
)


def peak_for_real(workload: TrainingWorkload, **changes: Any) -> int:
    return train_for_real(workload, workload.config("tiny", changes), CPU).peak_bytes


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_peak, "load", lambda _name: WORKLOAD)


def test_fake_steps_hold_what_real_ones_hold() -> None:
    predicted = train_fake(WORKLOAD, WORKLOAD.config("tiny"), CPU)
    assert predicted.peak_bytes == peak_for_real(WORKLOAD)
    assert predicted.gradient_bytes == 4 * (32 * 64 + 64 + 64 * 8 + 8)
    assert predicted.notes == ()


def test_gpt2_is_predicted_within_the_goal() -> None:
    workload = catalogue.load("gpt2")
    changes = {"batches": 3, "layers": 1}
    predicted = train_fake(workload, workload.config("tiny", changes), CPU).peak_bytes
    assert predicted == pytest.approx(peak_for_real(workload, **changes), rel=GOAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.names())
def test_every_workload_is_predicted_within_the_goal(name: str) -> None:
    predicted = predict_peak.predict(PeakRequest(name=name, size="tiny"), CPU)
    assert predicted.peak_bytes is not None, predicted.notes
    assert predicted.peak_bytes == pytest.approx(peak_for_real(catalogue.load(name)), rel=GOAL)


@pytest.mark.usefixtures("made")
def test_a_workload_that_reads_values_is_trained_instead() -> None:
    request = PeakRequest(name="made", size="tiny", changes={"reads": "1"})
    predicted = predict_peak.predict(request, CPU)
    assert predicted.method == "trained"
    assert "DynamicOutputShape" in predicted.notes[0]
    assert predicted.peak_bytes == pytest.approx(peak_for_real(WORKLOAD, reads=1), rel=GOAL)


@pytest.mark.usefixtures("made")
def test_with_little_room_smaller_batches_tell_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_peak, "free_bytes", lambda _device: 1 << 20)
    request = PeakRequest(name="made", size="tiny", changes={"reads": "1", "batch": "4096"})
    predicted = predict_peak.predict(request, CPU)
    assert predicted.method == "smaller batches"
    peak = peak_for_real(WORKLOAD, reads=1, batch=4096)
    assert predicted.peak_bytes == pytest.approx(peak, rel=0.1)


@pytest.mark.usefixtures("made")
def test_what_does_not_fit_comes_with_the_batch_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2_000_000
    monkeypatch.setattr(predict_peak, "free_bytes", lambda _device: free)
    request = PeakRequest(name="made", size="tiny", changes={"batch": "4096"})
    predicted = predict_peak.predict(request, CPU)
    assert predicted.fits is False
    assert predicted.fitting_batch is not None
    assert peak_for_real(WORKLOAD, batch=predicted.fitting_batch) < free
    assert peak_for_real(WORKLOAD, batch=2 * predicted.fitting_batch) > free
    alone = predict_peak.predict(PeakRequest(name="made", size="tiny"), CPU)
    shared = predict_peak.predict(PeakRequest(name="made", size="tiny", ranks=2), CPU)
    assert shared.peak_bytes == (alone.peak_bytes or 0) + 4 * (32 * 64 + 64 + 64 * 8 + 8)
    assert shared.room_bytes == (alone.room_bytes or 0) // 2  # both ranks live on this host


@pytest.mark.usefixtures("made")
def test_a_workload_that_raises_has_no_peak_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    request = PeakRequest(name="made", size="tiny", changes={"batches": "0"})
    predicted = predict_peak.predict(request, CPU)
    assert predicted.peak_bytes is None
    assert predicted.fits is None
    assert "ZeroDivisionError" in predicted.notes[0]
    monkeypatch.setattr(predict_peak, "LIMIT_S", 0.001)
    late = predict_peak.predict(PeakRequest(name="made", size="tiny"), CPU)
    assert late.peak_bytes is None
    assert "no prediction within" in late.notes[0]


def test_a_call_is_measured_with_the_like_of_what_earlier_calls_really_returned() -> None:
    """Attention's dropout keeps its seed on the host, where its fake is on the GPU: backward run
    with a seed on the GPU ends the process."""
    measured: list[torch.Tensor] = []

    def meter(call: Callable[[], Any]) -> tuple[Any, int]:
        results = call()
        measured.append(results)
        return results, 0

    needs = MeasuredNeeds(meter, 1 << 30)
    add = torch.ops.aten.scatter_add.default  # measured; both arguments and its result are tensors
    real = RealTensor((3,), (1,), CPU, 12)
    with FakeTensorMode():
        seed = torch.empty((), device="cuda")
        needs.returned([seed], OperatorNeeds((real,), 0))
        index = torch.zeros(3, dtype=torch.long)
        needs.of(add, (seed.detach(), 0, index, torch.zeros(3)), {})
    assert [(result.shape, result.device.type) for result in measured] == [((3,), "cpu")]
    assert needs.notes == set()
    del seed
    assert needs._unlike == {}


def test_recurrent_layers_on_a_gpu_are_not_run_with_fakes() -> None:
    with pytest.raises(NotImplementedError, match="recurrent layers"):
        FakePlace(torch.device("cuda")).put(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)))
    assert FakePlace(CPU).put(nn.GRU(2, 2)) is not None


def test_an_operator_holds_more_than_its_results_while_it_runs() -> None:
    needs = MeasuredNeeds(meter_on_host, 1 << 30)
    with FakeTensorMode(), MemoryLedger("cpu", needs) as ledger:
        image, weight = torch.rand(4, 3, 16, 16), torch.rand(8, 3, 3, 3)
        held = ledger.held_bytes
        result = nn.functional.conv2d(image, weight)
    assert held == 4 * (image.numel() + weight.numel())
    assert ledger.held_bytes == held + 4 * result.numel()
    assert ledger.peak_bytes > ledger.held_bytes
    del result
    assert ledger.held_bytes == held


def test_a_sum_over_a_mask_holds_a_copy_in_int64() -> None:
    needs = MeasuredNeeds(meter_on_host, 1 << 30)
    with FakeTensorMode(), MemoryLedger("cpu", needs) as ledger:
        mask = torch.zeros(4, 1000, dtype=torch.bool)
        counts = mask.sum(1)
    assert counts.dtype == torch.int64
    assert ledger.peak_bytes == 4000 + 8 * 4000 + 8 * 4
    assert ledger.held_bytes == 4000 + 8 * 4


def test_an_operator_too_large_to_try_is_noted() -> None:
    needs = MeasuredNeeds(meter_on_host, most_bytes=16)
    with FakeTensorMode(), MemoryLedger("cpu", needs):
        nn.functional.conv2d(torch.rand(4, 3, 16, 16), torch.rand(8, 3, 3, 3))
    assert needs.notes == {"workspace of aten::convolution is unknown: too large to try"}


def test_a_gpu_hands_out_blocks_of_512_bytes() -> None:
    with MemoryLedger("cuda") as ledger:
        ledger._count(torch.rand(1), 0)
        one = torch.rand(129)
        ledger._count(one, 0)
    assert ledger.held_bytes == 1024
    assert ledger.peak_bytes == 0  # nothing ran on that device


def _task(**changes: str) -> BenchTask:
    return BenchTask(workload=catalogue.load("gpt2"), size="tiny", changes=changes)


def test_the_refusal_says_what_is_needed_what_is_free_and_what_fits() -> None:
    peak = PredictedPeak(peak_bytes=96_000_000_000, free_bytes=80_000_000_000, device="cuda")
    assert suite.too_large(peak).startswith(
        "needs about 96.0 GB on the GPU, 80.0 GB are free. Even"
    )
    smaller = PredictedPeak(peak_bytes=2, free_bytes=1, ranks=2, fitting_batch=24)
    assert suite.too_large(smaller).endswith("--set batch=24 fits")
    assert "for each of 2 ranks" in suite.too_large(smaller)


def test_only_what_may_not_fit_is_predicted() -> None:
    plain = BenchTask(workload=catalogue.load("gpt2"), size="tiny")
    assert not suite.worth_predicting(plain)
    assert suite.worth_predicting(_task(batch="4"))
    assert suite.worth_predicting(BenchTask(workload=plain.workload, size="small"))
    remedied = BenchTask(workload=plain.workload, size="small", remedies=("bf16",))
    assert not suite.worth_predicting(remedied)


def test_a_prediction_that_crashes_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[bytes]] = []

    def ask(requests: list[bytes]) -> list[PredictedPeak]:
        asked.append(list(requests))
        return [PredictedPeak(peak_bytes=7)] if len(asked) == 1 else [PredictedPeak(peak_bytes=9)]

    monkeypatch.setattr(suite, "_ask", ask)
    tasks = [_task(batch="1"), _task(batch="2"), _task(batch="3")]
    peaks = suite.predict_peaks(tasks)
    assert [len(requests) for requests in asked] == [3, 1]
    known = [peaks.of(task) for task in tasks]
    assert [peak and peak.peak_bytes for peak in known] == [7, None, 9]


@pytest.mark.slow
def test_the_program_answers_each_request_in_a_line() -> None:
    task = _task(batch="4", batches="2", layers="1")
    peak = suite.predict_peaks([task]).of(task)
    assert peak is not None
    assert peak.fits
    assert peak.batch == 4


def test_a_container_counts_its_files_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 250\n")
    assert predict_peak._container_bytes(tmp_path) == 550
    (tmp_path / "memory.max").write_text("max\n")
    assert predict_peak._container_bytes(tmp_path) is None
    assert (predict_peak.free_bytes(CPU) or 1) > 0
