"""`stepscope whatif`: what it says, what it prints, how it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import snapshots
from benches import bench_for
from measured import read_measured_steps
from stepscope import changes
from stepscope.changes import PREDICTED
from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError, UsageError
from stepscope.records.explanation import Finding
from stepscope.records.prediction import Delivery, Prediction, Promise, Setting, Workload
from stepscope.text.figures import signed_percent
from stepscope.trace.read import read_trace
from stepscope.ui.cli.whatif import command
from stepscope.ui.terminal.console import make_console
from stepscope.ui.topics.whatif import (
    adjusted,
    decides,
    judge,
    label,
    labels,
    saved_ms,
    verdict,
    why,
    with_offered,
)
from stepscope.verify import track_record
from stepscope.verify import track_record as record_file

RUN = Path(__file__).parent.parent / "golden/h200-resnet18"
TRACE = RUN / "rank-00000/trace.json.gz"
CONTRACT = (
    "schema", "baseline_ms", "predicted_ms", "low_ms", "high_ms", "speedup", "peak_bytes",
    "assumptions", "refused",
)  # fmt: skip


@pytest.fixture
def whatif(capsys: pytest.CaptureFixture[str]) -> Any:
    """The command with these words; gives what it printed."""

    def call(*words: object) -> str:
        command.main([str(word) for word in words], standalone_mode=False)
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return call


def predicted(ms: float, *settings: str, many: float = 1.0, **said: Any) -> Prediction:
    """Of a step of 100 ms, exact to 10% unless told otherwise."""
    given: dict[str, Any] = {
        "settings": tuple(_setting(each) for each in settings),
        "baseline_ms": 100.0,
        "baseline_low_ms": 90.0,
        "baseline_high_ms": 110.0,
        "baseline_from": "calibrated",
        "profiled_ms": 120.0,
        "predicted_ms": ms,
        "low_ms": ms / 1.1,
        "high_ms": ms * 1.1,
        "host_ms": 40.0,
        "device_ms": ms,
        "throughput_factor": many * 100.0 / ms,
        "speedup_low": 100.0 / ms / 1.1,
        "speedup_high": 100.0 / ms * 1.1,
    }
    return Prediction(**given | said)


def _setting(text: str) -> Setting:
    name, _, value = text.partition("=")
    return Setting(name=name, value=value)


# Words


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("precision=bf16", "bf16"),
        ("optimizer=fused", "a fused optimizer"),
        ("cuda-graphs", "CUDA graphs"),
        ("compile", "torch.compile"),
        ("batch=x2", "twice the batch"),
        ("batch=64", "batch 64"),
        ("checkpoint=none", "no activation checkpointing"),
        ("workers=8", "8 workers"),
        ("workers=1", "1 worker"),
        ("workers=8:weak", "8 workers"),
        ("workers=8:strong", "8 workers (sharing the batch)"),
        ("latency=0.5", "half the latency"),
        ("bandwidth=4", "4 times the bandwidth"),
        ("bandwidth=x2", "twice the bandwidth"),
        ("something=new", "something=new"),
    ],
)
def test_changes_have_names_that_people_use(setting: str, words: str) -> None:
    assert label(_setting(setting)) == words


def test_changes_together_are_joined_and_none_is_no_change() -> None:
    assert labels([_setting("precision=bf16"), _setting("cuda-graphs")]) == "bf16 + CUDA graphs"
    assert labels([]) == "no change"


def test_a_much_shorter_step_is_n_times_faster() -> None:
    said = verdict(predicted(20.0, "precision=bf16"))
    assert said == "bf16 would make this step 5.0 times faster: 100 -> 20.0 ms (18.2 to 22.0)"


def test_a_little_shorter_and_a_little_longer_are_shares() -> None:
    assert "make this step 20% shorter" in verdict(predicted(80.0, "compile"))
    assert "make this step 30% longer" in verdict(predicted(130.0, "compile"))
    assert "make this step 3.0 times as long" in verdict(predicted(300.0, "checkpoint=blocks"))


def test_a_gain_within_its_own_doubt_is_only_probable() -> None:
    unsure = predicted(95.0, "compile", speedup_low=0.97, speedup_high=1.14)
    assert verdict(unsure).startswith("torch.compile may change the step by -12.3 to +3.09 ms: 100")
    assert "may" not in verdict(predicted(50.0, "compile"))
    batch = predicted(190.0, "batch=x2", many=2.0, speedup_low=0.45, speedup_high=0.6)
    assert verdict(batch).startswith("twice the batch may give 0.90 to 1.2 times the samples/s")


def test_less_than_two_percent_is_no_difference_worth_having() -> None:
    assert judge(predicted(98.5, "cuda-graphs")) == "no difference"
    assert verdict(predicted(98.5, "cuda-graphs")) == (
        "CUDA graphs would change the step by less than 2%: 100 -> 98.5 ms (89.5 to 108)"
    )
    assert judge(predicted(97.0, "cuda-graphs")) == "faster"


def test_a_larger_batch_is_judged_by_its_samples() -> None:
    """150 ms for two batches: 75 ms for what now takes 100."""
    double = predicted(150.0, "batch=x2", many=2.0)
    assert saved_ms(double)[0] == pytest.approx(25.0)
    assert judge(double) == "faster"
    assert verdict(double) == (
        "twice the batch would give 1.3 times as many samples per second, "
        "in a step of 100 -> 150 ms (136 to 165)"
    )


def test_saved_time_has_the_speedups_ends() -> None:
    """Twice as fast, between 1.6 and 2.5 times: saves 50, between 37.5 and 60."""
    saved = saved_ms(predicted(50.0, "compile", speedup_low=1.6, speedup_high=2.5))
    assert saved == pytest.approx((50.0, 37.5, 60.0))


def test_who_needs_the_whole_step_decides_it() -> None:
    assert decides(100.0, host_ms=40.0, device_ms=99.0) == "device"
    assert decides(100.0, host_ms=98.0, device_ms=40.0) == "host"
    assert decides(100.0, host_ms=70.0, device_ms=60.0) == "both"


def test_why_tells_who_decides_before_and_after() -> None:
    before = predicted(100.0, host_ms=40.0, device_ms=100.0)
    after = predicted(45.0, "precision=bf16", host_ms=44.0, device_ms=30.0)
    assert why(before, after) == (
        "GPU-bound before (GPU 100 ms, CPU 40.0 ms), host-bound after (GPU 30.0 ms, CPU 44.0 ms)"
    )


def test_a_host_bound_step_that_gets_more_cpu_work_says_so() -> None:
    before = predicted(100.0, host_ms=100.0, device_ms=20.0)
    after = predicted(107.0, "precision=bf16", host_ms=107.0, device_ms=18.0)
    assert why(before, after).endswith("gives the CPU more work, and the GPU waits for it")
    assert why(before, after, on_host=True) == "CPU work grows from 100 to 107 ms"


# The history of earlier promises


def kept(name: str, promised: float, delivered: float) -> track_record.TrackedPromise:
    promise = Promise(
        id="a", when_unix=0.0, host="h", settings=(_setting(name),), baseline_ms=100.0,
        predicted_ms=promised, low_ms=promised / 1.2, high_ms=promised * 1.2, workload=Workload(),
    )  # fmt: skip
    delivery = Delivery(
        promise="a", when_unix=1.0, a_ms=100.0, b_ms=delivered, change=0.0, low=0.0, high=0.0,
        confidence=0.95, verdict="faster",
    )  # fmt: skip
    return track_record.TrackedPromise(promise=promise, delivery=delivery)


def test_promises_that_came_out_slower_make_the_next_one_slower_and_it_says_so() -> None:
    history = [kept("precision=bf16", 50.0, 60.0)] * 4
    raw = predicted(50.0, "precision=bf16")
    moved = adjusted(raw, history)
    expected = track_record.adjust("precision", 50.0, raw.low_ms, raw.high_ms, history)
    assert (moved.predicted_ms, moved.low_ms, moved.high_ms) == expected
    assert moved.predicted_ms > 50.0
    assert moved.throughput_factor == pytest.approx(100.0 / moved.predicted_ms)
    assert moved.speedup_low < moved.speedup < moved.speedup_high
    assert moved.assumptions[-1].startswith(
        "corrected by the results of 4 earlier predictions of this kind"
    )


def test_a_history_of_other_changes_moves_nothing() -> None:
    raw = predicted(50.0, "precision=bf16")
    assert adjusted(raw, [kept("compile", 50.0, 60.0)]) == raw


# The command


def test_json_has_the_agreed_names_first_and_the_benchs_numbers(whatif: Any) -> None:
    body = json.loads(whatif(TRACE, "--set", "precision=bf16", "--json"))
    assert tuple(body)[: len(CONTRACT)] == CONTRACT
    bench = bench_for(read_trace(TRACE), measured=read_measured_steps(TRACE))
    expected = bench.predict([_setting("precision=bf16")])
    assert body["schema"] == 1
    assert body["baseline_ms"] == pytest.approx(expected.baseline_ms, rel=1e-6)
    assert body["predicted_ms"] == pytest.approx(expected.predicted_ms, rel=1e-6)
    assert body["low_ms"] < body["predicted_ms"] < body["high_ms"]
    assert body["speedup"] == pytest.approx(body["baseline_ms"] / body["predicted_ms"])
    assert body["refused"] == []
    assert body["assumptions"]
    assert body["baseline_from"] == "measured"


def test_a_run_folder_gives_the_measured_step_and_its_memory(whatif: Any) -> None:
    body = json.loads(whatif(RUN, "--set", "batch=x2", "--json"))
    truth = read_measured_steps(TRACE)
    assert truth is not None
    assert body["baseline_ms"] == pytest.approx(truth.step_ns / 1e6, rel=1e-3)
    assert body["peak_bytes"] > body["baseline_peak_bytes"] > 0
    assert body["peak_low_bytes"] <= body["peak_bytes"] <= body["peak_high_bytes"]


def test_the_first_lines_are_verdict_why_next_and_no_change_stands_beside(whatif: Any) -> None:
    printed = whatif(RUN, "--set", "precision=bf16")
    first = [line.split()[0] for line in printed.splitlines() if line[:1].strip()]
    assert first[1:4] == ["verdict", "why", "next"]
    assert re.search(r"^no change +24\.9 ms", printed, re.M)
    assert re.search(r"^precision=bf16 ", printed, re.M)
    assert re.search(r"^assumptions\n- ", printed, re.M)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_number_is_cut_in_a_narrow_terminal(
    whatif: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    console = make_console(width)
    monkeypatch.setattr("stepscope.ui.terminal.whatif.make_console", lambda: console)
    printed = whatif(RUN)
    assert "…" not in printed
    assert "samples/s" in printed
    assert ("bottleneck" in printed.partition("one change at a time")[2]) == (width > 60)
    assert ("peak memory" in printed) == (width > 60)


def test_changes_combine_whatever_their_order(whatif: Any) -> None:
    ways = (
        ("precision=bf16", "cuda-graphs", "batch=x2"),
        ("batch=x2", "cuda-graphs", "precision=bf16"),
    )
    bodies = [
        json.loads(whatif(RUN, "--json", *(w for each in way for w in ("--set", each))))
        for way in ways
    ]
    assert bodies[0]["predicted_ms"] == bodies[1]["predicted_ms"]
    alone = json.loads(whatif(RUN, "--json", "--set", "batch=x2"))
    assert bodies[0]["predicted_ms"] < alone["predicted_ms"]


def test_a_remedys_id_is_the_change_that_predicts_it(whatif: Any) -> None:
    by_name = json.loads(whatif(RUN, "--json", "--set", "precision=bf16"))
    assert json.loads(whatif(RUN, "--json", "--set", "bf16")) == by_name
    assert by_name["settings"] == ["precision=bf16"]


def test_what_refuses_is_told_and_the_others_are_predicted(whatif: Any) -> None:
    both = json.loads(whatif(RUN, "--json", "--set", "no-sync", "--set", "precision=bf16"))
    alone = json.loads(whatif(RUN, "--json", "--set", "precision=bf16"))
    assert both["predicted_ms"] == alone["predicted_ms"]
    assert both["refused"] == ["no-sync: no call of this step waits for the GPU"]
    assert both["settings"] == ["precision=bf16"]
    printed = whatif(RUN, "--set", "no-sync", "--set", "precision=bf16")
    assert "bf16 may change the step by" in printed
    assert "not predicted\n- no-sync" in printed


def test_where_all_refuse_nothing_was_captured_to_answer() -> None:
    refuses(NotCapturedError, "no call of this step waits", RUN, "--set", "no-sync")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "presision=bf16"), "did you mean precision"),
        (("--set", "precision=bf17"), "choose one of"),
        (("--set", "batch=lots"), "number of samples"),
        (("--set", "batch=x0"), "number of samples"),
        (("--set", "batch=x2", "--set", "batch=x4"), "batch is given twice"),
        (("--set", "bf16", "--set", "precision=tf32"), "precision is given twice"),
        (("--set", "bf16=1"), "takes no value"),
        (("--set", "fused-optimiser"), "did you mean fused-optimizer"),
        (("--set", "remove=("), "not a regular expression"),
        (("--set", "no-data-wait=0"), "takes no value"),
        (("--set", "cuda-graphs=1"), "takes no value"),
        (("--remember",), "name it with --set"),
    ],
)
def test_wrong_use_says_what_is_right(words: tuple[str, ...], message: str) -> None:
    refuses(UsageError, message, RUN, *words)


def test_an_unknown_name_lists_all_there_are() -> None:
    refuses(UsageError, ", ".join(sorted(PREDICTED)), RUN, "--set", "xyz")


def test_without_a_path_there_is_nothing_to_change() -> None:
    refuses(UsageError, "--list")


def test_a_missing_file_is_unreadable() -> None:
    refuses(UnreadableInputError, "does not exist", "nowhere", "--set", "compile")


def test_a_memory_snapshot_has_no_step_to_change(tmp_path: Path) -> None:
    path = snapshots.write(tmp_path / "memory.pickle", snapshots.training().snapshot())
    refuses(NotCapturedError, "memory snapshot", path, "--set", "compile")


def test_a_step_without_an_accelerator_takes_few_changes(whatif: Any) -> None:
    cpu = RUN.parent / "cpu_step.json.gz"
    refuses(NotCapturedError, "cuda-graphs", cpu, "--set", "cuda-graphs")
    assert "operators grow with it" in " ".join(whatif(cpu, "--set", "batch=x2").split())
    printed = whatif(cpu, "--set", "optimizer=fused")
    assert "CPU work grows from" in printed
    assert "bottleneck" not in printed.partition("no change")[0]
    assert "GPU" not in printed


@pytest.mark.parametrize("setting", ["remove=.*", "scale=.*:0"])
def test_a_change_that_leaves_nothing_of_the_step_is_refused(setting: str) -> None:
    cpu = RUN.parent / "cpu_step.json.gz"
    refuses(
        NotCapturedError, f"{setting}: nothing of the step would be left", cpu, "--set", setting
    )


def test_a_refusal_names_its_change_and_is_told_once(whatif: Any) -> None:
    words = ("--set", "bandwidth=2", "--set", "remove=xyz", "--set", "remove=xyz")
    reasons = "remove=xyz: no kernel, operator or annotation has such a name; bandwidth=2: this"
    refuses(NotCapturedError, reasons, RUN, *words)
    assert whatif(RUN, *words, "--set", "compile").count("remove=xyz") == 1


def refuses(kind: type[StepscopeError], message: str, *words: object) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        command.main([str(word) for word in words], standalone_mode=False)


def test_without_a_change_the_usual_ones_are_tried_and_ranked(whatif: Any) -> None:
    body = json.loads(whatif(RUN, "--json"))
    assert tuple(body)[: len(CONTRACT)] == CONTRACT
    assert body["speedup"] == 1.0
    factors = [each["throughput_factor"] for each in body["tried"]]
    assert factors == sorted(factors, reverse=True)
    tried = {each["settings"][0] for each in body["tried"]}
    assert {"precision=bf16", "compile", "cuda-graphs", "batch=x2"} <= tried
    assert len(tried) + len(body["refused"]) == sum(
        len(whatif.usual)
        for whatif in PREDICTED.values()
        if not whatif.for_several_ranks and not whatif.needs_every_step
    )
    printed = whatif(RUN)
    assert "verdict  torch.compile would make this step" in printed
    names = [line.split()[0] for line in printed.splitlines() if " ms " in line and "x " in line]
    assert names[1:] == [each["settings"][0] for each in body["tried"]]


def test_what_findings_offer_is_tried_after_the_usual_changes() -> None:
    usual = [Setting(name="batch", value="x2"), Setting(name="threads", value="1")]
    finding = Finding(
        id="too-many-threads",
        title="",
        share=0.4,
        severity="high",
        summary="",
        evidence=(),
        remedies=(changes.THREADS.offer(), changes.ONE_THREAD.offer()),
    )
    tried = with_offered(usual, [finding])
    assert list(map(str, tried)) == ["batch=x2", "threads=1", "threads=fit"]


def test_list_names_every_what_if(whatif: Any) -> None:
    printed = whatif("--list")
    assert [line.split()[0] for line in printed.splitlines()] == list(PREDICTED)
    body = json.loads(whatif("--list", "--json"))
    assert {each["name"]: each["help"] for each in body["whatifs"]} == {
        name: whatif.help for name, whatif in PREDICTED.items()
    }


def test_of_several_ranks_the_one_that_decides_is_changed_and_named(
    whatif: Any, tmp_path: Path
) -> None:
    for rank in (0, 1):
        shutil.copytree(RUN / "rank-00000", tmp_path / f"rank-{rank:05d}")
    printed = whatif(tmp_path, "--set", "precision=bf16", "--no-cache")
    assert printed.startswith("rank 0 of 2, the slowest")


def test_remember_keeps_the_promise_that_compare_will_answer(whatif: Any) -> None:
    printed = whatif(RUN, "--set", "precision=bf16", "--remember")
    (promise,) = track_record.open_promises()
    assert f"checks prediction {promise.id}" in printed
    assert promise.settings == (_setting("precision=bf16"),)
    assert promise.workload.script == "resnet18.py"
    assert promise.workload.signature
    body = json.loads(whatif(RUN, "--set", "precision=bf16", "--remember", "--json"))
    assert body["promise"] == promise.id  # the same once more
    assert track_record.open_promises() == (promise,)


def test_a_promise_is_the_models_own_word_not_the_adjusted_one(whatif: Any) -> None:
    first = json.loads(whatif(RUN, "--set", "precision=bf16", "--remember", "--json"))
    promise = track_record.open_promises()[0]
    base = promise.baseline_ms
    record_file.append(
        replace(
            kept("precision", 1.0, 1.0).delivery,
            promise=promise.id,
            basis=promise.basis,
            a_ms=base,
            b_ms=base,
            seen=("precision fp32 -> bf16",),
        )
    )
    second = json.loads(whatif(RUN, "--set", "precision=bf16", "--remember", "--json"))
    assert second["raw_ms"] == first["predicted_ms"] == track_record.open_promises()[0].predicted_ms
    assert second["predicted_ms"] > second["raw_ms"]
    said = second["assumptions"][-1]
    assert "the results of 1 earlier prediction of this kind" in said
    assert f"({signed_percent(second['predicted_ms'] / second['raw_ms'] - 1)})" in said
    assert "times as wide" in said


def test_stalls_are_said_and_are_nobodys_work(tmp_path: Path, whatif: Any) -> None:
    """Every fourth step of the recorded run waits 70 ms more for data."""
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    steps = run / "rank-00000/steps.jsonl"
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    for row in rows:
        if row["step"] % 4 == 0:
            for name in ("wall_ns", "data_ns", "device_ns"):
                if row.get(name) is not None:
                    row[name] += 70_000_000
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = json.loads(whatif(run, "--set", "no-data-wait", "--json"))
    assert body["basis"] == "mean"
    assert body["baseline_ms"] == pytest.approx(24.9 + 17, rel=0.02)
    assert body["predicted_ms"] == pytest.approx(24.9, rel=0.02)
    assert (body["stall_ms"], body["decides"]) == (0.0, "device")
    printed = " ".join(whatif(run, "--set", "no-data-wait").split())
    assert "24.9 ms (25.1 ms with it) plus 17.1 ms of stalls on average" in printed
    assert "Stalls add 17.1 ms to an average step now, nothing after" in printed
