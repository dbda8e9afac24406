"""The profiler stops when gloo has put away what the profiler saw, and not before."""

from __future__ import annotations

import gzip
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from two_ranks import run_ranks

from stepscope.measure.cluster import flight_recorder, parallel_layout, window_collectives
from stepscope.measure.profiler import windows as windows
from stepscope.measure.profiler.schedule import PlannedWindow
from stepscope.measure.profiler.windows import Window
from stepscope.measure.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GLOO = {"profiling_name": "gloo:all_reduce", "retired": True, "time_created_ns": 5}


def recorded(monkeypatch: pytest.MonkeyPatch, *dumps: list[dict[str, Any]] | None) -> None:
    """The flight recorder says this, one dump after the other; None: it is off."""
    left = list(dumps)

    def recorders() -> list[tuple[str, Callable[[], bytes]]]:
        entries = left.pop(0) if len(left) > 1 else left[0]
        if entries is None:
            return []
        return [("_dump_fr_trace_json", json.dumps({"entries": entries}).encode)]

    monkeypatch.setattr(flight_recorder, "recorders", recorders)


def a_group(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(parallel_layout, "groups", lambda: [{"backend": backend}])


def test_it_waits_until_every_work_of_gloo_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(monkeypatch, "cpu:gloo,cuda:nccl")
    running = {**GLOO, "retired": False}
    recorded(monkeypatch, [GLOO, running], [running, GLOO], [GLOO, GLOO])
    assert window_collectives.collectives_ended()


def test_a_work_that_stays_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(monkeypatch, "gloo")
    recorded(monkeypatch, [{**GLOO, "retired": False}])
    assert not window_collectives.collectives_ended(0.01)


def test_works_from_later_on_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(monkeypatch, "gloo")
    recorded(monkeypatch, [GLOO, {**GLOO, "retired": False}])
    assert not window_collectives.collectives_ended(0.0, until_ns=5)
    assert window_collectives.collectives_ended(0.0, until_ns=4)


def test_collectives_of_nccl_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(monkeypatch, "nccl")
    recorded(monkeypatch, [{**GLOO, "retired": False}])
    assert window_collectives.collectives_ended(0.0)
    a_group(monkeypatch, "gloo")
    recorded(monkeypatch, [{**GLOO, "retired": False, "profiling_name": "nccl:all_reduce"}])
    assert window_collectives.collectives_ended(0.0)


def test_works_of_a_destroyed_group_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_layout, "groups", list)
    recorded(monkeypatch, [{**GLOO, "retired": False}])
    assert not window_collectives.collectives_ended(0.0)


def test_without_a_recorder_it_waits_for_threads_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(monkeypatch, "gloo")
    recorded(monkeypatch, None)
    answers = [False, False, True]
    monkeypatch.setattr(window_collectives, "_at_rest", lambda: answers.pop(0))
    assert window_collectives.collectives_ended()
    assert answers == []


def test_threads_that_never_rest_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(monkeypatch, "gloo")
    recorded(monkeypatch, None)
    monkeypatch.setattr(window_collectives, "_at_rest", lambda: False)
    monkeypatch.setattr(window_collectives, "_SETTLE_S", 0.01)
    assert window_collectives.collectives_ended()


def test_gloo_itself_says_what_is_under_way(tmp_path: Path) -> None:
    """Rank 1 comes late to an all-reduce that rank 0 has begun."""
    leader, _ = run_ranks(
        tmp_path,
        """
        from stepscope.measure.cluster.window_collectives import collectives_ended
        store = dist.distributed_c10d._get_default_store()
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            answer["before"] = collectives_ended()
            work = dist.all_reduce(torch.ones(3), async_op=True)
            answer["during"] = collectives_ended(0.05)
            store.set("come", "1")
            work.wait()
            answer["after"] = collectives_ended(20.0)
        else:
            store.get("come")
            dist.all_reduce(torch.ones(3))
        """,
    )
    assert leader is not None
    assert [leader[when] for when in ("before", "during", "after")] == [True, False, True]


