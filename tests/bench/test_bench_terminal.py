"""A bench's answer in a terminal, from results that nobody measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_results import failed, made_results, made_workload

from stepscope.bench.catalogue import load
from stepscope.bench.results import Rerun
from stepscope.ui.bench.words import bench_answer, rerun_words
from stepscope.ui.terminal.bench import print_bench, print_list


def printed(capsys: pytest.CaptureFixture[str], width: int = 100, **changes: object) -> str:
    print_bench(made_results(**changes), {}, width=width)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 100, 200])
def test_no_line_is_wider_than_the_terminal(capsys: pytest.CaptureFixture[str], width: int) -> None:
    table = printed(capsys, width).split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= width
    assert "resnet50" in table
    assert "samples/s" in table


def test_what_failed_and_what_was_not_run_are_named_first_and_say_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys)
    verdict = " ".join(text.splitlines()[0].split())
    assert verdict == ("verdict 22 of 24 workloads measured. Not measured: bert-large, mask-rcnn")
    assert "bert-large: failed: exit code 1: CUDA out of memory, 2.10 GB wanted" in text
    assert "mask-rcnn: not run: needs 161 GB" in text


def test_a_wide_terminal_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    row = made_workload(0, verdict="Host-bound: the GPU has nothing queued", low=90.0, high=110.0)
    print_bench(made_results(1, workloads=(row,)), {}, width=200)
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    for column in ("samples/s", "±", "step ms", "busy", "MFU", "CPU", "memory", "loss"):
        assert column in lines[0]
    assert "Host-bound" in lines[1]
    assert "nothing queued" not in lines[1]


def test_a_column_that_nobody_knows_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(made_workload(place, mfu=None) for place in range(3))
    print_bench(made_results(3, workloads=rows), {}, width=200)
    assert "MFU" not in capsys.readouterr().out


def test_a_speed_beside_plain_runs_has_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    faster = made_workload(0, remedies=("bf16",), speedup=1.84, speedup_low=1.79, speedup_high=1.9)
    print_bench(made_results(2, workloads=(made_workload(0), faster)), {}, width=200)
    text = capsys.readouterr().out
    assert "resnet50 with bf16" in text
    assert "1.84 (1.79 to 1.90)" in text


def test_the_next_step_names_the_output_of_what_failed_then_the_rule_that_was_broken() -> None:
    good, bad = made_workload(0), failed(made_workload(1), "ValueError: no")
    bad_results = made_results(2, workloads=(good, bad))
    assert "Not measured: inception-v3" in bench_answer(bad_results).verdict
    broken = made_results(1, broken_rules=("only 1 run of each workload",))
    assert (
        bench_answer(broken).next
        == "these results support no claim yet: only 1 run of each workload"
    )


def test_a_missed_target_is_in_the_verdict() -> None:
    missed = made_workload(0, target_reached=False, time_to_target_s=None)
    verdict = bench_answer(made_results(1, workloads=(missed,))).verdict
    assert verdict == "1 workload measured. The loss of resnet50 did not reach its target"


def test_a_saved_file_says_whether_anybody_ran_it_again() -> None:
    assert rerun_words(made_results(1)).startswith("nobody has repeated this run yet")
    same = Rerun(started_unix=1.0, host="node-8", agrees=True)
    other = Rerun(started_unix=2.0, host="node-9", agrees=False, differs=("gpt2 is 6% slower",))
    assert rerun_words(made_results(1, reruns=(same,))) == (
        "repeated 1 time. The last one, on node-8, agrees"
    )
    assert rerun_words(made_results(1, reruns=(same, other))).endswith(
        "on node-9, does not agree: gpt2 is 6% slower"
    )


def test_the_list_has_one_line_for_each_and_cuts_no_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = replace(load("gpt2"), name="a-name-that-is-rather-long", source="words " * 40)
    print_list([workload, load("gpt2")], width=80)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "a-name-that-is-rather-long  language model  words" in lines[1]
