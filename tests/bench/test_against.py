"""A bench against saved results: intervals, verdicts, and what cannot be compared."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from msgspec.structs import replace

from live_runs import make_rows, write_rank, write_run, write_steps
from stepscope.bench.against import compare_results, moved_part, slower_by, slower_with_machine
from stepscope.bench.results import BenchMachine, BenchResults, WorkloadChange, WorkloadResult
from stepscope.bench.run_change import run_change, usual_variance
from stepscope.bench.saved_results import RESULTS, read_results, write_results
from stepscope.errors import NotCapturedError, SlowerError, UnreadableInputError, UsageError
from stepscope.ui.cli import bench

MACHINE = BenchMachine(host="one", processor="A processor", cores=8, torch="2.13.0", python="3.12")
BASE_MS = (10.0, 10.1, 9.9, 10.05, 9.95)


def row(runs_ms: tuple[float, ...] = BASE_MS, **fields: Any) -> WorkloadResult:
    return WorkloadResult(**{"name": "ncf", "size": "tiny", "runs_ms": runs_ms, **fields})


def results(*rows: WorkloadResult, **fields: Any) -> BenchResults:
    known = {"stepscope": "0.1.0", "command": (), "started_unix": 1e9, "machine": MACHINE}
    return BenchResults(**{**known, "workloads": rows, **fields})


def only_change(base: WorkloadResult, now: WorkloadResult) -> WorkloadChange:
    (change,) = compare_results(results(base), results(now), "base.json").workloads
    return change


def times(share: float) -> tuple[float, ...]:
    return tuple(share * ms for ms in BASE_MS)


def test_a_slower_workload_is_named_with_its_interval() -> None:
    change = only_change(row(), row(times(1.05)))
    assert change.verdict == "slower"
    assert change.change == pytest.approx(0.05)
    assert change.low is not None
    assert change.high is not None
    assert 0 < change.low < 0.05 < change.high < 0.08
    assert change.now_ms == pytest.approx(10.5, rel=1e-3)
    assert only_change(row(), row(times(0.95))).verdict == "faster"
    assert only_change(row(), row(times(1.005))).verdict == "no difference seen"


def test_one_disturbed_run_makes_no_alarm_and_hides_no_change() -> None:
    disturbed = (*BASE_MS[:-1], 19.0)
    assert only_change(row(), row(disturbed)).verdict == "no difference seen"
    slower = (*times(1.06)[:-1], 19.0)
    assert only_change(row(), row(slower)).verdict == "slower"


def test_a_pause_in_every_run_is_no_change() -> None:
    steps = tuple((ms,) * 60 for ms in BASE_MS)
    paused = tuple((*run[:30], 40.0, *run[31:]) for run in steps)
    means = tuple(sum(run) / len(run) for run in paused)
    assert only_change(row(), row(means)).verdict == "slower"  # means alone cannot tell
    change = only_change(row(steps_ms=steps), row(means, steps_ms=paused))
    assert change.verdict == "no difference seen"
    stalled = tuple((*run[:20], *(40.0,) * 5, *run[25:]) for run in steps)
    means = tuple(sum(run) / len(run) for run in stalled)
    assert only_change(row(steps_ms=steps), row(means, steps_ms=stalled)).verdict == "slower"


def test_runs_that_agree_by_luck_do_not_make_the_interval_too_narrow() -> None:
    equal = (10.0,) * 5
    change = only_change(row(equal), row((10.05,) * 5))
    assert change.verdict == "no difference seen"
    assert change.high is not None
    assert change.high > 0.01


def test_one_saved_run_is_compared_with_several_of_now() -> None:
    assert only_change(row((10.0,)), row(times(1.2))).verdict == "slower"
    alone = only_change(row((10.0,)), row((12.0,)))
    assert alone.verdict == "not comparable"
    assert "--runs 5" in (alone.why or "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"size": "small"}, "size small, the base tiny"),
        ({"ranks": 2}, "ranks 2, the base 1"),
        ({"remedies": ("bf16",)}, "with bf16, the base with no change"),
        ({"settings": {"batch": 8}}, "batch 8, the base unknown"),
        ({"name": "dlrm"}, "the base has no such workload"),
        ({"status": "failed", "why": "out of memory"}, "failed: out of memory"),
    ],
)
def test_what_was_measured_otherwise_is_not_compared(fields: dict[str, Any], said: str) -> None:
    change = only_change(row(), row(times(2.0), **fields))
    assert change.verdict == "not comparable"
    assert said in (change.why or "")
    assert change.change is None


def test_the_row_that_was_measured_alike_is_chosen() -> None:
    base = results(row(times(3.0), remedies=("bf16",)), row(), row(times(2.0), size="small"))
    (change,) = compare_results(base, results(row()), "base.json").workloads
    assert change.verdict == "no difference seen"


@pytest.mark.parametrize("fields", [{"cores": 4}, {"device": "H200"}, {"processor": "Another"}])
def test_another_machine_is_not_compared(fields: dict[str, Any]) -> None:
    now = results(row(), machine=replace(MACHINE, **fields))
    (change,) = compare_results(results(row()), now, "base.json").workloads
    assert change.verdict == "not comparable"
    assert "another machine" in (change.why or "")


def test_another_torch_is_compared_and_said() -> None:
    now = results(row(), machine=replace(MACHINE, torch="2.14.0"))
    comparison = compare_results(results(row()), now, "base.json")
    assert comparison.workloads[0].verdict == "no difference seen"
    assert comparison.notes == ("torch 2.14.0, the base's 2.13.0",)


def test_the_part_that_moved_is_named() -> None:
    base = row(budget_ms={"compute": 8.0, "data": 1.0, "host": 1.0})
    now = row(times(1.1), budget_ms={"compute": 8.1, "data": 2.5, "host": 0.4})
    change = only_change(base, now)
    assert [part.id for part in change.parts] == ["data", "host", "compute"]
    moved = moved_part(change)
    assert moved is not None
    assert moved.id == "data"
    assert moved.change_ms == pytest.approx(1.5)


def test_a_machine_that_changed_more_than_the_step_is_said() -> None:
    base = row(calibration_ms=(5.0, 5.01, 5.02, 4.99, 5.0))
    slow = tuple(1.1 * ms for ms in base.calibration_ms)
    change = only_change(base, row(times(1.06), calibration_ms=slow))
    assert change.verdict == "slower"  # nothing is corrected
    assert change.machine_changed
    assert change.pace_change == pytest.approx(0.1)
    assert "takes 10.0% longer for fixed arithmetic" in change.notes[0]
    more = only_change(base, row(times(1.2), calibration_ms=slow))
    assert more.notes == ()
    assert not more.machine_changed
    restless = (4.0, 7.0, 4.5, 6.8, 5.9)  # the pace is not surely slower
    assert not only_change(base, row(times(1.06), calibration_ms=restless)).machine_changed
    assert only_change(base, row(calibration_ms=slow)).notes  # it may hide a change
    same = replace(base, runs_ms=times(1.06))
    assert only_change(base, same).notes == ()
    assert only_change(row(), row(times(1.06))).pace_change is None


def test_a_machine_that_became_slower_raises_no_alarm() -> None:
    calm = row(calibration_ms=(5.0, 5.01, 5.02, 4.99, 5.0))
    tired = row(times(1.28), calibration_ms=tuple(1.3 * ms for ms in calm.calibration_ms))
    comparison = compare_results(results(calm), results(tired), "base.json")
    assert slower_by(comparison, 0.03) == ()
    assert [change.name for change in slower_with_machine(comparison, 0.03)] == [calm.name]


def test_an_alarm_needs_certainty_and_size() -> None:
    def alarms(now: WorkloadResult, share: float) -> int:
        return len(slower_by(compare_results(results(row()), results(now), "base.json"), share))

    assert alarms(row(times(1.05)), 0.03) == 1
    assert alarms(row(times(1.025)), 0.03) == 0  # surely slower, but not by so much
    assert alarms(row((8.0, 10.9, 12.0, 9.5, 13.0)), 0.03) == 0  # 6% on average, but not surely


def test_workloads_of_the_base_that_did_not_run_are_listed() -> None:
    base = results(row(), row(name="dlrm"), row(name="dlrm", size="small"))
    assert compare_results(base, results(row()), "base.json").not_run == ("dlrm",)


def simulated(
    count: int, runs: int, slower: float, *, workloads: int = 1, unlike: float = 0.0, **noise: float
) -> tuple[float, float]:
    """Shares of made-up benches with a verdict "slower", and of workloads with an alarm at 3%."""
    draw = np.random.default_rng(7)
    found, alarms = 0, []
    for _ in range(count):
        pairs = []
        for _ in range(workloads):
            restless = float(np.exp(draw.normal(0.0, unlike)))
            base, now = (np.exp(restless * made_logs(draw, runs, **noise)) for _ in range(2))
            pairs.append((base.tolist(), ((1 + slower) * now).tolist()))
        usual = usual_variance(pairs)
        changes = [run_change(*pair, comparisons=workloads, usual_variance=usual) for pair in pairs]
        slow = [change is not None and change.low > 0 for change in changes]
        found += any(slow)
        alarms += [
            one and change is not None and change.value > np.log(1.03)
            for one, change in zip(slow, changes, strict=True)
        ]
    return found / count, float(np.mean(alarms))


def made_logs(
    draw: np.random.Generator,
    runs: int,
    starts: float = 0.01,
    sessions: float = 0.0,
    disturbed: float = 0.0,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    logs = draw.normal(0.0, starts, runs) + draw.normal(0.0, sessions)
    return logs + np.where(draw.random(runs) < disturbed, draw.uniform(0.05, 0.3, runs), 0.0)


@pytest.mark.parametrize(
    "noise",
    [
        {"starts": 0.003},
        {"starts": 0.01},
        {"starts": 0.03},
        {"starts": 0.01, "sessions": 0.005},
        {"starts": 0.01, "disturbed": 0.15},
    ],
    ids=str,
)
@pytest.mark.parametrize("runs", [5, 7])
def test_same_against_same_seldom_raises_an_alarm(noise: dict[str, float], runs: int) -> None:
    found, alarms = simulated(200, runs, 0.0, **noise)
    assert found <= 0.05
    assert alarms <= 0.05


def test_the_whole_suite_seldom_raises_one_either() -> None:
    found, _ = simulated(40, 5, 0.0, workloads=24, sessions=0.005, unlike=0.5)
    assert found <= 0.1


def test_other_workloads_tell_how_much_runs_differ() -> None:
    _, with_others = simulated(8, 5, 0.05, workloads=24)
    assert with_others >= 0.7
    assert usual_variance([(BASE_MS, BASE_MS)]) is None  # nothing to learn from itself
    quiet, restless = (10.0, 10.01, 10.02, 9.99, 9.98), (10.0, 12.0, 9.0, 11.0, 8.0)
    few = usual_variance([(quiet, quiet), (quiet, quiet), (restless, restless)])
    assert few == pytest.approx(usual_variance([(quiet, quiet)] * 2))  # one restless changes little


def test_five_per_cent_are_found_with_so_many_runs() -> None:
    assert simulated(200, 5, 0.05)[1] >= 0.98
    assert simulated(200, 7, 0.05)[1] >= 0.99
    assert simulated(200, 5, 0.05, disturbed=0.05)[1] >= 0.9


# `bench --against`: what is read as a base, what is printed, and how it ends.

ROOT = Path(__file__).parents[2]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bench` with options, where the workloads have already been measured."""

    def call(now: BenchResults, *options: str, base: BenchResults | None = None) -> Result:
        write_results(base or results(row()), tmp_path / "base.json")
        monkeypatch.setattr(bench, "_run", lambda *_, **__: (now, 0))
        arguments = ["gpt2", "--against", str(tmp_path / "base.json"), *options]
        return CliRunner().invoke(bench.command, arguments)

    return call