def test_a_profiler_is_not_stopped_under_a_collective(tmp_path: Path) -> None:
    """It is under way from the window's only step into the next but one."""
    ranks = run_ranks(
        tmp_path,
        f"""
        from stepscope.measure.profiler import windows as window
        from stepscope.measure.session.session import Session
        from stepscope.measure.settings import Settings
        window.PATIENCE_S = 0.05
        store = dist.distributed_c10d._get_default_store()
        options = dict(wait=2, warmup=0, active=1, memory=False, sample_hz=0.0)
        session = Session(Settings(folder={str(tmp_path / "run")!r}, **options))
        answer["profiled"] = []
        for step in range(6):
            torch.ones(3).sinh()
            if step == 2 and rank == 0:
                work = dist.all_reduce(torch.ones(3), async_op=True)
            if step == 4:
                if rank == 0:
                    store.set("come", "1")
                    work.wait()
                    while not window.collectives_ended(): pass
                else:
                    store.get("come")
                    dist.all_reduce(torch.ones(3))
            session.step_ends()
            answer["profiled"].append(torch.autograd._profiler_enabled())
        session.close()
        """,
    )
    behind = [rank["profiled"] for rank in ranks if rank is not None]
    assert behind[0] == [False, True, True, True, False, False]
    assert behind[1] == [False, True, False, False, False, False]
    for rank in range(2):
        names = names_in(tmp_path / f"run/rank-{rank:05d}/trace.json.gz")
        assert names.count("aten::sinh") == 1
        assert names.count("ProfilerStep#2") == 1
        assert names.count("gloo:all_reduce") == 1 - rank


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in events_in(trace)]


def events_in(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] != "Trace"]


@pytest.fixture
def window(tmp_path: Path) -> Window:
    settings = Settings(folder=str(tmp_path), warmup=0, active=1)
    return Window(settings, PlannedWindow(first=7, warmup=0, active=1), tmp_path, after=[])


def test_a_step_ends_where_it_ends_however_long_the_wait(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waiting(*_: Any, **__: Any) -> bool:
        torch.ones(3).erf()
        return True

    monkeypatch.setattr(windows, "collectives_ended", waiting)
    window.start()
    torch.ones(3).sinh()
    assert window.finish()
    window.file.close()
    events = {event["name"]: event for event in events_in(tmp_path / "trace.json.gz")}
    step = events["ProfilerStep#7"]
    assert step["ts"] <= events["aten::sinh"]["ts"] < step["ts"] + step["dur"]
    assert step["ts"] + step["dur"] <= events["aten::erf"]["ts"]


def test_a_window_that_has_to_wait_records_nothing_more(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int | None]] = []

    def ended(patience_s: float, *, until_ns: int | None) -> bool:
        asked.append((patience_s, until_ns))
        return len(asked) == 3

    monkeypatch.setattr(windows, "collectives_ended", ended)
    window.start()
    torch.ones(3).sinh()
    before_ns = time.time_ns()
    assert not window.finish()
    assert window.over
    torch.ones(3).erf()
    assert not window.finish()
    assert window.finish()
    assert not torch.autograd._profiler_enabled()
    window.file.close()
    (first, second, third) = asked
    assert first == (window_collectives.PATIENCE_S, None)
    assert second == third
    assert second[0] == 0.0
    assert second[1] is not None
    assert second[1] >= before_ns
    names = names_in(tmp_path / "trace.json.gz")
    assert "aten::sinh" in names
    assert "aten::erf" not in names


def test_a_window_that_is_given_up_waits_as_well(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[bool] = []
    monkeypatch.setattr(
        windows, "collectives_ended", lambda **_: running.append(torch.autograd._profiler_enabled())
    )
    window.start()
    window.abandon()
    assert running == [True]
    assert not torch.autograd._profiler_enabled()
    assert not list(tmp_path.iterdir())
