"""tune.json as a record: which value of a remedy counts, and how it is put into words."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.records.comparison import TriedConfiguration, TuneResult, best_alone


def tried(
    *remedies: str, ms: float | None, kept: bool = False, why: str = ""
) -> TriedConfiguration:
    low, high = (None, None) if ms is None else (ms - 0.4, ms + 0.4)
    return TriedConfiguration(
        remedies=remedies, measured_ms=ms, low_ms=low, high_ms=high, kept=kept, why=why
    )


def result(*trials: TriedConfiguration, kept: tuple[str, ...] = ()) -> TuneResult:
    return TuneResult(baseline_ms=38.1, trials=trials, kept=kept)


def test_a_measured_remedy_says_both_steps_the_interval_and_its_fate() -> None:
    best = best_alone(result(tried("bf16", ms=21.0, kept=True)), "tunes/1")
    assert best["bf16"].words == "bf16 38.1 -> 21.0 ms (20.6 to 21.4), kept"
    assert best["bf16"].tune == "tunes/1"
    slower = best_alone(result(tried("bf16", ms=44.0, why="6% slower")))["bf16"]
    assert slower.words == "bf16 38.1 -> 44.0 ms (43.6 to 44.4), not kept: 6% slower"


def test_a_remedy_that_broke_the_training_has_no_number() -> None:
    crashed = replace(tried("compile", ms=None, why="exit code 1"), parity="failed")
    failed = best_alone(result(crashed))["compile"]
    assert failed.measured_ms is None
    assert failed.saved(failed.measured_ms) is None
    assert (failed.label, failed.words) == ("tried", "compile failed: exit code 1")


def test_a_remedy_that_there_was_no_time_for_has_not_failed() -> None:
    late = replace(tried("compile", ms=None, why="the budget was spent"), parity="not known")
    assert best_alone(result(late)) == {}


def test_of_several_values_the_kept_one_counts_then_the_fastest() -> None:
    values = (tried("bucket-mb=5", ms=36.0), tried("bucket-mb=100", ms=35.0))
    failed = replace(tried("bucket-mb=1", ms=None), parity="failed")
    assert best_alone(result(failed, *values))["bucket-mb"].remedy == "bucket-mb=100"
    kept = best_alone(result(*values, failed, kept=("bucket-mb=5",)))["bucket-mb"]
    assert (kept.remedy, kept.kept) == ("bucket-mb=5", True)


def test_only_what_was_tried_alone_says_something_about_one_remedy() -> None:
    both = tried("bf16", "fused-optimizer", ms=19.0, kept=True)
    assert best_alone(result(both)) == {}
    without_baseline = TuneResult(trials=(tried("bf16", ms=21.0),))
    assert best_alone(without_baseline) == {}
