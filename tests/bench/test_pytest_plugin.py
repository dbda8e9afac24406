"""The pytest plugin: budgets in milliseconds and against a saved step, in real pytest runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepscope.verify.step_rounds import rounds_change, summarise_rounds, time_step

pytest_plugins = ["pytester"]
PLUGIN = "stepscope.ui.pytest_plugin"
DOCS = Path(__file__).parents[2] / "docs/how-to/ci.md"
BUSY = "import time\n\ndef busy(ms):\n    end = time.perf_counter() + ms / 1e3\n"
BUSY += "    while time.perf_counter() < end:\n        pass\n\n"


def run(pytester: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_step="import pytest\n" + BUSY + test)
    return pytester.runpytest("-p", PLUGIN, "--strict-markers", *options)


def with_fixture(budget: str, ms: float) -> str:
    return f"""
@pytest.mark.stepscope_budget({budget}, rounds=5)
def test_step(stepscope_step):
    stepscope_step(lambda: busy({ms}))
"""


def test_a_step_within_its_budget_passes_and_is_shown(pytester: pytest.Pytester) -> None:
    result = run(pytester, with_fixture("ms=1000", 1))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*stepscope budgets*", "*::test_step: * ms (*budget 1,000 ms"])


def test_a_step_over_its_budget_fails_with_what_was_measured(pytester: pytest.Pytester) -> None:
    result = run(pytester, with_fixture("ms=0.5", 5))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "the step takes * ms (95% interval * to * ms; 5 rounds of * step*): the whole "
            "interval is over "
            "the budget of 0.500 ms",
            "It was measured 3 times: *",
            "To accept it, raise ms in @pytest.mark.stepscope_budget of test_step.py::test_step",
        ]
    )


def test_without_the_fixture_the_body_is_the_step(pytester: pytest.Pytester) -> None:
    body = """
@pytest.fixture
def long():
    return 5

@pytest.mark.stepscope_budget(ms=0.5, rounds=5)
def test_step(long):
    busy(long)

@pytest.mark.stepscope_budget(ms=1000, rounds=5)
def test_wrong():
    assert 1 == 2
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["the step takes *", "*assert 1 == 2"])


def test_the_baseline_is_saved_compared_and_accepted(pytester: pytest.Pytester) -> None:
    test = with_fixture("over_baseline='3000%', baseline='steps.json'", 1)
    missing = run(pytester, test)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*steps.json has no step for this test: save one with pytest *"])
    run(pytester, test, "--stepscope-save").assert_outcomes(passed=1)
    run(pytester, test).assert_outcomes(passed=1)
    change_saved(pytester, rounds_ms=[0.001, 0.0011, 0.001, 0.0009, 0.001])
    slower = run(pytester, test)
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(
        [
            "the step takes *against the baseline's * ms. The whole interval is over the "
            "3000% allowed*",
            "To accept it as the new baseline: pytest --stepscope-save test_step.py::test_step",
        ]
    )
    run(pytester, test, "--stepscope-save").assert_outcomes(passed=1)
    run(pytester, test).assert_outcomes(passed=1)


def change_saved(pytester: pytest.Pytester, **fields: object) -> None:
    file = pytester.path / "steps.json"
    saved = json.loads(file.read_text())
    saved["steps"]["test_step.py::test_step"] |= fields
    file.write_text(json.dumps(saved))


def test_a_baseline_of_another_machine_is_not_compared(pytester: pytest.Pytester) -> None:
    test = with_fixture("over_baseline='5%', baseline='steps.json'", 1)
    run(pytester, test, "--stepscope-save").assert_outcomes(passed=1)
    change_saved(pytester, processor="another")
    result = run(pytester, test, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*the baseline is from another machine: processor *"])


def test_a_damaged_baseline_is_said_in_one_line(pytester: pytest.Pytester) -> None:
    (pytester.path / "steps.json").write_text("{")
    result = run(pytester, with_fixture("over_baseline='5%', baseline='steps.json'", 1))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*steps.json is not what pytest --stepscope-save writes: *"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("ms=-1", "ms=-1: write milliseconds"),
        ("ms=1, over_baseline='5%'", "takes either ms, or over_baseline and baseline"),
        ("over_baseline='5%'", "takes either ms, or over_baseline and baseline"),
        ("over_baseline='five', baseline='b'", "over_baseline='five': write '5%' or 0.05"),
        ("12.5, seconds=3", "fail if the training step takes longer"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(
    pytester: pytest.Pytester, budget: str, said: str
) -> None:
    mark = f"@pytest.mark.stepscope_budget({budget})\ndef test_step():\n    pass\n"
    result = run(pytester, mark)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()


def test_a_budget_that_nothing_is_held_to_fails(pytester: pytest.Pytester) -> None:
    mark = "@pytest.mark.stepscope_budget(ms=1)\ndef test_step(stepscope_step):\n    pass\n"
    result = run(pytester, mark)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the test has a budget but never calls stepscope_step(step)"])


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    script = (
        f"import sys, pytest, {PLUGIN}\n"
        "heavy = {'numpy', 'msgspec', 'rich', 'click', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_the_example_in_the_docs_runs(pytester: pytest.Pytester) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    pytester.makepyfile(test_example=example)
    # The times in it are those of nobody's machine.
    saved = pytester.runpytest_subprocess("-p", PLUGIN, "--stepscope-save")
    saved.assert_outcomes(passed=2)
    assert (pytester.path / "tests/steps.json").exists()


class Clock:
    """Seconds that pass only while a step runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_warm_up_is_not_counted_and_short_steps_share_a_round() -> None:
    clock, calls = Clock(), 0

    def step() -> None:
        nonlocal calls
        calls += 1
        clock.now += 1.0 if calls <= 3 else 0.004

    time = time_step(step, rounds=8, clock=clock)
    assert time.calls == 1  # the last call of the warm-up took a second
    assert time.ms == pytest.approx(4.0)
    clock.now, calls = 0.0, 10
    time = time_step(step, rounds=8, clock=clock)
    assert time.calls == 5
    assert len(time.rounds_ms) == 8
    assert time.low_ms < time.ms < time.high_ms


def test_a_long_step_gets_fewer_rounds() -> None:
    clock = Clock()

    def step() -> None:
        clock.now += 4.0

    assert len(time_step(step, clock=clock).rounds_ms) == 5


def test_same_steps_of_two_starts_seldom_look_slower() -> None:
    draw = np.random.default_rng(3)
    alarms = found = 0
    for _ in range(150):
        base, now = (10 * np.exp(draw.normal(0, 0.01) + draw.normal(0, 0.02, 20)) for _ in range(2))
        alarms += rounds_change(base.tolist(), now.tolist()).low > 0
        slow = rounds_change(base.tolist(), (1.2 * now).tolist())
        found += slow.low > np.log1p(0.05)
    assert alarms <= 0.05 * 150
    assert found >= 0.99 * 150


def test_one_pause_of_the_machine_does_not_decide() -> None:
    quiet = [0.010 + 0.0001 * (i % 3) for i in range(20)]
    paused = [*quiet[:7], 0.300, *quiet[8:]]
    assert summarise_rounds(paused, 1).low_ms == pytest.approx(
        summarise_rounds(quiet, 1).low_ms, rel=0.01
    )
