"""The tables of full disks, few resources, forks and spawns: the training goes on as if bare, and
the folder says what is missing and why."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outages import Job, bare_losses, check_folder, check_nothing_else, losses, training

NO_SPACE = "no space left on device"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")


def rank_of(out: Path) -> dict[str, object]:
    (rank,) = json.loads((out / "run.json").read_text())["ranks"]
    assert isinstance(rank, dict)
    return rank


def on_small_disk(job: Job, kilobytes: int, *, full: bool = False) -> tuple[str, str, int]:
    """The captured job with its run folder on a disk of this size; its folder is copied back."""
    disk = job.place.parent / "disk"
    disk.mkdir()
    fill = f"head -c {kilobytes << 10} /dev/zero > {disk}/fill" if full else "true"
    command = shlex.join(job.captured(out=disk / "run"))
    steps = [
        f"mount -t tmpfs -o size={kilobytes}k small {disk} || exit 99",
        fill,
        command,
        "code=$?",
        f"test -e {disk}/run && cp -a {disk}/run {job.out}",
        "exit $code",
    ]
    done = job.call(["unshare", "-m", "bash", "-c", "\n".join(steps)])
    if done.returncode == 99:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    return done.stdout, done.stderr, done.returncode


@needs_root
@pytest.mark.parametrize(
    "kilobytes",
    [
        pytest.param(4, marks=pytest.mark.slow),
        16,
        pytest.param(48, marks=pytest.mark.slow),
        256,
        1024,
    ],
)
def test_a_small_disk_holds_what_fits_and_the_folder_says_the_rest(
    tmp_path: Path, kilobytes: int
) -> None:
    job = Job(tmp_path, training())
    output, complaints, code = on_small_disk(job, kilobytes)
    assert (losses(output), code) == (bare_losses(), 0)
    assert "Traceback" not in complaints
    check_nothing_else(job)
    said = check_folder(job.out)
    assert "not known" not in complaints + said
    if kilobytes < 100:
        assert NO_SPACE in said
        assert NO_SPACE in complaints
    else:
        assert rank_of(job.out)["missing"] == {}


@needs_root
def test_a_full_disk_runs_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, training())
    output, complaints, code = on_small_disk(job, 4, full=True)
    assert (losses(output), code) == (bare_losses(), 0)
    (line,) = complaints.splitlines()
    assert line.startswith("stepscope: nothing is captured")
    assert NO_SPACE in line
    assert not job.out.exists()
    check_nothing_else(job)


@pytest.mark.parametrize("blocks", [1, pytest.param(8, marks=pytest.mark.slow), 40])
def test_files_that_may_not_grow_are_told(tmp_path: Path, blocks: int) -> None:
    job = Job(tmp_path, training())
    command = shlex.join(job.captured())
    done = job.call(["bash", "-c", f"ulimit -f {blocks}; exec {command}"])
    assert (losses(done.stdout), done.returncode) == (bare_losses(), 0)
    check_nothing_else(job)
    if blocks == 1:
        assert "file too large" in done.stderr
        assert not job.out.exists()
    else:
        assert "not known" not in check_folder(job.out)


TAKE_ALL_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
"""
NO_MORE_THREADS = """
import resource
os.chmod(os.environ["OUTAGE_OUT"], 0o777)
os.setuid(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
"""
LITTLE_MEMORY = """
import resource
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (48 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
CLOSES_ALL = "os.closerange(3, 256); mine = [open(os.devnull, 'w+') for _ in range(40)]"
STILL_WRITES = "[(file.write('mine'), file.close()) for file in mine]"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(TAKE_ALL_FILES, "too many open files", id="open-files"),
        pytest.param(NO_MORE_THREADS, "can't start new thread", id="threads", marks=needs_root),
        pytest.param(LITTLE_MEMORY, "", id="memory"),
        pytest.param(CLOSES_ALL, "", id="closes-all-files"),
    ],
)
def test_few_resources_are_told_and_the_training_goes_on(
    tmp_path: Path, code: str, reason: str
) -> None:
    takes = f"if step == 2:\n    exec({code!r})"
    if code is NO_MORE_THREADS:
        job = Job(tmp_path, training(ready=code))
        job.temporary.chmod(0o755)
        job.out = job.temporary / "torch-run"  # where another user may look
    else:
        job = Job(tmp_path, training(inside=takes))
    environment = {**job.environment, "OUTAGE_OUT": str(job.out)}
    done = job.call(job.captured(), env=environment)
    assert (losses(done.stdout), done.returncode) == (bare_losses(), 0), done.stderr
    check_nothing_else(job)
    said = check_folder(job.out)
    rank = rank_of(job.out)
    assert rank["status"] == "finished"
    assert reason in str(rank["problems"])
    if reason == "too many open files":
        assert reason in said
        assert reason in done.stderr


def test_a_file_of_the_script_that_got_our_number_is_not_written_to(tmp_path: Path) -> None:
    closes = "os.closerange(3, 256); mine = [open(f'{GO_AWAY}{i}', 'w+') for i in range(40)]"
    job = Job(
        tmp_path,
        training(before=f"GO_AWAY = {str(tmp_path / 'mine-')!r}", inside=f"if step == 2: {closes}"),
    )
    done = job.call(job.captured())
    assert (losses(done.stdout), done.returncode) == (bare_losses(), 0)
    assert {file.read_text() for file in tmp_path.glob("mine-*")} == {""}
    check_folder(job.out)


WORKERS = """
import multiprocessing, os, sys
import torch

def work(number):
    return torch.ones(3).mul(number).sum().item()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((8,), float(index))

def main(method):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context = multiprocessing.get_context(method)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=2, num_workers=1, multiprocessing_context=method
    )
    for step, batch in enumerate(loader):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)
        if step == 5:  # inside the window
            with context.Pool(1) as pool:
                print(pool.map(work, [1, 2, 3]), flush=True)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("forkserver", "spawn"))]
)
def test_workers_of_every_kind_are_not_in_the_way(tmp_path: Path, method: str) -> None:
    job = Job(tmp_path, WORKERS)
    bare, done = job.call([*job.bare(), method]), job.call([*job.captured(), method])
    assert bare.returncode == 0, bare.stderr
    assert (done.stdout, done.returncode) == (bare.stdout, 0), done.stderr
    check_nothing_else(job)
    check_folder(job.out)
    ranks = json.loads((job.out / "run.json").read_text())["ranks"]
    assert ranks[0]["steps"] == 16
    assert ranks[0]["missing"] == {}


def test_unfinished_files_of_the_dead_are_removed_and_of_the_living_stay(tmp_path: Path) -> None:
    from stepscope.measure.folder import remove_leftovers, temporary

    rank = tmp_path / "rank-00000"
    rank.mkdir()
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True)  # fmt: skip
    mine = temporary(rank / "rank.json")
    theirs = mine.with_name(mine.name.replace(str(os.getpid()), ended.stdout.strip()))
    elsewhere = theirs.with_name(theirs.name.replace(os.uname().nodename, "another"))
    profilers = theirs.with_name(f"{theirs.name}.tmp")
    users = rank / ".notes.tmp"
    for file in (mine, theirs, elsewhere, profilers, users):
        file.touch()
    remove_leftovers(tmp_path)
    assert sorted(rank.iterdir()) == sorted([mine, elsewhere, users])
    shutil.rmtree(rank)
