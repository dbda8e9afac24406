"""Who explains the files: the same answer from all, and no file that costs the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.explain import explain_job as run_module
from stepscope.explain.engines import FILES_PER_WORKER, Here, Pool, _start_method, map_in_order
from stepscope.explain.explain_job import JobTraces, explain_job

from .build import Events, kernel, nccl, op, step, write

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = [Path(name) for name in "abcdefgh"]


def training(*, idle: float) -> tuple[Events, ...]:
    cycle = 120 + idle
    return tuple(
        events
        for n in range(3)
        for events in (
            step(n, start=cycle * n - 10, dur=cycle),
            op("aten::mm", start=cycle * n - 8, dur=5, shapes=[[2, 2]], dtypes=["float"]),
            kernel("gemm", start=cycle * n, dur=100, launched_at=cycle * n - 5),
            kernel(
                "ncclDevKernel_AllReduce",
                start=cycle * n + 100,
                dur=20,
                stream=20,
                launched_at=cycle * n + 90,
                **nccl("allreduce", in_elements=1000, out_elements=1000, group_size=3),
            ),
        )
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A run folder of five ranks."""
    for rank in range(5):
        folder = tmp_path / "run" / f"rank-{rank:05d}"
        folder.mkdir(parents=True)
        write(folder / "trace.json", *training(idle=20 * rank), rank=rank, world_size=5)
    return tmp_path / "run"


def call(*command: object, timeout_s: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )


