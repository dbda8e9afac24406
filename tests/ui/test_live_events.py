"""A run folder followed for browsers: what an update says, and who gets it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_runs import MS, alive, append_steps, as_text, gone, make_rows, write_rank, write_run
from live_runs import write_steps as write_all_steps
from live_server import serving
from own_loop import run_in_own_loop
from stepscope.explain.whole_run.live import explain_live
from stepscope.records.folders import REQUEST_FILE, plan_name
from stepscope.records.run import VerdictNow
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.serve.job_follower import RunLooks
from stepscope.ui.serve.live_routes import LiveChannel, LiveChannels
from stepscope.ui.serve.live_view import LiveView, last_asked_window, live_view

BROWSERS = 10


def begin_run(folder: Path, ranks: int = 1, *, process: dict[str, Any] | None = None) -> Path:
    write_run(folder, process=process or alive())
    for rank in range(ranks):
        place = folder / f"rank-{rank:05d}"
        write_rank(place, rank=rank, process=process or alive())
        write_all_steps(place, make_rows([10.0] * 60, began_ns=time.time_ns()))
    return folder


def view_of(folder: Path, verdict: VerdictNow | None = None) -> LiveView:
    followed = RunFollower(folder).read()
    return live_view(explain_live(followed, time.time()), followed, verdict)


def test_an_update_names_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run", ranks=2)
    rows = make_rows([10.0] * 60, began_ns=time.time_ns(), backward_ns=[8 * MS] * 60)
    write_all_steps(run / "rank-00000", rows)  # forward 2 ms, against 10
    view = view_of(run)
    assert view.status == "training"
    (words,) = view.late
    assert words.startswith("rank 1 spends 8.00 ms more in forward")
    assert {row.cells[0]: row.tone for row in view.rows} == {"0": "", "1": "late"}
    assert {line.rank: (line.first, len(line.ms)) for line in view.lines} == {
        "0": (0, 60),
        "1": (0, 60),
    }


def test_an_update_shows_stalls_where_they_were(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    walls = [50.0 if step % 20 == 19 else 10.0 for step in range(200)]
    data = [round((wall - 8) * MS) for wall in walls]
    write_all_steps(run / "rank-00000", make_rows(walls, began_ns=time.time_ns(), data_ns=data))
    view = view_of(run)
    assert [stall.id for stall in view.stalls] == ["data"]
    assert [number for number, mark in enumerate(view.lines[0].marks) if mark == "data"] == list(
        range(19, 200, 20)
    )
    assert view.mark_words == {"data": "data stalls"}


def test_samples_are_shown_once_a_window_has_shown_the_batch(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run", ranks=2)
    verdict = VerdictNow(verdict="Healthy", batch=16)
    throughput = next(fact for fact in view_of(run, verdict).facts if fact.label == "throughput")
    assert throughput.value == "3,200 samples/s"


def test_a_half_written_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    looks = RunLooks(run)
    text = as_text(make_rows([10.0], number=60, began_ns=time.time_ns()))
    append_steps(run / "rank-00000", text[:20])
    assert steps_of(looks.look(0.0, time.time())) == "60"
    append_steps(run / "rank-00000", text[20:])
    assert steps_of(looks.look(0.1, time.time())) == "61"


def steps_of(view: LiveView | None) -> str:
    assert view is not None
    return view.rows[0].cells[1]


def test_without_news_time_is_all_that_is_sent(tmp_path: Path) -> None:
    looks = RunLooks(begin_run(tmp_path / "run"))
    assert looks.look(0.0, time.time()) is not None
    assert looks.look(0.5, time.time()) is None
    assert looks.look(1.1, time.time()) is not None


def test_a_removed_folder_is_said_and_ends_the_following(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    looks = RunLooks(run)
    looks.look(0.0, time.time())
    shutil.rmtree(run)
    view = looks.look(0.1, time.time())
    assert view is not None
    assert (view.status, view.has_ended, view.reload) == ("gone", True, False)
    assert "cannot be read any more" in view.detail


def test_a_killed_job_is_said(tmp_path: Path) -> None:
    view = RunLooks(begin_run(tmp_path / "run", process=gone())).look(0.0, time.time())
    assert view is not None
    assert (view.status, view.tone, view.reload) == ("killed", "bad", True)


def test_the_page_is_loaded_again_only_when_run_has_written_its_report(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    looks = RunLooks(run)
    write_run(run, code=0, ended_s=time.time(), process=alive())
    view = looks.look(0.0, time.time())
    assert view is not None
    assert (view.status, view.has_ended, view.reload) == ("finished", True, False)
    write_run(run, code=0, ended_s=time.time(), process=gone())
    view = looks.look(0.1, time.time())
    assert view is not None
    assert view.reload


@pytest.mark.parametrize(
    ("plan", "step", "state"),
    [
        (None, 60, "asked"),
        ({"first": 90, "warmup": 1, "active": 2}, 60, "planned"),
        ({"first": 60, "warmup": 1, "active": 2}, 61, "recording"),
        ({"first": 50, "warmup": 1, "active": 2}, 60, "saving"),
        ({"refused": "no room"}, 60, "refused"),
    ],
)
def test_what_became_of_a_request(
    tmp_path: Path, plan: dict[str, Any] | None, step: int, state: str
) -> None:
    run = begin_run(tmp_path / "run")
    write_all_steps(run / "rank-00000", make_rows([10.0] * step, began_ns=time.time_ns()))
    request = f"{7:016x}"
    (run / REQUEST_FILE).write_text(json.dumps({"id": request, "asked_unix": time.time()}))
    if plan is not None:
        (run / plan_name(request)).write_text(json.dumps(plan))
    window = last_asked_window(RunFollower(run).read(), time.time())
    assert window is not None
    assert window.state == state
    (run / "rank-00000/trace-step-51.json.gz").write_bytes(b"")
    window = last_asked_window(RunFollower(run).read(), time.time())
    assert window is not None
    assert window.state == ("recorded" if plan and plan.get("first") == 50 else state)


# Who gets it.


def test_a_slow_browser_gets_the_latest_and_nothing_queues_up() -> None:
    async def follow() -> list[bytes | None]:
        channel = LiveChannel()
        channel.publish(b"0", False)
        updates = channel.updates()
        seen = [await anext(updates)]
        for number in range(1, 1000):
            channel.publish(b"%d" % number, False)
        seen.append(await anext(updates))
        channel.publish(b"end", True)
        seen += [update async for update in updates]
        return seen

    assert run_in_own_loop(follow()) == [b"0", b"999", b"end"]


def test_a_quiet_run_gives_signs_of_life() -> None:
    async def follow() -> bytes | None:
        return await anext(LiveChannel().updates(still_there_s=0.01))

    assert run_in_own_loop(follow()) is None


def test_one_reader_serves_all_browsers_and_ends_with_the_last(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")

    async def follow() -> list[int]:
        channels = LiveChannels(linger_s=0.0)
        counts = []
        async with contextlib.AsyncExitStack() as browsers:
            for _ in range(BROWSERS):
                await browsers.enter_async_context(channels.follow("id", run))
            counts.append(len(channels))
        await asyncio.sleep(0.01)
        counts.append(len(channels))
        return counts

    assert run_in_own_loop(follow()) == [1, 0]


@contextlib.contextmanager
def appending(run: Path, per_second: int, seconds: float) -> Iterator[None]:
    """Ranks that write this many lines a second, one write each."""
    ended = threading.Event()

    def write() -> None:
        for number in range(60, 60 + round(per_second * seconds)):
            row = make_rows([10.0], number=number, began_ns=time.time_ns() - 10 * MS)
            append_steps(run / "rank-00000", as_text(row))
            if ended.wait(1 / per_second):
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


def updates_until(url: str, enough: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    with httpx.stream("GET", url, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if enough(seen[-1]):
                    break
    return seen


@pytest.mark.slow
def test_ten_browsers_follow_a_hundred_updates_a_second_to_the_last_step(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    seen: dict[int, list[dict[str, Any]]] = {}

    def follow(number: int) -> None:
        seen[number] = updates_until(
            f"{url}/runs/a/events", lambda view: view["rows"][0]["cells"][1] == "160"
        )

    with serving({"a": run}) as url, appending(run, per_second=100, seconds=1.0):
        browsers = [threading.Thread(target=follow, args=(n,)) for n in range(BROWSERS)]
        for browser in browsers:
            browser.start()
        for browser in browsers:
            browser.join(60)
    assert len(seen) == BROWSERS
    for updates in seen.values():
        counts = [int(view["rows"][0]["cells"][1]) for view in updates]
        assert counts == sorted(counts)
        assert counts[-1] == 160


def test_a_window_can_be_asked_for_once_at_a_time(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    ended = begin_run(tmp_path / "ended", process=gone())
    with serving({"a": run, "b": ended}) as url:
        first = httpx.post(f"{url}/runs/a/capture", timeout=60)
        assert first.status_code == 202
        assert json.loads((run / REQUEST_FILE).read_text())["id"] == first.json()["id"]
        second = httpx.post(f"{url}/runs/a/capture", timeout=60)
        assert second.status_code == 409
        assert "on its way" in second.json()["error"]
        over = httpx.post(f"{url}/runs/b/capture", timeout=60)
        assert over.status_code == 409
        assert "has ended" in over.json()["error"]
        assert not (ended / REQUEST_FILE).exists()
        assert httpx.post(f"{url}/runs/c/capture", timeout=60).status_code == 404
        assert httpx.get(f"{url}/runs/a/capture", timeout=60).status_code == 405


def test_an_unknown_run_and_one_that_goes_away_are_said(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    with serving({"a": run}) as url:
        (unknown,) = updates_until(f"{url}/runs/b/events", lambda _: True)
        assert unknown["status"] == "gone"

        def remove(view: dict[str, Any]) -> bool:
            if run.exists():
                shutil.rmtree(run)
            return bool(view["has_ended"])

        assert updates_until(f"{url}/runs/a/events", remove)[-1]["status"] == "gone"


def test_metrics_list_the_runs_that_go_on(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    ended = begin_run(tmp_path / "ended", process=gone())
    with serving({"a": run, "b": ended}) as url:
        answer = httpx.get(f"{url}/metrics", timeout=60)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'stepscope_steps_total{run="a",name="run",rank="0"} 60' in answer.text
    assert 'run="b"' not in answer.text
