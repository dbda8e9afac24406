"""Which step does what follows from its number alone."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from two_ranks import run_ranks

import stepscope
from stepscope.measure import never_raise
from stepscope.measure.profiler import windows as profiler_windows
from stepscope.measure.profiler.extra_windows import (
    MOST_WINDOWS,
    STALL_TRACE,
    TRIES,
    StallWatch,
    WindowRequests,
)
from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.profiler.windows import KeptWindows, ProfilerWindows, to_keep
from stepscope.measure.settings import Settings
from stepscope.records.folders import REQUEST_FILE, plan_name


def schedule(**settings: object) -> Schedule:
    return Schedule.plan(Settings(folder="", **settings))  # type: ignore[arg-type]


def roles(schedule: Schedule, steps: int = 40) -> dict[str, list[int]]:
    return {
        "opens": [n for n in range(steps) if schedule.opens(n) is not None],
        "closes": [n for n in range(steps) if schedule.closes(n)],
        "memory": [n for n in range(steps) if schedule.measures_memory(n)],
    }


@pytest.mark.parametrize(
    ("settings", "opens", "closes", "memory"),
    [
        pytest.param({"wait": 4, "warmup": 1, "active": 2}, [4], [7], [8], id="one"),
        pytest.param(
            {"wait": 3, "warmup": 1, "active": 1, "repeat": 3}, [3, 8, 13], [5, 10, 15], [16],
            id="memory waits for the last that is repeated",
        ),
        pytest.param({"wait": 3, "memory": False}, [3], [8], [], id="memory left out"),
        pytest.param({"memory": False}, [1, 6, 10], [3, 9, 15], [], id="memory left out, early"),
        # A script of 3 steps has one recorded step, of 9 two, of 15 three.
        pytest.param({}, [1, 6, 10], [3, 9, 15], [5, 16], id="early ones first"),
        # The first step's beginning was not seen.
        pytest.param({"wait": 0, "warmup": 0, "active": 1}, [1], [2], [3], id="never the first"),
        pytest.param(
            {"every": 8}, [1, 6, 10, 24, 32], [3, 9, 15, 29, 37], [5, 16], id="regular ones after"
        ),
        pytest.param(
            {"wait": 1, "warmup": 2, "active": 3, "every": 1, "repeat": 1}, [1, 14, 21, 28, 35],
            [6, 19, 26, 33], [7], id="plain steps between regular ones",
        ),
    ],
)  # fmt: skip
def test_what_happens_follows_from_the_settings(
    settings: dict[str, Any], opens: list[int], closes: list[int], memory: list[int]
) -> None:
    plan = schedule(**settings)
    assert roles(plan) == {"opens": opens, "closes": closes, "memory": memory}


def test_repeated_windows_have_files_of_their_own() -> None:
    files = [window.file for window in schedule(wait=3, repeat=3).windows]
    assert files == ["trace.json.gz", "trace-1.json.gz", "trace-2.json.gz"]


def test_early_windows_are_replaced_by_the_one_that_stays() -> None:
    plan = schedule()
    steps = [list(range(window.first_active, window.last + 1)) for window in plan.windows]
    assert steps == [[2], [7, 8], [12, 13, 14]]
    assert {window.file for window in plan.windows} == {"trace.json.gz"}


def test_regular_windows_go_on_without_end() -> None:
    plan = schedule(wait=4, warmup=1, active=2, every=10)
    assert roles(plan, 50) == {
        "opens": [4, 10, 20, 30, 40],
        "closes": [7, 13, 23, 33, 43],
        "memory": [8],
    }
    month = plan.opens(2_600_000)
    assert month is not None
    assert month.file == "trace-step-2600001.json.gz"
    assert month.kind == "regular"
    assert plan.next_due(2_600_004) == 2_600_010


def test_a_window_that_is_asked_for_on_the_way_opens_once() -> None:
    plan = schedule(wait=4, warmup=1, active=2)
    plan.extra = PlannedWindow(first=20, warmup=1, active=3, kind="stall")
    assert roles(plan) == {"opens": [4, 20], "closes": [7, 24], "memory": [8]}
    assert plan.next_due(plan.host_steps[-1] + 1) == 20


def test_the_host_is_measured_after_memory_and_gives_way_to_windows() -> None:
    plan = schedule(wait=4, warmup=1, active=2)
    assert plan.host_steps == (10, 11, 12, 13, 14)
    assert [step for step in range(40) if plan.stops_in_forward(step)] == [11, 13]
    assert plan.is_free(11, 13)


def test_steps_are_free_where_nothing_is_planned() -> None:
    plan = schedule(wait=4, warmup=1, active=2, every=20)
    free = [first for first in range(60) if plan.is_free(first, first + 2)]
    assert free == [*range(10, 16), *range(25, 36), *range(45, 56)]


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("every", [0, 9, 30])
@pytest.mark.parametrize(
    ("wait", "warmup", "active"), [(10, 2, 3), (1, 0, 1), (4, 1, 2), (None, 2, 3)]
)
def test_the_next_due_step_is_the_first_that_something_is_done_for(
    wait: int | None, warmup: int, active: int, every: int, repeat: int, memory: bool
) -> None:
    settings = {"wait": wait, "warmup": warmup, "active": active}
    plan = schedule(**settings, every=every, repeat=repeat, memory=memory)
    planned = [*roles(plan, 200).values(), plan.host_steps]
    due = sorted({step for steps in planned for step in steps})
    for step in range(100):
        assert plan.next_due(step) == next((n for n in due if n >= step), sys.maxsize)


# Windows of `--every`: the newest stays, the others are thinned out evenly.


@pytest.mark.parametrize("most", [2, 3, 16])
def test_windows_are_bounded_spread_and_never_come_back(most: int) -> None:
    before: set[int] = set()
    for newest in range(1, 300):
        kept = to_keep(newest, most)
        assert newest in kept
        assert len(kept) <= most
        assert kept <= before | {newest}
        apart = [b - a for a, b in zip([0, *sorted(kept)], sorted(kept), strict=False)]
        assert len(set(apart[:-1])) <= 1  # all but the newest are equally far apart
        before = kept


def record(folder: Path, windows: int, size: int = 1) -> KeptWindows:
    schedule = Schedule.plan(Settings(folder="", every=100))
    kept = KeptWindows(folder, 100)
    for number in range(1, windows + 1):
        window = schedule.opens(100 * number)
        assert window is not None
        (folder / window.file).write_bytes(bytes(size))
        (folder / window.comms_file).write_bytes(b"")
        kept.saved(window)
    return kept


def test_files_of_dropped_windows_are_removed(tmp_path: Path) -> None:
    kept = record(tmp_path, 20).content()
    assert kept["kept"] == [100 * number + 2 for number in range(2, 21, 2)]
    assert (kept["every"], kept["recorded"], kept["dropped"]) == (100, 20, 10)
    assert {file.name for file in tmp_path.iterdir()} == {
        name.format(step)
        for step in kept["kept"]
        for name in ("trace-step-{}.json.gz", "comms-step-{}.jsonl")
    }


def test_large_traces_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_windows, "MOST_BYTES", 3500)
    assert record(tmp_path, 20, size=1000).content()["kept"] == [802, 1602, 2002]


EVERY = """
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(130):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_run_records_regular_windows_and_says_which_it_kept(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    path.write_text(EVERY)
    options = ["--out", str(out), "--no-explain", "--quiet", "--wait", "2", "--every", "6"]
    window = ["--warmup", "1", "--active", "1"]
    ours = [sys.executable, "-m", "stepscope", "run", *options, *window]
    subprocess.run([*ours, "--", sys.executable, str(path)], check=True, timeout=120)
    rank = out / "rank-00000"
    windows = json.loads((rank / "rank.json").read_text())["windows"]
    # Windows 2 to 21 were recorded, at steps 12, 18, ... 126; each begins with a warm-up step.
    assert windows["recorded"] == 20
    assert windows["kept"] == [6 * number + 1 for number in [*range(2, 21, 2), 21]]
    assert windows["dropped"] == 9
    kept = {f"trace-step-{step}.json.gz" for step in windows["kept"]}
    assert {file.name for file in rank.glob("trace*")} == {"trace.json.gz", *kept}
    chosen = stepscope.explain_job(out, cache=False).ranks[0]
    assert Path(chosen.path).name in {"trace.json.gz", *kept}


# A window that is asked for while the job trains: every rank records the same steps.

FLUSH_S = 0.5


class Rank:
    """A rank whose steps and clock the test moves."""

    def __init__(self, run: Path, number: int = 100, **options: Any) -> None:
        self.settings = Settings(folder=str(run), wait=4, warmup=1, active=2, **options)
        self.number = number
        self.schedule = Schedule.plan(self.settings)
        self.woken: list[int] = []
        self.clock = 0.0
        self.requests = WindowRequests(self, self.schedule, run, FLUSH_S, now=lambda: self.clock)

    def wake(self, step: int) -> None:
        self.woken.append(step)

    def flush(self, steps: int = 10) -> None:
        """Half a second passes, with this many steps."""
        self.clock += FLUSH_S
        self.number += steps
        self.requests.look()

    @property
    def window(self) -> PlannedWindow:
        assert self.schedule.asked is not None
        return self.schedule.asked


def ask(run: Path, number: int = 1) -> Path:
    """The plan's place."""
    request = f"{number:016x}"
    (run / "new").write_text(json.dumps({"schema": 1, "id": request}))
    (run / "new").replace(run / REQUEST_FILE)
    return run / plan_name(request)


def test_all_ranks_take_the_steps_of_the_first_that_saw_the_request(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path), Rank(tmp_path, 102)]
    plan = ask(tmp_path)
    for rank in (*ranks, *ranks):
        rank.flush()
    assert ranks[0].window == ranks[1].window
    window = ranks[0].window
    # 20 steps a second, perhaps 30, for two seconds, and three more.
    assert window.first == 110 + 60 + 3
    assert (window.warmup, window.active) == (1, 2)
    assert window.file == "trace-step-174.json.gz"
    assert window.comms_file == "comms-step-174.jsonl"
    assert not window.meets
    assert [rank.woken for rank in ranks] == [[window.first]] * 2
    assert json.loads(plan.read_text())["first"] == window.first


