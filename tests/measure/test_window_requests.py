"""A window that is asked for while the job trains: every rank records the same steps."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from two_ranks import run_ranks

from stepscope.measure.profiler.extra_windows import MOST_WINDOWS, WindowRequests
from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.settings import Settings
from stepscope.records.folders import REQUEST_FILE, plan_name

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