def test_a_slower_workload_ends_with_its_own_error(invoke: Any) -> None:
    done = invoke(results(row(times(1.05))), "--fail-on-slower", "3%")
    assert isinstance(done.exception, SlowerError)
    assert "ncf +5.0%; --fail-on-slower allows 3%" in str(done.exception)
    assert "slower: ncf +5.0%; 1 workload compared" in done.stdout
    assert invoke(results(row(times(1.05)))).exception is None  # nobody asked for an alarm
    assert invoke(results(row(times(1.05))), "--fail-on-slower", "6%").exception is None
    assert invoke(results(row()), "--fail-on-slower", "3%").exception is None


def test_nothing_to_compare_is_no_silent_success(invoke: Any) -> None:
    other = results(row(), machine=replace(MACHINE, cores=4))
    done = invoke(other, "--fail-on-slower", "3%")
    assert isinstance(done.exception, NotCapturedError)
    assert "note  ncf cannot be compared: another machine: cores 4, the base's 8" in done.stdout
    assert invoke(other).exception is None


def test_json_has_the_comparison_beside_the_results(invoke: Any) -> None:
    done = invoke(results(row(times(1.05))), "--json")
    answer = json.loads(done.stdout)
    assert answer["workloads"][0]["name"] == "ncf"
    (change,) = answer["against"]["workloads"]
    assert change["verdict"] == "slower"
    assert change["low"] < change["change"] < change["high"]
    assert answer["against"]["confidence"] == 0.95