def test_a_request_from_before_the_rank_began_is_not_for_it(tmp_path: Path) -> None:
    plan = ask(tmp_path)
    rank = Rank(tmp_path)
    rank.flush()
    assert rank.schedule.asked is None
    assert not plan.exists()


def test_slow_steps_get_a_window_soon(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    ask(tmp_path)
    rank.flush(steps=0)
    assert rank.window.first == 103


def test_the_window_keeps_clear_of_regular_ones(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 90, every=100)
    ask(tmp_path)
    rank.flush(steps=1)  # 91 + 9 would be the first step of a regular window
    regular = rank.schedule.opens(100)
    assert regular is not None
    assert rank.window.first > regular.last + 1


def test_without_room_it_is_refused(tmp_path: Path) -> None:
    rank = Rank(tmp_path, every=5)
    plan = ask(tmp_path)
    rank.flush()
    assert "no room" in json.loads(plan.read_text())["refused"]
    assert rank.schedule.asked is None


def test_a_rank_that_is_past_the_steps_records_nothing(tmp_path: Path) -> None:
    first, late = Rank(tmp_path), Rank(tmp_path)
    ask(tmp_path)
    first.flush()
    late.flush(steps=1000)
    assert late.woken == []
    assert late.schedule.asked is None


def test_the_next_request_waits_until_the_window_is_closed(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    ask(tmp_path)
    rank.flush(steps=0)
    window = rank.window
    ask(tmp_path, 2)
    rank.flush(steps=window.last + 1 - rank.number)
    assert rank.window == window
    rank.flush(steps=1)
    assert rank.window.first > window.last


def test_a_run_has_a_limited_number_of_them(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for number in range(1, MOST_WINDOWS + 1):
        ask(tmp_path, number)
        rank.flush()
        rank.flush(steps=200)
    assert len(rank.woken) == MOST_WINDOWS
    plan = ask(tmp_path, MOST_WINDOWS + 1)
    rank.flush()
    assert "already" in json.loads(plan.read_text())["refused"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 7}', '{"id": "../../x"}', "\x00" * 9999])
def test_a_damaged_request_is_ignored(tmp_path: Path, text: str) -> None:
    rank = Rank(tmp_path)
    (tmp_path / REQUEST_FILE).write_text(text)
    rank.flush()
    rank.flush()
    assert rank.schedule.asked is None
    assert [path.name for path in tmp_path.iterdir()] == [REQUEST_FILE]


def test_a_plan_that_is_not_whole_is_read_again(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    plan = ask(tmp_path)
    plan.write_text('{"schema"')
    rank.flush()
    assert rank.schedule.asked is None
    plan.write_text('{"schema": 1, "first": 300, "warmup": 1, "active": 2}')
    rank.flush()
    assert rank.window.first == 300


TRAIN = """
import pathlib, stepscope
from torch.nn.parallel import DistributedDataParallel

def train(after, most):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(most):
        loss = model(torch.ones(4, 8) * (step % 7)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not after(step):
            break
    return losses

run = pathlib.Path({run!r})
with stepscope.watch(run, wait=3, warmup=1, active=2) as watched:
    def after(step):
        watched.step()
        if step == 12 and rank == 1:
            (run / "new").write_text('{{"id": "00000000000000aa"}}')
            (run / "new").rename(run / "window-request.json")
        time.sleep(0.01)
        traces = len(list(run.glob("rank-*/trace-step-*.json.gz")))
        enough = torch.tensor([traces == 2])
        dist.broadcast(enough, 0)
        return not enough.item()
    answer["captured"] = train(after, 3000)
answer["bare"] = train(lambda step: True, len(answer["captured"]))
"""


def recorded_steps(trace: Path) -> list[int]:
    with gzip.open(trace) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return sorted({int(name[13:]) for name in names if re.fullmatch(r"ProfilerStep#\d+", name)})


def test_two_real_ranks_record_the_steps_that_one_of_them_was_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    answers = run_ranks(tmp_path, TRAIN.format(run=str(run)))
    assert all(answers)
    for answer in answers:
        assert answer is not None
        assert answer["captured"] == answer["bare"]
    traces = sorted(run.glob("rank-*/trace-step-*.json.gz"))
    assert len(traces) == 2
    first, second = map(recorded_steps, traces)
    assert first == second
    assert len(first) == 2
    assert traces[0].name == f"trace-step-{first[0]}.json.gz"


# A window around a stall that comes again: when it is asked for, and when not.

MS = 1_000_000
Wall = Callable[[int], int]


def as_lines(rows: list[Any], *, last: bool) -> list[str]:
    return [json.dumps(row) for row in rows]


class Job:
    """A training whose steps reach the watch a few at a time, as the writer hands them over."""

    def __init__(self, folder: Path, *, every: int = 0) -> None:
        self.settings = Settings(folder=str(folder), wait=4, warmup=1, active=2, every=every)
        self.number = 0
        self.schedule = Schedule.plan(self.settings)
        self.watch = StallWatch(as_lines, self, self.schedule, folder)
        self.asked: list[PlannedWindow] = []
        self.woken: list[int] = []
        self._profiled: set[int] = set()

    def wake(self, step: int) -> None:
        assert self.schedule.extra is not None
        self.asked.append(self.schedule.extra)
        self.woken.append(step)
        window = self.asked[-1]
        self._profiled |= set(range(window.first, window.last + 1))

    def run(self, steps: int, wall: Wall, *, at_once: int = 7, phase: str = "data_ns") -> None:
        for first in range(0, steps, at_once):
            batch = range(first, min(first + at_once, steps))
            self.number = batch[-1] + 1
            self.watch([*self._rows(batch, wall, phase)], last=False)

    def _rows(self, batch: range, wall: Wall, phase: str) -> Iterator[dict[str, Any]]:
        for step in batch:
            ms = wall(step)
            row = {"step": step, "wall_ns": ms * MS, "other_ns": 10 * MS}
            row |= {phase: (ms - 10) * MS, "window": step in self._profiled}
            yield row


def every_20th(step: int) -> int:
    return 50 if step % 20 == 19 else 10


def test_the_window_opens_before_the_next_regular_stall(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(200, every_20th)
    (window,) = job.asked
    assert window.alone
    assert window.file == STALL_TRACE
    assert window.first_active < 79 < window.last  # the third was too near
    assert window.active == 3
    assert job.woken == [window.first]
    assert job.watch.content() == {"windows": 1, "stall": {"step": 79, "wall_ns": 50 * MS}}


@pytest.mark.parametrize(
    ("every", "steps", "wall"),
    [
        pytest.param(0, 60, lambda step: 80 if step == 30 else 10, id="seen only once"),
        pytest.param(0, 300, lambda step: 10 + step % 3, id="never stalls"),
        pytest.param(20, 300, lambda step: 50 if step % 20 == 1 else 10, id="in other windows"),
    ],
)
def test_no_window_opens_for(tmp_path: Path, every: int, steps: int, wall: Wall) -> None:
    job = Job(tmp_path, every=every)
    job.run(steps, wall)
    assert job.asked == []
    assert job.watch.content() == {"windows": 0, "stall": None}


def test_small_stalls_by_chance_do_not_hide_the_regular_ones(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(200, lambda step: 16 if step in (25, 46, 52) else every_20th(step))
    (window,) = job.asked
    assert (window.first_active + 1) % 20 == 19


def test_frequent_stalls_lie_in_any_window(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(100, lambda step: 60 if step % 4 == 3 else 10)
    (window,) = job.asked
    assert window.active == 5
    assert job.watch.content()["stall"]


def test_stalls_without_a_rhythm_get_longer_windows_and_a_few_tries(tmp_path: Path) -> None:
    (tmp_path / STALL_TRACE).write_bytes(b"")
    job = Job(tmp_path)
    job.run(600, lambda step: 60 if step in (21, 25, 40, 43) else 10)
    assert [window.active for window in job.asked] == [5, 20, 20, 20]
    assert job.watch.gave_up
    assert not (tmp_path / STALL_TRACE).exists()  # it would show none


def test_a_rhythm_that_ends_is_given_up(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(900, lambda step: every_20th(step) if step < 60 else 10)
    assert [window.active for window in job.asked] == [3] * (TRIES - 1) + [20]
    assert job.watch.gave_up


def test_a_damaged_line_does_not_stop_the_writer(tmp_path: Path) -> None:
    job = Job(tmp_path)
    broken = StallWatch(lambda *_, **__: ["{"], job, job.schedule, tmp_path)
    assert broken([1], last=False) == ["{"]


SCRIPT = """
import time, torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(220):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.2 if step % 20 == 19 else 0.01)
"""


def test_the_trace_of_a_stalling_script_shows_a_stall(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    path.write_text(SCRIPT)
    options = ["--out", str(out), "--no-explain", "--quiet", "--on-stall"]
    command = [sys.executable, "-m", "stepscope", "run", *options, "--", sys.executable, str(path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    rank = json.loads((out / "rank-00000/rank.json").read_text())
    assert rank["stall_window"]["stall"]["step"] % 20 == 0  # the sleep follows the step's end
    with gzip.open(out / "rank-00000" / STALL_TRACE) as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    assert max(event["dur"] for event in steps) > 200_000  # microseconds


# A step of very many operators is recorded once: recording must not take longer than training.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its first entry is now; the second is what saving a window takes."""
    times = [0.0, 0.0]

    class FakeWindow:
        over = False
        file = type("File", (), {"is_busy": False})

        def __init__(self, _: object, planned: PlannedWindow, *__: object, **___: object) -> None:
            self.planned = planned

        def start(self) -> None: ...

        def let_go(self) -> None: ...

        def finish(self) -> bool:
            times[0] += times[1]
            return True

    monkeypatch.setattr(profiler_windows, "Window", FakeWindow)
    monkeypatch.setattr(profiler_windows, "perf_counter", lambda: times[0])
    return times


def recorded(windows: ProfilerWindows, planned: tuple[PlannedWindow, ...]) -> list[int]:
    """The first steps of windows that were opened and saved."""
    opened = []
    for one in planned:
        if windows.open(one, Path(), one_thread_trains=True):
            opened.append(one.first_active)
            windows.finish(windows.running)  # type: ignore[arg-type]
    return opened


def test_after_a_step_that_took_long_to_save_no_other_is_recorded(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(never_raise, "note", lambda *words: said.append(words))
    monkeypatch.setattr(profiler_windows, "note", lambda *words: said.append(words))
    plan = Schedule.plan(Settings(folder="x")).windows
    assert len(recorded(ProfilerWindows(Settings(folder="x")), plan)) == 3
    assert said == []
    clock[1] = 5.0
    assert recorded(ProfilerWindows(Settings(folder="x")), plan) == [2]
    ((_, words),) = said
    assert "saving one recorded step took 5.00 s" in words


def test_windows_that_were_asked_for_are_recorded_however_long_they_take(
    clock: list[float],
) -> None:
    clock[1] = 5.0
    plan = Schedule.plan(Settings(folder="x", wait=10)).windows
    assert len(recorded(ProfilerWindows(Settings(folder="x")), plan)) == len(plan) == 1
    windows = ProfilerWindows(Settings(folder="x"))
    early = Schedule.plan(Settings(folder="x")).windows[0]
    asked = PlannedWindow(first=50, warmup=1, active=3, kind="asked")
    assert recorded(windows, (early, asked)) == [2, 51]
