"""Whatever happens to the job, it is the job's own doing: same output, own exit code, a folder
that can be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import stepscope

LOOP = """
import os, signal, sys, time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
{before}
for step in range(16):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
{inside}
{after}
"""


def script(tmp_path: Path, *, before: str = "", inside: str = "", after: str = "") -> Path:
    path = tmp_path / "train.py"
    indented = textwrap.indent(textwrap.dedent(inside), "    ")
    path.write_text(LOOP.format(before=textwrap.dedent(before), inside=indented, after=after))
    return path


def ours(path: Path, out: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "stepscope", "run", "--out", str(out), "--no-explain"]
    window = ["--wait", "4", "--warmup", "1", "--active", "2"]
    return [*command, *window, *options, "--", *started(path)]


def started(path: Path) -> list[str]:
    return [sys.executable, str(path)]


def call(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def rank_of(out: Path) -> dict[str, Any]:
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "finished"
    (rank,) = run["ranks"]
    found: dict[str, Any] = rank
    return found


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rank-00000/steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "step",
    [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(12, marks=pytest.mark.slow)],
    ids=["before", "inside", "after"],
)
@pytest.mark.parametrize(
    ("death", "code"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", 128 + signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("raise ValueError('bad data')", 1),
    ],
    ids=["exit", "term", "kill", "raise"],
)
def test_death_around_the_window_leaves_a_readable_folder(
    tmp_path: Path, death: str, code: int, step: int
) -> None:
    path = script(tmp_path, inside=f"if step == {step}:\n    time.sleep(1)\n    {death}")
    done = call(ours(path, tmp_path / "run"))
    assert done.returncode == code
    assert len(done.stdout.splitlines()) == step + 1
    rank = rank_of(tmp_path / "run")
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(step + 1))
    if step == 12:
        assert rank["missing"] == {}
        assert stepscope.explain_job(tmp_path / "run").ranks[0].steps.steps
    elif step == 2:
        assert rank["missing"]["trace.json.gz"]


def test_a_forked_child_is_not_a_rank(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        inside="""
        if step == 5:
            child = os.fork()
            if child == 0:
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                os._exit(0)
            os.waitpid(child, 0)
        """,
    )
    done = call(ours(path, tmp_path / "run"))
    assert done.returncode == 0
    assert rank_of(tmp_path / "run")["steps"] == 16


@pytest.mark.parametrize(
    "step", [pytest.param(5, marks=pytest.mark.slow), 12], ids=["inside", "after"]
)
def test_a_forked_child_ends_like_any_program(tmp_path: Path, step: int) -> None:
    path = script(
        tmp_path,
        inside=f"""
        if step == {step}:
            child = os.fork()
            if child == 0:
                import atexit, ctypes
                signal.alarm(30)
                atexit.register(print, "the child said goodbye")
                ctypes.CDLL(None).puts(b"the child spoke C")
                sys.exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    expected, done = call(started(path)), call(ours(path, tmp_path / "run"))
    assert sorted(done.stdout.splitlines()) == sorted(expected.stdout.splitlines())
    assert {"7", "the child said goodbye", "the child spoke C"} <= set(done.stdout.splitlines())
    assert done.returncode == 0
    assert rank_of(tmp_path / "run")["steps"] == 16


def test_the_scripts_own_profiler_comes_first(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        inside="""
        if step == 4:
            own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            own.start()
        if step == 10:
            own.stop()
            print(sum(e.count for e in own.key_averages() if e.key == "aten::addmm"))
        """,
    )
    expected, done = call(started(path)), call(ours(path, tmp_path / "run"))
    assert done.stdout == expected.stdout
    assert done.returncode == 0
    rank = rank_of(tmp_path / "run")
    assert "profiler" in rank["missing"]["trace.json.gz"]


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'it ran'\n")
    path = script(tmp_path, before="print(mine)")
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{inherited}"}
    done = call(ours(path, tmp_path / "run"), env=environment)
    assert done.stdout.startswith("it ran\n")
    assert rank_of(tmp_path / "run")["steps"] == 16


