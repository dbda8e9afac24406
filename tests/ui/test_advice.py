"""Findings with predictions: numbers for remedies, what will not help, and no harm done."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

import stepscope
from stepscope.errors import NotCapturedError
from stepscope.explain.explain_job import JobTraces, explain_job
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.verdict import put_cause_first
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import settings_for_remedy
from stepscope.records.explanation import Advice, Explanation, Finding, Headline, Place, Remedy
from stepscope.records.job import RankSteps
from stepscope.records.prediction import Setting
from stepscope.records.quality import Note
from stepscope.trace.read import ReadOptions, read_rank_inputs
from stepscope.ui import advice as advice_room
from stepscope.ui.advice import (
    RankAdvice,
    add_advice,
    advise_rank,
    advise_slowest,
    find_slowest,
    not_helping,
)
from stepscope.ui.api import explain_paths
from stepscope.ui.cli.explain import command
from stepscope.ui.terminal.explanation import advice_table
from stepscope.ui.topics.explanation_json import explanation_json
from stepscope.ui.topics.whatif import make_bench, saved_ms

SOURCE = Path(stepscope.__file__).parent
RUN = Path(__file__).parent.parent / "golden/h200-resnet18"
TRACE = RUN / "rank-00000/trace.json.gz"


def analysed() -> RankAnalysis:
    return RankAnalysis(read_rank_inputs(TRACE, ReadOptions(cache=False)))


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return explain_job(TRACE, cache=False)


@pytest.fixture
def rank_advice(explained: Explanation) -> RankAdvice:
    return advise_rank(analysed(), explained.ranks[0])


def advised(setting: str, saved: float, verdict: Any = "faster") -> Advice:
    return Advice(
        setting=setting, label=setting, verdict=verdict, summary="", saved_ms=saved,
        saved_low_ms=saved - 1, saved_high_ms=saved + 1, baseline_ms=24.9,
        predicted_ms=24.9 - saved,
        low_ms=23.9 - saved, high_ms=25.9 - saved, throughput_factor=24.9 / (24.9 - saved),
    )  # fmt: skip


def larger_batch(saved: float) -> Advice:
    """Twice the samples in a step: what is saved is the time for the samples of a present one."""
    step = 2 * (24.9 - saved)
    factor = 24.9 / (24.9 - saved)
    return replace(
        advised("batch=x2", saved), label="twice the batch", predicted_ms=step,
        throughput_factor=factor,
    )  # fmt: skip


def with_remedies(explained: Explanation, *ids: str, rank: int | None = 0) -> Explanation:
    finding = Finding(
        id="host-bound", title="Host-bound", share=0.5, severity="high", summary="", evidence=(),
        remedies=tuple(Remedy(id=each, summary=f"do {each}") for each in ids), rank=rank,
    )  # fmt: skip
    return replace(explained, findings=(finding,))


def seen_by(explained: Explanation, *advice: Advice) -> RankAdvice:
    return RankAdvice(path=explained.ranks[0].path, advice=advice)


# The map


# Numbers


def test_a_remedy_is_told_in_milliseconds_saved_of_each_step(
    explained: Explanation, rank_advice: RankAdvice
) -> None:
    after = add_advice(explained, rank_advice)
    numbers = {
        remedy.id: remedy
        for finding in after.findings
        for remedy in finding.remedies
        if remedy.predicted_ms is not None
    }
    bench = make_bench(analysed(), explained.ranks[0])
    assert "bf16" in numbers
    for name, remedy in numbers.items():
        expected = saved_ms(bench.predict(settings_for_remedy(name)))
        assert (remedy.predicted_ms, remedy.low_ms, remedy.high_ms) == pytest.approx(expected)


def test_the_remedy_that_saves_most_comes_first_and_is_next(explained: Explanation) -> None:
    plain = with_remedies(explained, "check-host", "compile", "cuda-graphs")
    after = add_advice(plain, seen_by(plain, advised("cuda-graphs", 9.0), advised("compile", 2.0)))
    assert [remedy.id for remedy in after.findings[0].remedies] == [
        "cuda-graphs", "compile", "check-host",
    ]  # fmt: skip
    assert after.next == "do cuda-graphs (predicted to save 9.00 of 24.9 ms)"


def offering(name: str, severity: Any, *remedies: str) -> Finding:
    return Finding(
        id=name, title=name, share=0.5, severity=severity, summary="", evidence=(),
        remedies=tuple(Remedy(id=each, summary=f"do {each}") for each in remedies),
    )  # fmt: skip


def test_next_treats_the_verdict_and_larger_gains_stand_on_a_line_of_their_own(
    explained: Explanation,
) -> None:
    first, second = offering("a", "high", "compile"), offering("b", "low", "bf16")
    plain = replace(explained, findings=(first, second))
    small, large = advised("compile", 2.0), advised("precision=bf16", 8.0)
    after = add_advice(plain, seen_by(plain, small, large))
    assert after.next == "do compile (predicted to save 2.00 of 24.9 ms)"
    assert after.headline == Headline(finding="a", remedy="compile")
    assert after.also == "precision=bf16: saves 8.00 of 24.9 ms"
    assert explanation_json(after)["headline"] == {"finding": "a", "remedy": "compile"}


def test_a_larger_batch_is_next_only_where_the_batch_is_too_small(explained: Explanation) -> None:
    for name in ("straggler", "recompiles", "host-bound", "exposed-communication"):
        plain = replace(explained, findings=(offering(name, "high", "check-host", "batch"),))
        after = add_advice(plain, seen_by(plain, larger_batch(9.0)))
        assert after.next == "do check-host"
        assert after.headline == Headline(finding=name, remedy="check-host")
        assert after.also == (
            "twice the batch: 1.6 times the samples/s (1.5 to 1.7), in steps of 31.8 ms "
            "instead of 24.9 ms"
        )
    plain = replace(explained, findings=(offering("small-batch", "high", "batch"),))
    after = add_advice(plain, seen_by(plain, larger_batch(9.0)))
    assert after.headline == Headline(finding="small-batch", remedy="batch")
    assert after.next.startswith("do batch (1.6 times the samples/s")


def test_a_finding_whose_remedies_cannot_help_says_where_to_look(explained: Explanation) -> None:
    place = Place(file="train.py", line=9, function="wait")
    sleeps = replace(offering("host-bound", "high", "cuda-graphs"), where=(place,))
    plain = replace(explained, findings=(sleeps,))
    seen = replace(seen_by(plain), pointless=frozenset({"cuda-graphs"}))
    after = add_advice(plain, seen)
    assert after.findings[0].remedies == ()
    assert (after.next, after.headline) == (
        "Look at train.py:9 wait",
        Headline(finding="host-bound"),
    )


def test_a_change_whose_gain_nobody_predicted_only_may_help(explained: Explanation) -> None:
    plain = replace(explained, findings=(offering("a", "high", "compile"),))
    assert add_advice(plain, seen_by(plain)).next == (
        "do compile (may help: its gain is not predicted)"
    )


def test_a_change_that_probably_pays_comes_before_one_that_nobody_can_predict(
    explained: Explanation,
) -> None:
    plain = replace(explained, findings=(offering("data", "high", "prefetch", "loader-workers"),))
    probable = replace(advised("loader-workers=4", 9.0), saved_low_ms=-0.5, saved_high_ms=14.0)
    after = add_advice(plain, seen_by(plain, probable))
    words = "Try num_workers=4 of the DataLoader (may change the step by -14.0 to +0.500 ms)"
    assert after.next == words
    doubtful = replace(probable, saved_low_ms=-5.0)
    assert add_advice(plain, seen_by(plain, doubtful)).next.startswith("do prefetch")


def test_a_cause_that_leads_is_as_severe_as_what_it_causes() -> None:
    cause = replace(offering("recompiles", "low", "mark-dynamic"), share=0.4)
    symptom = offering("host-bound", "high", "compile")
    first, second = put_cause_first([symptom, cause])
    assert (first.id, first.severity, second.id) == ("recompiles", "high", "host-bound")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("4", "Set num_workers=4 of the DataLoader (predicted to save"),
        ("0", "Set num_workers=0 of the DataLoader: the training thread makes its batches ("),
    ],
)
def test_workers_of_the_loader_are_named_by_the_number_that_surely_saves_most(
    explained: Explanation, value: str, words: str
) -> None:
    loader = offering("data-loading", "high", "cheaper-batch", "loader-workers")
    seen = seen_by(
        explained, advised(f"loader-workers={value}", 12.0), advised("loader-workers=2", 5.0)
    )
    told = add_advice(replace(explained, findings=(loader,)), seen)
    assert told.next.startswith(words)
    others = add_advice(
        replace(explained, findings=(offering("host-bound", "high", "compile"),)), seen
    )
    assert others.also.count("loader-workers") == 1


def test_workers_that_would_not_surely_help_are_not_promised(explained: Explanation) -> None:
    loader = offering("data-loading", "high", "cheaper-batch", "loader-workers")
    seen = seen_by(explained, *(advised(f"loader-workers={count}", -3.0) for count in (1, 2, 4)))
    told = add_advice(replace(explained, findings=(loader,)), seen)
    assert told.next == "do cheaper-batch"
    assert told.headline.remedy == "cheaper-batch"


def test_a_saving_whose_interval_holds_zero_is_not_next(explained: Explanation) -> None:
    plain = replace(explained, findings=(offering("a", "high", "compile", "bf16"),))
    doubtful = replace(advised("compile", 9.0), saved_low_ms=-0.5)
    after = add_advice(plain, seen_by(plain, doubtful, advised("precision=bf16", 2.0)))
    assert after.next == "do bf16 (predicted to save 2.00 of 24.9 ms)"
    plain = replace(explained, findings=(offering("a", "high", "compile"),))
    only = add_advice(plain, seen_by(plain, doubtful))
    assert only.next == "do compile (may change the step by -10.0 to +0.500 ms)"
    assert only.also == ""


def test_a_little_saving_does_not_replace_the_remedy_of_a_large_loss(
    explained: Explanation,
) -> None:
    """Half of 24.9 ms is lost: 4.15 ms are a third of it."""
    plain = replace(explained, findings=(offering("a", "high", "prefetch"),), next="do prefetch")
    assert add_advice(plain, seen_by(plain, advised("compile", 4.1))).next == "do prefetch"
    plain = replace(explained, findings=(offering("a", "high", "prefetch", "compile"),))
    assert add_advice(plain, seen_by(plain, advised("compile", 4.1))).next.startswith("do prefetch")
    after = add_advice(plain, seen_by(plain, advised("compile", 4.2)))
    assert after.next == "do compile (predicted to save 4.20 of 24.9 ms)"


@pytest.mark.parametrize("wish", ["bandwidth=2", "no-data-wait", "no-sync"])
def test_a_wish_is_next_only_where_a_finding_says_how(explained: Explanation, wish: str) -> None:
    link = advised(wish, 9.0)
    silent = replace(explained, findings=(offering("a", "high", "check-host"),))
    after = add_advice(silent, seen_by(silent, link))
    assert (after.next, after.also) == ("do check-host", "")
    remedy = wish.partition("=")[0]
    says = replace(explained, findings=(offering("a", "high", remedy),))
    after = add_advice(says, seen_by(says, link))
    assert after.next == f"do {remedy} (predicted to save at most 9.00 of 24.9 ms)"


def test_an_even_pace_is_told_as_what_to_do_about_the_straggler(explained: Explanation) -> None:
    slow = offering("straggler", "high", "no-straggler", "check-host")
    plain = replace(explained, findings=(slow,))
    after = add_advice(plain, seen_by(plain, advised("no-straggler", 9.0)))
    assert after.next == "do check-host (predicted to save at most 9.00 of 24.9 ms)"


@pytest.mark.parametrize("name", ["not-training-together", "gloo-on-device", "other-processes"])
def test_what_makes_predictions_moot_stays_next(explained: Explanation, name: str) -> None:
    plain = replace(explained, findings=(offering(name, "high", "mend-it"),), next="do mend-it")
    assert add_advice(plain, seen_by(plain, advised("compile", 9.0))).next == "do mend-it"


def test_a_remedy_that_makes_it_worse_goes_behind_those_nobody_can_predict(
    explained: Explanation,
) -> None:
    plain = with_remedies(explained, "bf16", "check-host")
    after = add_advice(plain, seen_by(plain, advised("precision=bf16", -1.3, "slower")))
    assert [(each.id, each.predicted_ms) for each in after.findings[0].remedies] == [
        ("check-host", None),
        ("bf16", -1.3),
    ]
    assert after.next == "do check-host"


def test_of_two_ways_to_do_a_remedy_the_better_one_counts(explained: Explanation) -> None:
    plain = with_remedies(explained, "bucket-mb")
    small, large = map(str, settings_for_remedy("bucket-mb"))
    after = add_advice(plain, seen_by(plain, advised(small, -2.0, "slower"), advised(large, 3.0)))
    assert after.findings[0].remedies[0].predicted_ms == 3.0


def test_a_finding_of_another_rank_keeps_its_remedies_as_they_are(explained: Explanation) -> None:
    other = with_remedies(explained, "compile", rank=5)
    after = add_advice(other, seen_by(other, advised("compile", 9.0)))
    assert after.findings[0].remedies[0].predicted_ms is None


def test_what_was_tried_is_ranked_and_names_the_findings_it_answers(
    explained: Explanation, rank_advice: RankAdvice
) -> None:
    saved = [each.saved_ms for each in rank_advice.advice]
    assert saved == sorted(saved, reverse=True)
    by_setting = {each.setting: each for each in rank_advice.advice}
    assert by_setting["precision=bf16"].verdict == "faster"
    assert by_setting["cuda-graphs"].verdict == "no difference"
    offering = [
        finding.id
        for finding in explained.ranks[0].findings
        if any(
            "precision=bf16" in map(str, settings_for_remedy(remedy.id))
            for remedy in finding.remedies
        )
    ]
    assert list(by_setting["precision=bf16"].findings) == offering != []


def test_a_host_bound_step_is_told_that_bf16_makes_it_slower(shared: Path) -> None:
    path = shared / "traces/h200/mlp_b32_fp32_loop.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    found = {each.setting: each for each in explain_paths([path], cache=False, html=None).advice}
    assert found["precision=bf16"].verdict == "slower"
    assert found["precision=bf16"].saved_high_ms < 0
    assert found["cuda-graphs"].verdict == "faster"
    slower = not_helping(found.values())[-1]
    assert slower.startswith("slower: ")
    assert "bf16" in slower


# Surfaces


def test_json_and_terminal_show_the_advice(explained: Explanation, rank_advice: RankAdvice) -> None:
    after = add_advice(explained, rank_advice)
    body = explanation_json(after)
    assert [each["setting"] for each in body["advice"]] == [
        each.setting for each in rank_advice.advice
    ]
    screen = io.StringIO()
    Console(file=screen, width=100).print(advice_table(after.advice))
    printed = screen.getvalue()
    assert "--set precision=bf16" in printed
    assert "no real difference (under 2%): " in printed


def test_explain_prints_advice_from_the_trace_it_has_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.main([str(TRACE), "--json"], standalone_mode=False)
    body = json.loads(capsys.readouterr().out)
    assert [each["setting"] for each in body["advice"]][:2] == ["compile", "precision=bf16"]
    assert "(predicted to save" in body["next"]
    assert body["quality"] == []


# No harm


def test_a_defect_in_prediction_is_a_note_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STEPSCOPE_DEBUG", raising=False)
    monkeypatch.setattr(advice_room, "make_bench", broken)
    command.main([str(TRACE), "--json"], standalone_mode=False)
    body = json.loads(capsys.readouterr().out)
    assert [note["id"] for note in body["quality"]] == ["not-predicted"]
    assert "ZeroDivisionError: oh" in body["quality"][0]["detail"]
    assert body["advice"] == []
    assert body["findings"]


def broken(*_: Any) -> Any:
    raise ZeroDivisionError("oh")


def test_a_defect_in_one_what_if_takes_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch, explained: Explanation, rank_advice: RankAdvice
) -> None:
    monkeypatch.delenv("STEPSCOPE_DEBUG", raising=False)
    known = Bench.predict

    def predict(bench: Bench, settings: Sequence[Setting]) -> Any:
        return broken() if any(one.name == "batch" for one in settings) else known(bench, settings)

    monkeypatch.setattr(Bench, "predict", predict)
    seen = advise_rank(analysed(), explained.ranks[0])
    assert list(seen.advice) == [
        advice for advice in rank_advice.advice if not advice.setting.startswith("batch")
    ]
    assert len(seen.advice) < len(rank_advice.advice)
    after = add_advice(explained, seen)
    assert after.next == add_advice(explained, rank_advice).next
    (note,) = (note for note in after.quality if note.id == "not-predicted")
    assert "batch=x2: a defect in stepscope: ZeroDivisionError: oh" in note.detail


def test_a_step_that_cannot_be_replayed_has_no_advice_and_no_note(
    monkeypatch: pytest.MonkeyPatch, explained: Explanation
) -> None:
    def untold(*_: Any) -> Any:
        raise NotCapturedError("no steps")

    monkeypatch.setattr(advice_room, "make_bench", untold)
    seen = advise_rank(analysed(), explained.ranks[0])
    assert seen == RankAdvice(path=explained.ranks[0].path)
    assert add_advice(explained, seen).advice == ()


def test_without_advice_an_explanation_stays_as_it_is(explained: Explanation) -> None:
    assert add_advice(explained, None) is explained
    noted = add_advice(explained, RankAdvice(path="x", note=Note(id="not-predicted", detail="why")))
    assert [note.id for note in noted.quality] == ["not-predicted"]


def test_of_several_ranks_the_one_with_the_most_time_of_its_own_is_looked_at(
    explained: Explanation,
) -> None:
    """Rank 1's step is longer, but it waits for rank 0."""
    rank = explained.ranks[0]

    def made(number: int, step_ms: float, waits_ms: float) -> Any:
        step, waits = (np.array([round(ms * 1e6)], np.int64) for ms in (step_ms, waits_ms))
        pace = RankSteps(
            number=step * 0, start_ns=step * 0, dur_ns=step, compute_ns=step * 0,
            exposed_comm_ns=waits, input_ns=step * 0,
        )  # fmt: skip
        return replace(rank, rank=number, part=replace(rank.part, pace=pace))

    both = replace(explained, ranks=(made(0, 100.0, 0.0), made(1, 101.0, 30.0)))
    assert find_slowest(both).rank == 0


def test_a_trace_that_is_gone_since_is_a_note(explained: Explanation) -> None:
    gone = replace(explained, ranks=(replace(explained.ranks[0], path="/nowhere/trace.json"),))
    seen = advise_slowest(JobTraces([TRACE], cache=False), gone)
    assert seen is not None
    assert seen.note is not None
    assert "does not exist" in seen.note.detail