def torchrun(*command: object) -> subprocess.CompletedProcess[str]:
    return call("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command)


# In order, with progress, a few at a time


def slowest_first(file: Path) -> str:
    time.sleep(0.3 if file.name == "a" else 0)
    return file.name


@pytest.mark.parametrize("engine", [Here(), Pool(1), Pool(3)])
def test_outcomes_come_in_the_order_of_the_files(engine: Here | Pool) -> None:
    assert "".join(map_in_order(engine, slowest_first, NAMES)) == "abcdefgh"


def test_progress_counts_the_bytes_of_files_as_they_are_done(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for size, file in enumerate(files, 1):
        file.write_bytes(b"x" * size)
    told: list[tuple[int, int]] = []
    list(
        map_in_order(Pool(2), slowest_first, files, lambda read, total: told.append((read, total)))
    )
    assert [total for _, total in told] == [6, 6, 6]
    assert told[-1] == (6, 6)
    assert [read for read, _ in told] == sorted({read for read, _ in told})


def leave_a_mark(folder: Path, file: Path) -> None:
    (folder / file.name).touch()


def test_few_files_are_in_flight(tmp_path: Path) -> None:
    files = [Path(f"{n:02d}") for n in range(40)]
    outcomes = Pool(2).map(partial(leave_a_mark, tmp_path), files)
    next(outcomes)
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) <= FILES_PER_WORKER * 2
    assert len([*outcomes]) == 39


UNGUARDED = """
import os, threading, time
from pathlib import Path
from workers import where
from stepscope.explain.engines import Pool

print("begins", os.getpid())
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(*{pid for _, pid in Pool(2).map(where, [Path(name) for name in "abcd"])})
"""


@pytest.mark.parametrize("how", ["a script", "a notebook"])
def test_nothing_is_forked_beside_other_threads_and_no_script_runs_twice(
    tmp_path: Path, how: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    (tmp_path / "workers.py").write_text("import os\ndef where(_): return os.getpid()\n")
    program = [str(script)] if how == "a script" else ["-c", UNGUARDED]
    done = subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.count("begins") == 1
    _, own, *workers = done.stdout.split()
    assert (workers == [own]) is (how == "a script")  # which must not be imported again
    assert not done.stderr


def test_workers_are_forked_where_nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert _start_method() == "fork"
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    for file, expected in (("/bin/stepscope", "spawn"), ("/home/me/train.py", None)):
        main = ModuleType("__main__")
        main.__file__ = file
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert _start_method() == expected


# Workers that die


def deadly(file: Path) -> str:
    if file.name in ("c", "h"):
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


def test_a_killed_worker_costs_its_file_and_no_other() -> None:
    outcomes = list(map_in_order(Pool(2), deadly, NAMES))
    lost = [outcome for outcome in outcomes if isinstance(outcome, UnreadableInputError)]
    assert [o for o in outcomes if isinstance(o, str)] == list("abdefg")
    assert [str(error).partition(":")[0] for error in lost] == ["c", "h"]
    assert "not enough memory" in str(lost[0])


def deadly_once(marks: Path, file: Path) -> str:
    """As where two large files do not fit at once, and one alone does."""
    mark = marks / file.name
    if file.name == "c" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


def test_a_file_is_tried_again_alone(tmp_path: Path) -> None:
    assert "".join(map_in_order(Pool(2), partial(deadly_once, tmp_path), NAMES)) == "abcdefgh"


def test_a_job_goes_on_without_the_file_whose_worker_was_killed(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "try_explain_file", kills_rank_2)
    found = explain_job(job)
    assert [rank.rank for rank in found.ranks] == [0, 1, 3, 4]
    (left_out,) = (note for note in found.quality if note.id == "left-out")
    assert "rank-00002/trace.json: the process that read it was killed:" in left_out.detail


_explain = run_module.try_explain_file


def kills_rank_2(file: Path, **options: object) -> object:
    if "rank-00002" in str(file):
        os.kill(os.getpid(), signal.SIGKILL)
    return _explain(file, **options)  # type: ignore[arg-type]


# Defects


def trips_over_rank_1(analysis, rank):  # type: ignore[no-untyped-def]
    if rank.rank == 1:
        raise KeyError("boom")
    return rank.rank


def test_a_defect_of_ours_costs_one_file_of_many(job: Path) -> None:
    found, results = JobTraces([job]).explain(trips_over_rank_1)
    assert results == [0, 2, 3, 4]
    assert "rank-00001/trace.json: a defect in stepscope: KeyError: 'boom'" in str(found.quality)


def test_a_defect_in_all_files_is_an_error(job: Path) -> None:
    with pytest.raises(StepscopeError, match="a defect in stepscope: TypeError") as caught:
        JobTraces([job]).explain(1)  # type: ignore[arg-type]
    assert caught.value.exit_code == 1


def test_whoever_looks_for_the_defect_sees_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DEBUG", "1")
    with pytest.raises(KeyError, match="boom"):
        JobTraces([job]).explain(trips_over_rank_1)


# Visits of few of many


def number(analysis, rank):  # type: ignore[no-untyped-def]
    return analysis.trace.rank, rank.gaps is not None


def test_of_many_ranks_only_those_worth_it_are_visited(job: Path) -> None:
    """The gravest finding is rank 4's; the first rank fills up."""
    found, results = JobTraces([job]).explain(number, max_ranks=2)
    assert found.findings[0].rank == 4
    assert results == [(0, True), (4, True)]
    assert len(found.ranks) == 5


def test_what_is_held_of_a_rank_has_no_columns_of_gaps(job: Path) -> None:
    assert {rank.gaps for rank in explain_job(job).ranks} == {None}


# Where there are many ranks


def test_tables_are_short_where_there_are_many_ranks(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = explain_job(job)
    monkeypatch.setattr(run_module, "MANY_RANKS", 4)
    monkeypatch.setattr(run_module, "SHORT_ROWS", 1)
    short = explain_job(job)
    assert "short-tables" in {note.id for note in short.quality}
    assert "short-tables" not in {note.id for note in whole.quality}
    for rank, before in zip(short.ranks, whole.ranks, strict=True):
        assert [kernel.name for kernel in rank.kernels] == ["gemm", "(others)"]
        assert sum(k.total_ns for k in rank.kernels) == sum(k.total_ns for k in before.kernels)
        assert rank.budget == before.budget


# The same answer from all engines


@pytest.fixture
def answer(job: Path) -> str:
    done = call("-m", "stepscope", "explain", job, "--json")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(job: Path, answer: str, workers: int) -> None:
    done = call("-m", "stepscope", "explain", job, "--json", "--workers", workers)
    assert done.stdout == answer


@pytest.mark.slow
def test_ray_gives_the_same_bytes_and_survives_its_workers(
    job: Path, answer: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'stepscope[ray]'")
    done = call(SCRIPTS / "on_ray.py", job, tmp_path / "ray.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ray.json").read_text() == answer
    told = json.loads(done.stdout)
    assert told["workers"] == 2
    assert told["outcomes"][:1] + told["outcomes"][2:] == list("abcde")
    assert told["outcomes"][1].startswith("deadly: the process that read it was killed:")


def test_the_ranks_of_a_job_give_the_same_bytes(job: Path, answer: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = tmp_path / "report.html"
    how = ("--engine", "torch", "--json", "--html", report)
    done = torchrun("-m", "stepscope", "explain", job, *how)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer
    assert "Rank 4" in report.read_text()


def test_in_a_job_only_the_first_rank_says_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = torchrun("-m", "stepscope", "explain", tmp_path / "none", "--engine", "torch")
    assert done.returncode
    assert done.stdout == ""
    assert done.stderr.count("none does not exist") == 1


# At the end of a training


def test_explain_together_tells_the_first_rank_and_breaks_nothing(
    job: Path, tmp_path: Path
) -> None:
    """On one disk; where each process sees only its own trace; with nothing there; and where one
    of the processes is in trouble alone."""
    pytest.importorskip("torch")
    paths = (job, job / "rank-0000{rank}", "/does/not/exist", f"trouble:{job}")
    done = call(SCRIPTS / "start_ranks.py", 2, SCRIPTS / "together.py", tmp_path, *paths)
    assert done.returncode == 0, done.stderr
    ranks = [[n, f"{job}/rank-{n:05d}/trace.json"] for n in range(5)]
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    assert told == [[ranks, ranks[:2], None, ranks], [None] * 4]
    assert "/does/not/exist does not exist" in done.stderr


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "torch"], "torchrun --nproc-per-node=4"),
        (["--engine", "torch", "--workers", "2"], "torchrun sets"),
        (["--engine", "dask"], "'dask' is not one of"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_wrong_use_of_engines_is_exit_2(job: Path, arguments: list[str], says: str) -> None:
    done = call("-m", "stepscope", "explain", job, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["ray", "torch"])
def test_a_missing_package_is_named(job: Path, engine: str) -> None:
    script = (
        "import os, sys; sys.modules['ray'] = sys.modules['torch'] = None\n"
        "os.environ |= dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='x', MASTER_PORT='1')\n"
        f"sys.argv = ['stepscope', 'explain', {str(job)!r}, '--engine', {engine!r}]\n"
        "from stepscope.ui.cli.verbs import main; main()\n"
    )
    done = call("-c", script)
    assert done.returncode == 2
    assert f"pip install 'stepscope[{engine}]'" in done.stderr


def test_workers_leave_when_their_parent_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from stepscope.explain.engines import _start_pool\n"
        "def pid(_):\n    time.sleep(0.2)\n    return os.getpid()\n"
        "pool = _start_pool(2)\n"
        "print(*set(pool.map(pid, range(4))), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