def test_a_full_disk_does_not_stop_the_training(tmp_path: Path) -> None:
    path = script(tmp_path)
    expected = call(started(path))
    command = " ".join(ours(path, tmp_path / "run"))
    # No file may grow beyond one block: every write of ours fails as on a full disk.
    done = call(["bash", "-c", f"ulimit -f 1; exec {command}"])
    assert done.stdout == expected.stdout
    assert done.returncode == 0


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = script(
        tmp_path,
        before=f"import shutil; shutil.rmtree({str(out)!r}); open({str(out)!r}, 'w').close()",
    )
    done = call(ours(path, out))
    assert len(done.stdout.splitlines()) == 16
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_the_command_and_keeps_the_folder(tmp_path: Path) -> None:
    path = script(tmp_path, inside="if step == 9: time.sleep(30)")
    with subprocess.Popen(
        ours(path, tmp_path / "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(10):
            process.stdout.readline()
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) in (1, 130)
    assert rank_of(tmp_path / "run")["steps"] == 10


def test_spawned_ranks_are_ranks(tmp_path: Path) -> None:
    path = tmp_path / "spawn.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist, torch.multiprocessing as mp
            from torch.nn.parallel import DistributedDataParallel

            def train(rank, store):
                torch.set_num_threads(1)
                store = dist.FileStore(store, 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                model = DistributedDataParallel(torch.nn.Linear(8, 4))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(12):
                    optimizer.zero_grad()
                    model(torch.ones(2, 8)).sum().backward()
                    optimizer.step()
                dist.destroy_process_group()

            if __name__ == "__main__":
                import sys
                mp.spawn(train, (sys.argv[1],), nprocs=2)
            """
        )
    )
    command = [*ours(path, tmp_path / "run"), str(tmp_path / "store")]
    done = call(command)
    assert done.returncode == 0, done.stderr
    ranks = json.loads((tmp_path / "run/run.json").read_text())["ranks"]
    assert [(rank["rank"], rank["world_size"], rank["steps"]) for rank in ranks] == [
        (0, 2, 12),
        (1, 2, 12),
    ]


@pytest.mark.slow  # test_compiled_steps.py has one in the ordinary tests
def test_a_compiled_model_is_captured_and_unchanged(tmp_path: Path) -> None:
    path = script(tmp_path, before='model = torch.compile(model, backend="aot_eager")')
    expected, done = call(started(path)), call(ours(path, tmp_path / "run"))
    assert done.stdout == expected.stdout
    assert done.returncode == 0
    rank = rank_of(tmp_path / "run")
    assert (rank["steps"], rank["problems"], rank["missing"]) == (16, [], {})


def test_a_clock_that_jumps_back_changes_no_duration(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        before="from stepscope.measure.session import session; now = time.time_ns",
        inside="if step == 8: session.time_ns = lambda: now() - 10**12",
    )
    done = call(ours(path, tmp_path / "run"))
    assert done.returncode == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(16))
    assert rows[9]["end_unix_ns"] < rows[8]["end_unix_ns"]
    assert all(0 < row["wall_ns"] < 10**11 for row in rows)


def test_a_rank_that_dies_in_the_window_leaves_the_other_readable(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            model = DistributedDataParallel(torch.nn.Linear(8, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(12):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                if step == 5 and dist.get_rank() == 1:
                    os._exit(9)
            """
        )
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", str(path)]
    expected = call(command)
    done = call([*ours(path, tmp_path / "run")[:-2], *command])
    assert done.returncode == expected.returncode != 0
    ranks = json.loads((tmp_path / "run/run.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[1]["missing"]["trace.json.gz"]
    assert len(rows_of(tmp_path / "run")) >= 5


def test_a_command_that_is_no_python_runs_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepscope", "run", "--out", str(tmp_path / "run"), "--"]
    done = call([*command, "bash", "-c", "echo hello; exit 7"])
    assert (done.stdout, done.returncode) == ("hello\n", 7)
    assert "nothing was captured: the command failed (exit code 7)" in done.stderr


def test_an_existing_run_folder_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("keep")
    done = call(ours(script(tmp_path), tmp_path / "run"))
    assert done.returncode == 2
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["precious"]
