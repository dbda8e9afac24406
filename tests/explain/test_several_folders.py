"""Parts of one job in several folders: the same answer as from one, whatever is given twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepscope
from split_runs import BEGAN_S, ENDED_S, change_host, change_rank, split_run, two_host_run
from split_runs import without_paths as strip
from stepscope.errors import UsageError
from stepscope.ui.topics.explanation_json import explanation_json

SCRIPT = Path(__file__).parents[1] / "measure" / "scripts" / "ddp.py"


@pytest.fixture
def one(golden: Path, tmp_path: Path) -> Path:
    return two_host_run(golden, tmp_path / "one")


@pytest.fixture
def parts(one: Path, tmp_path: Path) -> list[Path]:
    return split_run(one, tmp_path / "parts")


def answer(*paths: Path) -> Any:
    explained = explanation_json(stepscope.explain(list(paths), cache=False))
    return strip(json.loads(json.dumps(explained, default=list)))


def notes(*paths: Path) -> dict[str, str]:
    return {note.id: note.detail for note in stepscope.explain(list(paths), cache=False).quality}


def test_parts_give_the_answer_of_one_folder_in_any_order(one: Path, parts: list[Path]) -> None:
    whole = answer(one)
    assert answer(*parts) == whole
    assert answer(*reversed(parts)) == whole
    assert whole["quality"] == []


def test_the_wall_time_is_from_the_first_start_to_the_last_end(parts: list[Path]) -> None:
    found = stepscope.explain(parts, cache=False)
    assert found.run is not None
    assert found.run.account is not None
    account = found.run.account
    expected_ms = (ENDED_S[0] - BEGAN_S[1]) * 1e3  # 27 s
    assert account.wall_ms == pytest.approx(expected_ms, abs=1.0)  # clocks are aligned to a ms
    assert sum(part.ms for part in account.parts) == pytest.approx(account.wall_ms)
    for run in found.run.ranks:
        assert run.account is not None
        assert run.account.wall_ms == pytest.approx(account.wall_ms)
    alone = stepscope.explain(parts[0], cache=False).run
    assert alone is not None
    assert alone.account is not None
    assert alone.account.wall_ms == pytest.approx((ENDED_S[0] - BEGAN_S[0]) * 1e3)


def test_what_another_host_did_before_and_after_is_start_up_and_shut_down(
    parts: list[Path],
) -> None:
    def by_part(run: Any, rank: int) -> dict[str, float]:
        (found,) = [one for one in run.ranks if one.rank == rank]
        return {part.id: part.ms for part in found.account.parts}

    together = stepscope.explain(parts, cache=False).run
    alone = [stepscope.explain(part, cache=False).run for part in parts]
    first, second = (by_part(together, rank) for rank in (0, 1))
    # node0 began 2 s after node1; node1 ended 1.5 s before node0.
    assert first["start_up"] - by_part(alone[0], 0)["start_up"] == pytest.approx(2e3, abs=1.0)
    assert first["shut_down"] == pytest.approx(by_part(alone[0], 0)["shut_down"])
    assert second["start_up"] == pytest.approx(by_part(alone[1], 1)["start_up"])
    assert second["shut_down"] - by_part(alone[1], 1)["shut_down"] == pytest.approx(1.5e3, abs=1.0)


def test_a_change_is_predicted_from_all_parts(one: Path, parts: list[Path]) -> None:
    whole = stepscope.whatif(one, "accumulate=2", cache=False)
    assert stepscope.whatif(parts, "accumulate=2", cache=False) == whole


def test_a_part_given_twice_counts_once_and_is_said(one: Path, parts: list[Path]) -> None:
    whole = answer(one)
    for paths in ([*parts, parts[0]], [one, parts[1]], [one, one], [parts[0], one]):
        found = answer(*paths)
        assert found["ranks"] == whole["ranks"]
        assert found["run"] == whole["run"]
        assert [note["id"] for note in found["quality"]] == ["same-part-twice"]
    assert "rank-00001 is a copy of" in notes(one, parts[1])["same-part-twice"]


def test_of_two_copies_the_fuller_one_is_read(one: Path, parts: list[Path]) -> None:
    (parts[1] / "rank-00001" / "trace.json.gz").unlink()
    found = answer(parts[1], one)
    assert len(found["ranks"]) == 2


def test_parts_of_different_jobs_are_refused(parts: list[Path]) -> None:
    change_host(parts[1], 1, job="torchrun another")
    with pytest.raises(UsageError, match="different jobs") as caught:
        stepscope.explain(parts, cache=False)
    assert str(parts[0]) in str(caught.value)
    assert str(parts[1]) in str(caught.value)


def test_a_job_without_a_name_is_known_by_where_its_ranks_meet(parts: list[Path]) -> None:
    for place in (0, 1):
        change_host(parts[place], place, job="torchrun", meeting=f"node{place}:29500")
    assert notes(*parts) == {}
    change_host(parts[1], 1, meeting="node0:29501")
    with pytest.raises(UsageError, match="different jobs"):
        stepscope.explain(parts, cache=False)


def test_runs_one_after_the_other_are_no_parts_of_one_job(golden: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("first", "second")]
    for run in runs:
        shutil.copytree(golden / "cpu-two-ranks", run)
    about = json.loads((runs[1] / "run.json").read_text())
    about |= {"started_unix": about["ended_unix"] + 3600, "ended_unix": about["ended_unix"] + 4000}
    (runs[1] / "run.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=r"second began .* after the run in .*first had ended"):
        stepscope.explain(runs, cache=False)


def test_runs_of_two_scripts_are_no_parts_of_one_job(golden: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("dqn", "ppo")]
    for run in runs:
        shutil.copytree(golden / "cpu-two-ranks", run)
        for rank in sorted(run.glob("rank-*")):
            change_rank(rank, argv=[f"{run.name}.py"])
    with pytest.raises(UsageError, match=r"dqn ran dqn\.py and .*ppo ran ppo\.py: .* different"):
        stepscope.explain(runs, cache=False)


def test_other_commands_and_versions_are_said_and_the_rest_is_explained(parts: list[Path]) -> None:
    change_rank(parts[1] / "rank-00001", argv=["other.py"], torch="2.12.0")
    change_host(parts[1], 1, stepscope="0.2.0")
    found = notes(*parts)
    assert set(found) == {"different-commands", "mixed-versions"}
    assert "torch 2.12.0 on rank 1, torch 2.13.0+cpu on rank 0" in found["mixed-versions"]
    assert "stepscope 0.1.0 on node0, stepscope 0.2.0 on node1" in found["mixed-versions"]
    assert "other.py" in found["different-commands"]


def test_a_part_that_was_copied_in_part_is_said(parts: list[Path]) -> None:
    (parts[1] / "rank-00001" / "clock.json").unlink()
    assert "clock.json of rank-00001" in notes(*parts)["not-copied"]
    shutil.rmtree(parts[1] / "rank-00001")
    found = notes(*parts)
    assert found["not-copied"].endswith("rank-00001")


def test_a_rank_without_its_trace_keeps_its_steps(parts: list[Path]) -> None:
    (parts[1] / "rank-00001" / "trace.json.gz").unlink()
    found = stepscope.explain(parts, cache=False)
    assert "trace.json.gz of rank-00001" in {n.id: n.detail for n in found.quality}["not-copied"]
    assert found.run is not None
    assert [run.rank for run in found.run.ranks] == [0, 1]


def test_attempts_on_two_disks_follow_each_other(one: Path, tmp_path: Path) -> None:
    """node1's disk has the first attempt of rank 0, node0's the second; both claim rank-00000."""
    parts = split_run(one, tmp_path / "parts")
    (parts[1] / "rank-00001").rename(tmp_path / "gone")
    first = parts[1] / "rank-00000"
    shutil.copytree(parts[0] / "rank-00000", first)
    hour_ns = 3_600_000_000_000
    rows = [json.loads(line) for line in (first / "steps.jsonl").read_text().splitlines()]
    for row in rows:
        row["end_unix_ns"] -= hour_ns
    (first / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    began_ns = round(BEGAN_S[0] * 1e9)
    change_rank(first, host="node1", pid=7, start_up={"began_unix_ns": began_ns + 10**9 - hour_ns})
    change_host(parts[1], 1, started_unix=BEGAN_S[0] - 3600, ended_unix=BEGAN_S[0] - 3550)
    change_rank(parts[0] / "rank-00000", start_up={"began_unix_ns": began_ns + 10**9})
    for order in (parts, parts[::-1]):
        found = stepscope.explain(order, cache=False)
        assert found.run is not None
        assert [run.attempt for run in found.run.ranks] == [1, 2]
        assert [rank.path for rank in found.ranks] == [str(parts[0] / "rank-00000/trace.json.gz")]
        assert "attempt 2 is explained" in {n.id: n.detail for n in found.quality}["restarted"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process another host name")
@pytest.mark.slow
def test_a_real_job_on_two_hosts_is_the_same_from_one_folder_and_from_two(tmp_path: Path) -> None:
    command = [
        *("stepscope", "run", "--no-explain", "--out", str(tmp_path / "one"), "--"),
        *("torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=two-disks"),
        *("--master-addr=127.0.0.1", "--master-port=29671", "--node-rank={place}", str(SCRIPT)),
    ]
    place = "hostname two-disks-{place} && exec "
    binaries = Path(sys.executable).parent
    jobs = [
        subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", (place + " ".join(command)).format(place=number)],
            env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
            stdout=subprocess.DEVNULL,
        )
        for number in (0, 1)
    ]
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    parts = split_run(tmp_path / "one", tmp_path / "parts")
    assert [part.name for part in parts] == ["two-disks-0", "two-disks-1"]
    whole = answer(tmp_path / "one")
    assert [rank["rank"] for rank in whole["ranks"]] == [0, 1]
    assert answer(*parts) == whole
