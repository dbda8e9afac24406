"""`bench --against`: what is read as a base, what is printed, and how it ends."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result
from msgspec.structs import replace
from test_against import MACHINE, results, row, times

from live_runs import make_rows, write_rank, write_run, write_steps
from stepscope.bench.results import BenchResults
from stepscope.bench.saved_results import RESULTS, read_results, write_results
from stepscope.errors import NotCapturedError, SlowerError, UnreadableInputError, UsageError
from stepscope.ui.bench.suite import SuiteEnd
from stepscope.ui.cli import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bench` with options, where the workloads have already been measured."""

    def call(now: BenchResults, *options: str, base: BenchResults | None = None) -> Result:
        write_results(base or results(row()), tmp_path / "base.json")
        end = SuiteEnd(results=now, code=0)
        monkeypatch.setattr(bench, "_run", lambda *_, **__: end)
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
