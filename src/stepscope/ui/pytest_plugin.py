"""The pytest plugin: a training step that may take at most so long. docs/how-to/ci.md explains it.

pytest loads this wherever stepscope is installed, so nothing heavy is imported before a marked test
runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stepscope.verify.step_rounds import StepRounds

    Step = Callable[[], object]

MARKER = "stepscope_budget"
FIXTURE = "stepscope_step"
_HELP = (
    f"{MARKER}(ms=N) or {MARKER}(over_baseline='5%', baseline='steps.json'): fail if the training "
    "step takes longer than N milliseconds, or more than 5% longer than the saved step, with 95% "
    "confidence"
)
_TRIES = 3  # a step over its budget is measured again: a busy moment must not fail a test
_SUMMARY = pytest.StashKey[list[str]]()
_MEASURED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stepscope")
    group.addoption(
        "--stepscope-save",
        action="store_true",
        help="save the steps of tests with a baseline, instead of comparing them with it",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _HELP)
    config.stash[_SUMMARY] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A budget that means nothing is refused before anything runs."""
    for item in items:
        if (marker := item.get_closest_marker(MARKER)) is not None:
            _check(item.nodeid, marker)


@pytest.fixture
def stepscope_step(request: pytest.FixtureRequest) -> Callable[[Step], StepRounds]:
    """Time a function as one training step, and hold it to the test's budget, if it has one."""

    def measure(step: Step) -> StepRounds:
        return _measure(request.node, step)

    return measure


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Without the fixture, the body of a marked test is the step."""
    if pyfuncitem.get_closest_marker(MARKER) is None:
        return (yield)
    result = yield  # once as an ordinary test, so that what it raises is shown as usual
    if FIXTURE not in pyfuncitem.fixturenames:
        body = pyfuncitem.obj
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        _measure(pyfuncitem, lambda: body(**arguments))
    if not pyfuncitem.stash.get(_MEASURED, False):
        pytest.fail(f"the test has a budget but never calls {FIXTURE}(step)", pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash[_SUMMARY]:
        terminalreporter.section("stepscope budgets")
        for line in lines:
            terminalreporter.write_line(line)


def _check(test: str, marker: pytest.Mark) -> None:
    """Raise UsageError for a budget that is none."""
    from stepscope.ui.user_input import parse_share

    known = marker.kwargs
    if marker.args or not known.keys() <= {"ms", "over_baseline", "baseline", "rounds"}:
        raise pytest.UsageError(f"{test}: {_HELP}")
    if ("ms" in known) == ("over_baseline" in known) or (
        ("over_baseline" in known) != ("baseline" in known)
    ):
        raise pytest.UsageError(f"{test}: {MARKER} takes either ms, or over_baseline and baseline")
    ms = known.get("ms", 1.0)
    if not isinstance(ms, (int, float)) or not 0 < ms < math.inf:
        raise pytest.UsageError(f"{test}: ms={ms!r}: write milliseconds, such as 12.5")
    if "over_baseline" in known and parse_share(known["over_baseline"]) is None:
        raise pytest.UsageError(
            f"{test}: over_baseline={known['over_baseline']!r}: write '5%' or 0.05"
        )
    rounds = known.get("rounds", 5)
    if not isinstance(rounds, int) or rounds < 5:
        raise pytest.UsageError(f"{test}: rounds={rounds!r}: an interval needs at least 5")


def _measure(item: pytest.Item, step: Step) -> StepRounds:
    from stepscope.errors import StepscopeError
    from stepscope.verify.step_rounds import ROUNDS, time_step

    item.stash[_MEASURED] = True
    marker = item.get_closest_marker(MARKER)
    budget = marker.kwargs if marker is not None else {}
    if hasattr(item.config, "workerinput"):
        step()
        pytest.skip("a step is not timed while other tests run: use pytest -n 0")

    def measured() -> StepRounds:
        return time_step(step, rounds=budget.get("rounds", ROUNDS))

    try:
        if "baseline" in budget:
            return _hold_to_baseline(item, budget, measured)
        return _hold_to_ms(item, budget.get("ms"), measured)
    except StepscopeError as error:
        pytest.fail(str(error), pytrace=False)


def _hold_to_ms(
    item: pytest.Item, budget_ms: float | None, measured: Callable[[], StepRounds]
) -> StepRounds:
    from stepscope.text.figures import milliseconds

    if budget_ms is None:
        time = measured()
        _note(item, time, "no budget")
        return time
    limit = milliseconds(budget_ms)

    def judge(time: StepRounds) -> tuple[bool, str]:
        if time.low_ms <= budget_ms:
            return True, f"budget {limit}"
        return False, f": the whole interval is over the budget of {limit}"

    accept = f"To accept it, raise ms in @pytest.mark.{MARKER} of {item.nodeid}"
    return _hold(item, measured(), measured, judge, accept)


def _hold_to_baseline(
    item: pytest.Item, budget: Mapping[str, Any], measured: Callable[[], StepRounds]
) -> StepRounds:
    from stepscope.text import figures
    from stepscope.ui.step_baseline import read_baseline, save_step, step_here, unlike_machine
    from stepscope.ui.user_input import parse_share
    from stepscope.verify.step_rounds import rounds_change, summarise_rounds

    file: Path = item.config.rootpath / budget["baseline"]
    if item.config.getoption("--stepscope-save"):
        time = measured()
        save_step(file, item.nodeid, step_here(time.rounds_ms))
        _note(item, time, f"saved to {budget['baseline']}")
        return time
    base = read_baseline(file).steps.get(item.nodeid)
    how = f"pytest --stepscope-save {item.nodeid}"
    if base is None:
        pytest.fail(f"{file} has no step for this test: save one with {how}", pytrace=False)
    first = measured()
    if (unlike := unlike_machine(base, step_here(first.rounds_ms))) is not None:
        pytest.skip(f"the baseline is from another machine: {unlike}. To save one here: {how}")
    share = parse_share(budget["over_baseline"]) or 0.0
    allowed = figures.trimmed(figures.unsigned_percent(share))
    then = figures.milliseconds(summarise_rounds([ms / 1e3 for ms in base.rounds_ms], 1).ms)

    def judge(time: StepRounds) -> tuple[bool, str]:
        change = rounds_change(base.rounds_ms, time.rounds_ms)
        value, low, high = (math.expm1(x) for x in (change.value, change.low, change.high))
        words = figures.relative_change(value)
        if low <= share:
            return True, f"{words} against the baseline, {allowed} allowed"
        interval = figures.relative_interval(low, high)
        return False, (
            f": {words} ({interval}) against the baseline's {then}. The whole interval is over the "
            f"{allowed} allowed"
        )

    return _hold(item, first, measured, judge, f"To accept it as the new baseline: {how}")


def _hold(
    item: pytest.Item,
    first: StepRounds,
    measured: Callable[[], StepRounds],
    judge: Callable[[StepRounds], tuple[bool, str]],
    accept: str,
) -> StepRounds:
    """Measure until a try keeps the budget; `judge` says whether it does, and the words for it."""
    from stepscope.text.figures import milliseconds

    tries = [first]
    while True:
        keeps, words = judge(tries[-1])
        if keeps:
            _note(item, tries[-1], words)
            return tries[-1]
        if len(tries) == _TRIES:
            times = ", ".join(milliseconds(time.ms) for time in tries)
            pytest.fail(
                f"the step takes {_words(tries[-1])}{words}\n"
                f"It was measured {len(tries)} times: {times}\n{accept}",
                pytrace=False,
            )
        tries.append(measured())


def _words(time: StepRounds) -> str:
    from stepscope.text.figures import interval, milliseconds
    from stepscope.text.words import counted

    return (
        f"{milliseconds(time.ms)} (95% interval {interval(time.low_ms, time.high_ms)} ms; "
        f"{len(time.rounds_ms)} rounds of {counted(time.calls, 'step')})"
    )


def _note(item: pytest.Item, time: StepRounds, words: str) -> None:
    item.user_properties.append(("stepscope_step_ms", time.ms))
    item.config.stash[_SUMMARY].append(f"{item.nodeid}: {_words(time)}, {words}")
