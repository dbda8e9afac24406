"""Throughput against batch and ranks: saturation, efficiency, predictions beside measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from stepscope.bench.request import BenchRequest, choose_tasks
from stepscope.bench.results import BenchResults, StudyPoint, WorkloadResult
from stepscope.bench.rules import find_studies, saturation, with_straight_lines
from stepscope.bench.task import parse_counts
from stepscope.errors import NotCapturedError, UsageError
from stepscope.records.prediction import Prediction, Setting
from stepscope.ui.bench.results import with_studies
from stepscope.ui.bench.words import efficiency_words, prediction_words, saturation_words
from stepscope.ui.terminal.bench import draw_bar, print_study
from stepscope.ui.terminal.console import make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

CEILING, HALF_AT = 1000.0, 8.0  # samples/s of a device that large batches fill


def throughput(batch: int) -> float:
    """Half of the ceiling at a batch of 8."""
    return CEILING * batch / (batch + HALF_AT)


def row(batch: int, ranks: int = 1, **changes: Any) -> WorkloadResult:
    speed = 0.9 ** (ranks - 1) * ranks * throughput(batch)
    known: dict[str, Any] = {
        "name": "gpt2",
        "samples_per_s": speed,
        "low": 0.98 * speed,
        "high": 1.02 * speed,
        "folder": "run",
    }
    settings: dict[str, float | int | str] = {"batch": batch}
    return WorkloadResult(size="tiny", ranks=ranks, settings=settings, **(known | changes))


def points(*speeds: float) -> list[StudyPoint]:
    return [StudyPoint(batch=2**n, samples_per_s=speed) for n, speed in enumerate(speeds)]


@dataclass
class MadeBench:
    """Doubles what is asked for: twice the batch in the same time, or refuses."""

    refused: tuple[str, ...] = ()

    def predict(self, settings: Sequence[Setting]) -> Prediction:
        batch = next((s.value for s in settings if s.name == "batch"), "x1")
        workers = next((s.value for s in settings if s.name == "workers"), "1")
        times = float(batch[1:]) * int(workers)
        return Prediction(
            settings=tuple(settings),
            baseline_ms=10.0,
            predicted_ms=10.0,
            low_ms=9.0,
            high_ms=11.0,
            baseline_low_ms=10.0,
            baseline_high_ms=10.0,
            baseline_from="measured",
            profiled_ms=10.0,
            host_ms=10.0,
            device_ms=0.0,
            throughput_factor=times,
            speedup_low=0.9,
            speedup_high=1.1,
            refused=self.refused,
        )


def results(*rows: WorkloadResult) -> BenchResults:
    return BenchResults(stepscope="1", command=(), started_unix=0.0, workloads=rows)


def test_a_curve_saturates_where_no_later_doubling_gains_a_tenth() -> None:
    assert saturation(points(100, 190, 340, 370, 380)) == 4
    assert saturation(points(100, 190, 340)) is None  # still gains
    assert saturation(points(100, 105, 200, 210)) == 4  # a flat piece in between is none
    assert saturation(points(100)) is None


def test_the_gain_counts_per_doubling_however_far_apart_batches_are() -> None:
    far = [StudyPoint(batch=8, samples_per_s=100.0), StudyPoint(batch=128, samples_per_s=140.0)]
    assert saturation(far) == 8  # 8.8% for each of four doublings


def test_rows_that_differ_in_batch_and_ranks_make_one_study() -> None:
    rows = [row(8), row(16), row(8, 2), row(16, 2)]
    (study,) = find_studies(rows).values()
    places = [(point.ranks, point.batch) for point in study.points]
    assert places == [(1, 8), (1, 16), (2, 8), (2, 16)]
    efficiencies = [point.efficiency for point in study.points]
    assert efficiencies[:2] == [None, None]
    assert efficiencies[2:] == pytest.approx([0.9, 0.9])
    assert "90%" in efficiency_words(study)


def test_different_workloads_and_sets_of_remedies_are_no_study() -> None:
    assert not find_studies([row(8), row(8, name="vgg16"), row(8, remedies=("bf16",))])


def test_the_key_of_a_study_is_the_row_that_predictions_start_from() -> None:
    assert list(find_studies([row(64), row(16), row(8)])) == [2]


def test_points_are_predicted_from_the_first_with_their_interval() -> None:
    (study,) = with_studies(results(row(8), row(16), row(8, 4)), lambda _: MadeBench()).scaling  # type: ignore[arg-type, return-value]
    first, twice, four = study.points
    assert first.predicted_samples_per_s is None
    base = throughput(8)
    assert twice.predicted_samples_per_s == pytest.approx(2 * base)
    assert (twice.predicted_low, twice.predicted_high) == pytest.approx((1.8 * base, 2.2 * base))
    assert four.predicted_samples_per_s == pytest.approx(4 * base)
    assert study.predicted_from == "run"
    assert "2 predictions" in prediction_words(study.points)


def test_a_refused_prediction_leaves_the_point_and_says_why() -> None:
    bench = MadeBench(refused=("workers=2: run stepscope calibrate",))
    (study,) = with_studies(results(row(8), row(8, 2)), lambda _: bench).scaling  # type: ignore[arg-type, return-value]
    assert study.points[1].predicted_samples_per_s is None
    assert study.notes == bench.refused
    assert prediction_words(study.points) == ""


def test_a_run_that_cannot_be_opened_leaves_the_study_without_predictions() -> None:
    def open_run(_folder: str) -> Any:
        raise NotCapturedError("no trace")

    (study,) = with_studies(results(row(8), row(16)), open_run).scaling
    assert study.notes == ("there is no prediction: no trace",)
    (study,) = with_studies(
        results(row(8, samples_per_s=None, status="failed"), row(16)), open_run
    ).scaling
    assert "first point was not measured" in study.notes[0]


def test_without_what_ifs_larger_batches_follow_the_line_of_the_two_smallest() -> None:
    (study,) = find_studies([row(4), row(8), row(16), row(64)]).values()
    drawn = with_straight_lines(study)
    assert [point.predicted_samples_per_s for point in drawn.points[:2]] == [None, None]
    for point in drawn.points[2:]:  # the made-up step is a straight line: batch + 8
        assert point.predicted_samples_per_s == pytest.approx(throughput(point.batch))
        assert point.predicted_low is not None
        assert point.predicted_low < throughput(point.batch)
    assert any("straight line" in note for note in drawn.notes)
    assert with_straight_lines(replace(study, points=study.points[:2])).notes == ()


def test_a_bar_shows_measured_and_predicted() -> None:
    point = StudyPoint(batch=8, samples_per_s=50.0, predicted_samples_per_s=100.0)
    assert draw_bar(point, 100.0, 10) == "█████    ┃"
    assert draw_bar(StudyPoint(batch=8), 100.0, 10) == ""


def test_a_study_is_printed_with_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    too_large = row(4096, status="not run", why="needs about 161 GB", samples_per_s=None)
    (study,) = find_studies([row(8), row(64), row(512), too_large]).values()
    print_study(make_console(120), study)
    out = capsys.readouterr().out
    assert "161 GB" in out
    assert saturation_words(study) in out
    assert "from batch 64" in out


def test_a_sweep_asks_for_every_batch_on_every_number_of_ranks() -> None:
    tasks, _ = choose_tasks(BenchRequest(names=("gpt2",), ranks=(1, 2), sweep=(4, 8)))
    assert [(task.ranks, task.config.batch) for task in tasks] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert len({task.name for task in tasks}) == 4  # they have folders of their own
    assert tasks[0].name == "gpt2 batch=4 ranks=1"


def test_a_swept_batch_cannot_be_set_as_well() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        choose_tasks(BenchRequest(names=("gpt2",), sweep=(4, 8), changes={"batch": "4"}))


@pytest.mark.parametrize("text", ["", "1,", "0,2", "two", "1;2", "-1", "99999999999"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="such as 1,2"):
        parse_counts(text, "give numbers such as 1,2")


def test_counts_come_in_order_and_once() -> None:
    assert parse_counts("4, 1,2,4", "") == (1, 2, 4)
