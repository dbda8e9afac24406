"""A tune that is killed after any of its trials and resumed decides as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_runs import TOOK_S, SimulatedCommand, contenders, made_up_fix, searched

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.trace.run_folder.related_runs import JOURNAL, TRIALS
from stepscope.ui.tune.plan import FinishedTrial, Journal, TunePlan, TuneStart

START = TuneStart(
    command=("python", "train.py"), folder="/w", steps=60, budget_s=600.0, allow="rounding"
)
PLAN = TunePlan(
    candidates=(),
    left_out=(),
    late=(),
    proposals=(),
    baseline_ms=None,
    took_s=1.0,
    limit_s=60.0,
    least_steps=20,
)


class KilledError(Exception):
    """Stands for a signal."""


class MortalCommand(SimulatedCommand):
    """Is killed while it runs one trial."""

    lives = 1000

    def run(self, number, remedies, **rest):  # type: ignore[no-untyped-def]
        if self.lives == 0:
            raise KilledError
        self.lives -= 1
        return super().run(number, remedies, **rest)


def command() -> MortalCommand:
    return MortalCommand({"a": 0.8, "b": 0.9, "c": 1.05}, together={frozenset("ac"): 0.9})


def fixes() -> list:  # type: ignore[type-arg]
    return contenders(*map(made_up_fix, "abcd"))


@pytest.mark.parametrize("budget_s", [10_000.0, 14 * TOOK_S])
def test_killed_after_any_trial_and_resumed_it_gives_the_same_answer(
    tmp_path: Path, budget_s: float
) -> None:
    whole = command()
    expected = searched(whole, fixes(), budget_s=budget_s)
    for lives in range(len(whole.asked)):
        folder = tmp_path / str(lives)
        folder.mkdir()
        Journal.create(folder, START)
        first = command()
        first.lives = lives
        with pytest.raises(KilledError):
            searched(first, fixes(), budget_s=budget_s, journal=Journal.resume(folder))
        second = command()
        search = searched(second, fixes(), budget_s=budget_s, journal=Journal.resume(folder))
        assert search.kept == expected.kept
        assert [test.why for test in search.tests] == [test.why for test in expected.tests]
        assert first.asked + second.asked == whole.asked


def test_a_longer_budget_goes_on_where_a_shorter_one_ended(tmp_path: Path) -> None:
    Journal.create(tmp_path, START)
    short = command()
    searched(short, fixes(), budget_s=9 * TOOK_S, journal=Journal.resume(tmp_path))
    long = command()
    search = searched(long, fixes(), budget_s=10_000.0, journal=Journal.resume(tmp_path))
    assert search.kept == searched(command(), fixes()).kept
    assert len(long.asked) + len(short.asked) <= 1 + len(search.tests) * 16


def test_half_written_lines_and_folders_without_a_line_are_thrown_away(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, START)
    journal.add(PLAN)
    (tmp_path / TRIALS / "0001-baseline").mkdir()
    trial = FinishedTrial(number=1, remedies=(), folder="0001-baseline", took_s=2.0)
    journal.add(trial)
    (tmp_path / TRIALS / "0002-bf16").mkdir()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"kind":"trial","number":2,"rem')
    again = Journal.resume(tmp_path)
    assert again.trials == [trial]
    assert again.plan == PLAN
    assert [place.name for place in (tmp_path / TRIALS).iterdir()] == ["0001-baseline"]
    again.add(FinishedTrial(number=2, remedies=("bf16",), folder="0002-bf16", took_s=2.0))
    assert [line.number for line in Journal.resume(tmp_path).trials] == [1, 2]


def test_a_folder_without_a_tune_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tune was started there"):
        Journal.resume(tmp_path)
    (tmp_path / JOURNAL).write_text('{"kind":"nonsense"}\n')
    with pytest.raises(UnreadableInputError, match="cannot be read"):
        Journal.resume(tmp_path)
    (tmp_path / JOURNAL).write_text("")
    with pytest.raises(UsageError, match="start a new tune"):
        Journal.resume(tmp_path)