def test_an_alarm_without_a_base_is_refused() -> None:
    done = CliRunner().invoke(bench.command, ["gpt2", "--fail-on-slower", "3%"])
    assert isinstance(done.exception, UsageError)
    assert "--fail-on-slower needs --against" in str(done.exception)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "was not written by stepscope bench --save"),
        ('{"schema": 1}', "was not written by stepscope bench --save"),
        (msgspec.json.encode(results(row(), schema=9)).decode(), "has schema 9"),
        (msgspec.json.encode(results(row((0.0, 1.0)))).decode(), "has a run that takes no time"),
    ],
)
def test_a_base_that_is_none_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "base.json").write_text(content)
    with pytest.raises(UnreadableInputError, match=said):
        read_results(tmp_path / "base.json")
    with pytest.raises(UnreadableInputError, match="does not exist"):
        read_results(tmp_path / "other.json")


def test_a_folder_of_a_bench_is_a_base_too(tmp_path: Path) -> None:
    write_results(results(row()), tmp_path / RESULTS)
    assert read_results(tmp_path) == results(row())


def write_training(folder: Path, step_ms: float, *words: str, captured: int = 60) -> None:
    """A run folder of a workload, as `stepscope run` leaves it."""
    module = ["python", "-m", "stepscope.bench.train"]
    write_run(folder, code=0, command=[*module, *words])
    write_rank(folder / "rank-00000", steps=captured)
    write_steps(folder / "rank-00000", make_rows([step_ms] * captured))


