"""What `hang` answers to records that were written by hand."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from made_hangs import LIBRARY, NOTICED, elsewhere, frame, in_collective, record, write_run

from stepscope.errors import NotCapturedError
from stepscope.explain.hang import explain_hang, hang_now
from stepscope.records.hang import HangAnswer
from stepscope.trace.run_folder.hang_files import read_hang
from stepscope.ui.cli.hang import hang_json
from stepscope.ui.terminal.console import make_console
from stepscope.ui.terminal.hang import hang_lines
from verb_process import run_verb


def answer_of(folder: Path) -> HangAnswer:
    return explain_hang(read_hang(folder), NOTICED + 219.0)


def test_the_rank_that_is_missing_is_named_with_its_line(tmp_path: Path) -> None:
    records = [in_collective(rank, 8) for rank in range(8) if rank != 3] + [elsewhere(3, 8)]
    answer = answer_of(write_run(tmp_path / "run", records))
    assert answer.verdict == (
        "Rank 3 never entered all_reduce #441 of group 0; it sleeps at data.py:88 "
        "`time.sleep(1000)`; 7 other ranks wait for it since 4 min 10 s."
    )
    assert (answer.kind, answer.ranks, answer.waiting, answer.is_hang) == ("missing", (3,), 7, True)
    assert [group.ranks for group in answer.groups] == [(3,), (0, 1, 2, 4, 5, 6, 7)]


def test_evaluation_is_slow_and_no_hang(tmp_path: Path) -> None:
    slow = elsewhere(1, 2, suspects=False)
    slow["phase"] = "evaluation"
    answer = answer_of(write_run(tmp_path / "run", [in_collective(0, 2), slow]))
    assert (answer.kind, answer.is_hang) == ("slow", False)
    assert "has not yet entered" in answer.verdict


def test_a_rank_whose_files_move_is_slow(tmp_path: Path) -> None:
    moved = {"seconds": 0.5, "input_bytes": 8 << 20}
    slow = elsewhere(1, 2, process={"moved": moved}, thread={"call": "read"})
    answer = answer_of(write_run(tmp_path / "run", [in_collective(0, 2), slow]))
    assert (answer.kind, answer.is_hang) == ("slow", False)
    assert "still reads" in answer.verdict


def test_different_collectives_at_one_place_are_named_with_both_lines(tmp_path: Path) -> None:
    records = [*(in_collective(rank, 3) for rank in (0, 1)), in_collective(2, 3, kind="broadcast")]
    answer = answer_of(write_run(tmp_path / "run", records))
    assert (answer.kind, answer.ranks) == ("mismatch", (2,))
    assert "rank 2 calls broadcast #441" in answer.verdict
    assert "ranks 0-1 call all_reduce #441" in answer.verdict


def test_two_groups_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    records = [in_collective(0, 2, sequence=1), in_collective(1, 2, sequence=1, group="1")]
    answer = answer_of(write_run(tmp_path / "run", records))
    assert (answer.kind, answer.ranks) == ("deadlock", (0, 1))


def test_a_peer_that_acknowledges_nothing_is_unreachable(tmp_path: Path) -> None:
    one, two = in_collective(0, 2), in_collective(1, 2)
    one["connections"] = [{"local": "10.0.0.1:5", "peer": "10.0.0.2:6", "retries": 8}]
    two["connections"] = [{"local": "10.0.0.2:6", "peer": "10.0.0.1:5", "retries": 0}]
    answer = answer_of(write_run(tmp_path / "run", [one, two]))
    assert (answer.kind, answer.ranks) == ("unreachable", (0, 1))
    assert "rank 0 has sent to rank 1 (10.0.0.2:6) 8 times in vain" in answer.verdict


def test_what_only_the_host_saw_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 2), elsewhere(1, 2)])
    (run / "rank-00001/hang.json").unlink()
    seen = {"pid": 7, "rank": 1, "folder": "rank-00001", "state": "T"}
    (run / "hosts").mkdir()
    content = {"host": "a", "noticed_unix": NOTICED, "ranks": [seen]}
    (run / "hosts/a.hang.json").write_text(json.dumps(content))
    answer = answer_of(run)
    assert (answer.kind, answer.ranks) == ("stopped", (1,))


def test_a_dead_rank_has_its_signal_and_its_last_words(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 2), elsewhere(1, 2)])
    (run / "rank-00001/hang.json").unlink()
    dead = {"pid": 7, "rank": 1, "folder": "rank-00001", "state": "Z", "ended_by": "SIGKILL"}
    last = {"out_of_memory": 1, "stderr": "/job/1.err", "last_lines": ["terminate called", "core"]}
    (run / "hosts").mkdir()
    content = {"host": "a", "noticed_unix": NOTICED, "ranks": [{**dead, **last}]}
    (run / "hosts/a.hang.json").write_text(json.dumps(content))
    answer = answer_of(run)
    assert (answer.kind, answer.ranks) == ("ended", (1,))
    words = "was killed by SIGKILL, and its host killed a process for lack of memory"
    assert words in answer.verdict
    assert answer.last_lines == ("terminate called", "core")
    assert answer.why == ("its stderr is /job/1.err",)
    lines = "\n".join(line.plain for line in hang_lines(answer, make_console(100), run))
    assert "stderr    terminate called" in lines


@pytest.mark.parametrize("file", ["/lib/python3.11/pdb.py", "/site-packages/debugpy/server/api.py"])
def test_a_rank_that_a_debugger_holds_is_not_accused(tmp_path: Path, file: str) -> None:
    held = elsewhere(1, 2, thread={"call": "read"})
    held["threads"][0]["frames"].insert(0, frame(9, file=file, own=False))
    answer = answer_of(write_run(tmp_path / "run", [in_collective(0, 2), held]))
    assert (answer.kind, answer.is_hang) == ("slow", False)
    assert "held by a debugger at data.py:88" in answer.verdict


def test_a_rank_waits_for_a_program_that_still_works(tmp_path: Path) -> None:
    waits = elsewhere(1, 2, thread={"call": "wait4"})
    waits["children"] = [{"pid": 5, "name": "cc1plus", "state": "R"}]
    answer = answer_of(write_run(tmp_path / "run", [in_collective(0, 2), waits]))
    assert "waits for process 5 (cc1plus), which still works" in answer.verdict
    assert not answer.is_hang
    waits |= {"limit_s": 30.0, "silent_s": 601.0}  # long enough
    shutil.rmtree(tmp_path / "run")
    assert answer_of(write_run(tmp_path / "run", [in_collective(0, 2), waits])).is_hang


def test_ranks_that_have_ended_their_work_are_not_accused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 2), elsewhere(1, 2)])
    (run / "hosts").mkdir()
    seen = [{"pid": 6 + n, "rank": n, "folder": f"rank-0000{n}", "state": "S"} for n in (0, 1)]
    (run / "hosts/a.hang.json").write_text(json.dumps({"noticed_unix": NOTICED, "ranks": seen}))
    for rank in (0, 1):
        (run / f"rank-0000{rank}/hang.json").unlink()
        (run / f"rank-0000{rank}/rank.json").write_text('{"status": "finished"}')
    answer = answer_of(run)
    assert (answer.verdict, answer.is_hang) == ("Every rank has ended its work.", False)


def test_a_spawned_process_that_never_joined_has_the_number_that_is_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "hosts").mkdir()
    joins = [frame(9, file=LIBRARY, own=False) | {"function": "init_process_group"}, frame(12)]
    processes = [record(0, 3, joins), record(1, 3, joins), elsewhere(2, 1) | {"rank": None}]
    for pid, facts in enumerate(processes):
        facts |= {"identity": {"host": "a", "pid": pid}, "collectives": None, "phase": "start_up"}
        (run / f"hosts/a.{pid}.hang.json").write_text(json.dumps(facts))
    answer = answer_of(run)
    assert answer.verdict.startswith("Rank 2 never reached init_process_group; it sleeps at data")
    assert (answer.ranks, answer.waiting) == ((2,), 2)


def test_a_rank_that_receives_names_the_one_that_it_waits_for(tmp_path: Path) -> None:
    receives = [frame(9, file=LIBRARY, own=False), frame(40, text="dist.recv(value, 0)")]
    receives[0] |= {"function": "recv", "numbers": {"src": 2}}
    records = [record(0, 3, receives), elsewhere(1, 3), elsewhere(2, 3)]
    answer = answer_of(write_run(tmp_path / "run", records))
    assert (answer.kind, answer.ranks, answer.waiting) == ("blocked", (2,), 1)
    assert "waits in recv from rank 2" in {group.words for group in answer.groups}


def test_records_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 2), elsewhere(1, 2)])
    (run / "rank-00001/hang.json").write_bytes(b'{"rank"')
    assert "it left a record that cannot be read" in answer_of(run).verdict
    (run / "rank-00000/hang.json").write_bytes(b'{"rank"')
    done = run_verb("hang", run)
    assert (done.returncode, "can be read" in done.stderr) == (3, True)


def test_nobody_is_accused_once_steps_go_on(tmp_path: Path) -> None:
    ended = {"went_on": {"unix": NOTICED + 12.0, "how": "a step ended"}}
    run = write_run(
        tmp_path / "run", [{**in_collective(0, 2), **ended}, {**elsewhere(1, 2), **ended}]
    )
    answer = answer_of(run)
    assert (answer.kind, answer.is_hang, answer.ranks) == ("none", False, ())
    assert answer.verdict == "Nobody hangs: steps went on after 43.0 s."


def test_live_views_show_the_answer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 2), elsewhere(1, 2)])
    assert hang_now(run, NOTICED + 219.0) is None  # nobody has asked
    (run / "hang-request.json").write_text("{}")
    answer = hang_now(run, NOTICED + 219.0)
    assert answer is not None
    assert answer.verdict.startswith("Rank 1 never entered")


def test_a_gpu_that_does_not_finish_is_named(tmp_path: Path) -> None:
    waits = elsewhere(0, 1, thread={"call": "poll"}, device={"answers": True, "busy": True})
    waits["threads"][0]["frames"][0]["text"] = "print(loss.item())"
    answer = answer_of(write_run(tmp_path / "run", [waits]))
    assert (answer.kind, answer.where and answer.where.line) == ("device", 88)


def test_a_run_without_a_record_has_no_hang(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 1)])
    (run / "rank-00000/hang.json").unlink()
    assert answer_of(run).kind == "none"


def test_a_run_that_was_not_watched_cannot_be_answered(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 1)], hang_after=0.0)
    (run / "rank-00000/hang.json").unlink()
    with pytest.raises(NotCapturedError, match="--hang-after was 0"):
        answer_of(run)
    assert run_verb("hang", run).returncode == 4


@pytest.mark.parametrize("ranks", [1_000])
def test_a_thousand_ranks_are_answered_at_once_on_one_screen(tmp_path: Path, ranks: int) -> None:
    records = [in_collective(rank, ranks) for rank in range(ranks) if rank != 700]
    run = write_run(tmp_path / "run", [*records, elsewhere(700, ranks)])
    began = time.monotonic()
    answer = answer_of(run)
    lines = hang_lines(answer, make_console(100), run)
    assert time.monotonic() - began < 5
    assert (answer.ranks, answer.waiting) == ((700,), ranks - 1)
    assert len(lines) < 24
    assert all(len(line.plain) <= 100 for line in lines)


ODD: list[Any] = [
    *(b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 100_000, b'{"rank": -1}'),
    *(b'{"threads": 3}', b'{"threads": [{"frames": [{"line": "x"}]}], "silent_s": 1e400}'),
    *(b'{"collectives": {"reached": {"0": {"entered": -5}}, "last": [{"sequence": null}]}}',),
    *(b'{"collectives": {"groups": [{"name": "0", "ranges": [[0, 16000000, 1]]}], "last": []}}',),
    *(b'{"went_on": {"unix": "soon"}}', b'{"identity": {"pid": 1e30, "host": 3}}'),
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("name", ["rank-00001/hang.json", "hosts/a.hang.json"])
def test_odd_files_are_no_tracebacks(tmp_path: Path, name: str, odd: bytes) -> None:
    run = write_run(tmp_path / "run", [in_collective(0, 2), elsewhere(1, 2)])
    (run / "hosts").mkdir()
    (run / name).write_bytes(odd)
    answer = answer_of(run)
    json.dumps(hang_json(answer))
    assert hang_lines(answer, make_console(80), run)


def test_a_hostile_line_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    bad = elsewhere(1, 2)
    bad["threads"][0]["frames"][0] |= {"text": "\x1b[2J\n# rm", "file": "/a\x1b]0;x\x07.py"}
    run = write_run(tmp_path / "run", [in_collective(0, 2), bad])
    for options in ((), ("--json",)):
        done = run_verb("hang", run, *options)
        assert done.returncode == 0
        assert "\x1b[2J" not in done.stdout
        assert "\x1b]0" not in done.stdout