def test_runs_of_a_workload_are_a_base_too(tmp_path: Path) -> None:
    words = ("gpt2", "--size=tiny", "--steps=60", "--set=batch=4")
    write_training(tmp_path / "a", 10.0, *words)
    (alone,) = read_results(tmp_path / "a").workloads
    assert (alone.name, alone.size, alone.ranks) == ("gpt2", "tiny", 1)
    assert alone.settings["batch"] == 4
    assert alone.runs_ms == pytest.approx((10.0,))
    write_training(tmp_path / "b", 11.0, *words)
    write_training(tmp_path / "c", 12.0, "gpt2", "--steps=60")
    together = read_results(tmp_path).workloads
    assert [pytest.approx(one.runs_ms) for one in together] == [(10.0, 11.0), (12.0,)]


def test_a_step_that_capture_saw_as_two_is_one(tmp_path: Path) -> None:
    write_training(tmp_path, 5.0, "gpt2", "--steps=30", captured=60)
    assert read_results(tmp_path).workloads[0].runs_ms == pytest.approx((10.0,))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt2", "--set=colour=3"), "gpt2 no longer has the setting 'colour'"),
        (("gpt2", "--size=huge"), "is not a run of a workload"),
    ],
)
def test_a_run_of_something_else_is_no_base(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    write_training(tmp_path, 10.0, *words)
    with pytest.raises(NotCapturedError, match=said):
        read_results(tmp_path)


def test_the_commands_of_the_example_action_are_ours() -> None:
    action = yaml.safe_load((ROOT / "docs/examples/bench-action.yml").read_text())
    steps = action["jobs"]["bench"]["steps"]
    commands = [step["run"] for step in steps if "stepscope bench" in step.get("run", "")]
    assert len(commands) == 2
    for words in commands:
        options = shlex.split(words.partition("stepscope bench ")[2])
        with bench.command.make_context("bench", options) as context:
            assert context.params["runs"] == 7
    assert context.params["fail_on_slower"] == 0.03
