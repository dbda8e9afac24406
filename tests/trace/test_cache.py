"""A cached trace is the trace, or is not used at all."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kineto_events import call, kernel, memory, op, ops
from msgspec.structs import replace

from cache_files import CacheFile, write_raw
from nsys_export import small
from stepscope import read_trace
from stepscope.records.trace import HostEvents, Trace
from stepscope.trace import cache as cache_module
from stepscope.trace import read as read_module
from stepscope.trace.cache import Cache, find_inconsistency
from stepscope.trace.formats.plausible_values import column_types

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "_CACHE_FROM_BYTES", 0)


@pytest.fixture
def path(write_trace: Any) -> Path:
    group = {"Collective name": "allreduce", "Group size": 8}
    events = [
        *ops(300),
        op("é \N{SNOWMAN}", "31", 5),
        call("cudaLaunchKernel", 1, 2, 5),
        kernel("nccl", 5, 5, 5, **group),
        memory(3, 512),
    ]
    return write_trace(events)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.columns"))


def assert_same(one: Trace, other: Trace) -> None:
    for field in Trace.__struct_fields__:
        mine, theirs = getattr(one, field), getattr(other, field)
        if field not in ("host", "device", "memory"):
            assert mine == theirs, field
            continue
        for column in type(mine).__struct_fields__:
            a, b = getattr(mine, column), getattr(theirs, column)
            assert a.dtype == b.dtype, column
            assert np.array_equal(a, b), column


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were really read, in order."""
    seen: list[Path] = []
    really = read_module._read

    def spy(path: Path, *rest: Any) -> Trace:
        seen.append(path)
        return really(path, *rest)

    monkeypatch.setattr(read_module, "_read", spy)
    return seen


def test_second_open_equals_the_first_column_by_column(path: Path, reads: list[Path]) -> None:
    first = read_trace(path)
    second = read_trace(path)
    assert reads == [path]
    assert first.quality
    assert_same(first, second)


def test_real_traces_come_back_from_the_cache_unchanged(golden: Path, reads: list[Path]) -> None:
    for name in ("cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph"):
        file = golden / f"{name}.json.gz"
        assert_same(read_trace(file), read_trace(file))
    assert len(reads) == 4


def test_an_entry_is_found_again_wherever_the_file_moves(path: Path, reads: list[Path]) -> None:
    first = read_trace(path)
    moved = path.rename(path.with_name("elsewhere.json"))
    assert_same(replace(first, path=str(moved)), read_trace(moved))
    assert len(reads) == 1


def test_a_file_rewritten_with_the_same_size_and_time_is_read_again(path: Path) -> None:
    read_trace(path)
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"aten::op3", b"aten::xx3"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert "aten::xx3" in read_trace(path).strings


def test_any_cut_or_flipped_byte_of_an_entry_means_not_cached(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    fresh = read_trace(path)
    [entry] = entries(cache_dir)
    whole = entry.read_bytes()
    rng = np.random.default_rng(1)
    places = [0, 5, 20, 30, *rng.integers(0, len(whole), 60).tolist()]
    damaged = [whole[:at] for at in places]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in places]
    for content in damaged:
        entry.write_bytes(content)
        assert_same(fresh, read_trace(path))


COLUMN = ("host", "name")


def shorter(file: CacheFile) -> None:
    file.columns[COLUMN] = file.columns[COLUMN][:-1]


def wider(file: CacheFile) -> None:
    file.columns[COLUMN] = file.columns[COLUMN].astype(np.int64)


def floating(file: CacheFile) -> None:
    file.columns["host", "dur_ns"] = file.columns["host", "dur_ns"].astype(np.float64)


def objects(file: CacheFile) -> None:
    file.columns["host", "dur_ns"] = file.columns["host", "dur_ns"].view("V8")


def missing(file: CacheFile) -> None:
    del file.columns[COLUMN]


def without_rows_in_one_table(file: CacheFile) -> None:
    for table, name in list(file.columns):
        if table == "memory":
            del file.columns[table, name]


def one_value(table: str, column: str, value: int, row: int = -1) -> Callable[[CacheFile], None]:
    def change(file: CacheFile) -> None:
        file.columns[table, column][row] = value

    return change


def head_value(name: str, value: Any) -> Callable[[CacheFile], None]:
    def change(file: CacheFile) -> None:
        file.head[name] = value

    return change


def all_rows_reversed(table: str) -> Callable[[CacheFile], None]:
    def change(file: CacheFile) -> None:
        for (of, name), values in file.columns.items():
            if of == table and "parent" not in name:
                file.columns[of, name] = values[::-1].copy()

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(shorter, wider, floating, objects, missing, without_rows_in_one_table),
        one_value("host", "kind", 6),
        one_value("host", "kind", -1),
        one_value("host", "name", 10**6),
        one_value("host", "name", -1),
        one_value("host", "thread", 99),
        one_value("host", "thread", -1),
        one_value("host", "dur_ns", -1),
        one_value("host", "dur_ns", 2**62),
        one_value("host", "start_ns", 2**63 - 1),
        one_value("host", "start_ns", -(2**63)),
        one_value("host", "start_ns", -5, row=-2),
        one_value("host", "shapes", 10**6),
        one_value("host", "dtypes", -2),
        one_value("host", "concrete", 2**31 - 1),
        one_value("host", "collective", 1),
        one_value("host", "parent", -2),
        one_value("host", "parent", 10**6),
        one_value("host", "parent", 0),
        one_value("host", "parent", 5, row=5),
        one_value("host", "forward_of", 10**6),
        one_value("host", "forward_of", 4, row=4),
        one_value("device", "name", -1),
        one_value("device", "kind", 77),
        one_value("device", "dur_ns", -1),
        one_value("device", "grid", 10**6),
        one_value("device", "launch", 10**6),
        one_value("device", "launch", -7),
        one_value("device", "collective", 3),
        one_value("device", "start_ns", -(2**62)),
        one_value("memory", "thread", 9),
        one_value("memory", "time_ns", 2**63 - 1),
        *(all_rows_reversed(table) for table in ("host", "device", "memory")),
        head_value("strings", ["only one"]),
        head_value("strings", 5),
        head_value("strings", [1, 2]),
        head_value("threads", []),
        head_value("threads", [{"pid": 1, "tid": 2}]),
        head_value("collectives", []),
        head_value("kind", "gpu"),
        head_value("events", -1),
        head_value("events", "many"),
        head_value("rank", -1),
        head_value("rank", 1.5),
        head_value("world_size", "8"),
        head_value("devices", [{"id": None}]),
        head_value("facts", {"nested": {"deep": 1}}),
        head_value("facts", []),
        head_value("groups", [5]),
        head_value("quality", [{"id": 1}]),
        head_value("key", "stepscope-" + "0" * 40),
    ],
)
def test_an_entry_with_right_checksums_and_wrong_content_is_refused_and_rebuilt(
    paired: Path, cache_dir: Path, reads: list[Path], change: Callable[[CacheFile], None]
) -> None:
    fresh = read_trace(paired)
    [entry] = entries(cache_dir)
    whole = entry.read_bytes()
    file = CacheFile.read(entry)
    change(file)
    file.write(entry)
    assert_same(fresh, read_trace(paired))
    assert len(reads) == 2
    assert entry.read_bytes() == whole


@pytest.fixture
def paired(write_trace: Any) -> Path:
    """At least two rows in every table, on two threads."""
    group = {"Collective name": "allreduce", "Group size": 8}
    launches = [call("cudaLaunchKernel", at, 1, at) for at in (1, 2)]
    kernels = [kernel("nccl", at, 5, at, **group) for at in (1, 2)]
    other = op("aten::far", 400, 5, tid=2)
    return write_trace([*ops(20), *launches, *kernels, other, memory(3, 512), memory(4, -512)])


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("value", [-1, 1, 2**40, 2**63 - 1, 2**70, "<i4", "O", None, "host", []])
def test_a_different_list_of_columns_is_refused(
    paired: Path, cache_dir: Path, reads: list[Path], place: int, value: Any
) -> None:
    fresh = read_trace(paired)
    [entry] = entries(cache_dir)
    file = CacheFile.read(entry)
    for row in (0, 3, -1):
        layout = file.layout()
        layout[row][place] = value
        if layout != file.layout():
            file.write(entry, layout)
            before = len(reads)
            assert_same(fresh, read_trace(paired))
            assert len(reads) == before + 1


def test_an_entry_that_was_only_put_together_again_is_used(
    paired: Path, cache_dir: Path, reads: list[Path]
) -> None:
    fresh = read_trace(paired)
    [entry] = entries(cache_dir)
    CacheFile.read(entry).write(entry)
    assert_same(fresh, read_trace(paired))
    assert len(reads) == 1


@pytest.mark.parametrize(
    "head", [b"", b"{}", b"[" * 100_000, b'{"key": "\xff"}', b"null", b"9" * 5000]
)
def test_a_damaged_head_is_refused(
    path: Path, cache_dir: Path, reads: list[Path], head: bytes
) -> None:
    fresh = read_trace(path)
    [entry] = entries(cache_dir)
    write_raw(entry, head, b"")
    assert_same(fresh, read_trace(path))
    assert len(reads) == 2


def test_an_entry_of_another_version_is_not_used(
    path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)
    monkeypatch.setattr(cache_module, "VERSION", cache_module.VERSION + 1)
    read_trace(path)
    assert len(reads) == 2


def test_two_processes_may_write_the_same_entry_at_once(path: Path, cache_dir: Path) -> None:
    program = (
        "import sys; from stepscope.trace import read as r; r._CACHE_FROM_BYTES = 0; "
        "print(r.read_trace(sys.argv[1]).events)"
    )
    source = str(Path(read_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=60) for process in running]
    expected = str(read_trace(path, cache=False).events).encode()
    assert [(out.strip(), err) for out, err in results] == [(expected, b"")] * 3
    assert len(entries(cache_dir)) == 1
    assert list(cache_dir.iterdir()) == entries(cache_dir)


def test_a_folder_that_cannot_be_written_only_means_no_cache(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "cache", Path("/proc/no-such-folder")):
        monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(folder))
        assert read_trace(path).events == 304


def test_a_full_disk_leaves_no_file(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, key: str, trace: Trace) -> None:
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_entry", full)
    assert read_trace(path).events == 304
    assert list(cache_dir.iterdir()) == []


def test_an_entry_in_a_folder_that_others_own_is_still_used(
    path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cache_module.os, "utime", refuse)
    read_trace(path)
    assert len(reads) == 1


def test_the_least_recently_used_entries_go_first(
    write_trace: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_trace(ops(100 + i)) for i in range(4)]
    for age, path in enumerate(paths[:3]):
        read_trace(path)
        for entry in entries(cache_dir):
            os.utime(entry, ns=(0, entry.stat().st_mtime_ns - 10**9 * (3 - age)))
    read_trace(paths[0])  # used again: now the newest
    size = max(entry.stat().st_size for entry in entries(cache_dir))
    monkeypatch.setattr(cache_module, "LIMIT_BYTES", 3 * size)
    read_trace(paths[3])
    kept = {entry.stem for entry in entries(cache_dir)}
    store = Cache.default()
    assert kept == {store.key(path) for path in (paths[0], paths[2], paths[3])}


def abandoned(folder: Path, number: int = 1) -> Path:
    """What a writer leaves that is killed."""
    folder.mkdir(exist_ok=True)
    left = folder / f"stepscope-{number:016x}.writing"
    left.touch(0o600)
    left.write_bytes(b"half")
    return left


def test_what_a_killed_process_left_is_swept_up_at_the_next_write(
    path: Path, cache_dir: Path
) -> None:
    program = (
        "import os, signal, sys; from stepscope.trace import cache, read; "
        "read._CACHE_FROM_BYTES = 0; "
        "cache.write_entry = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
        "read.read_trace(sys.argv[1])"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -9
    [left] = cache_dir.iterdir()
    assert left.suffix == ".writing"
    read_trace(path)
    assert list(cache_dir.iterdir()) == entries(cache_dir) != []


def test_what_a_living_process_writes_stays(path: Path, cache_dir: Path) -> None:
    writing = abandoned(cache_dir)
    os.utime(writing, (0, 0))
    with writing.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        read_trace(path)
    assert writing.exists()


def test_without_locks_what_was_left_goes_after_a_day(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    old, new = abandoned(cache_dir, 1), abandoned(cache_dir, 2)
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    read_trace(path)
    assert not old.exists()
    assert new.exists()


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([True, False])

    def sweep_first(_: Any) -> None:
        if next(turns):
            Cache.default()._sweep()

    monkeypatch.setattr(cache_module, "_lock", sweep_first)
    read_trace(path)
    assert len(entries(cache_dir)) == 1


FOREIGN = (
    "notes.tmp",
    "old.columns",
    "stepscope.columns",
    "stepscope-notes.writing",
    "stepscope-0123456789abcdef.tmp",
    f"{'a' * 40}.columns",
    f"{'a' * 40}.tmp",
    f"stepscope-{'g' * 40}.columns",
    f"my-stepscope-{'a' * 40}.columns",
)


def test_files_of_other_programs_are_never_touched(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.mkdir()
    for name in FOREIGN:
        (cache_dir / name).write_bytes(b"mine" * 1000)
        os.utime(cache_dir / name, (0, 0))
    monkeypatch.setattr(cache_module, "LIMIT_BYTES", 1)
    read_trace(path)
    assert {file.name for file in cache_dir.iterdir()} == set(FOREIGN)
    assert {file.read_bytes() for file in cache_dir.iterdir()} == {b"mine" * 1000}


def test_folders_and_pipes_of_our_names_are_left_alone(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.mkdir()
    (cache_dir / f"stepscope-{'a' * 40}.columns").mkdir()
    os.mkfifo(cache_dir / f"stepscope-{'b' * 40}.columns")
    os.mkfifo(cache_dir / f"stepscope-{'c' * 16}.writing")
    (cache_dir / f"stepscope-{'d' * 16}.writing").symlink_to(path)
    monkeypatch.setattr(cache_module, "LIMIT_BYTES", 1)
    read_trace(path)
    assert len(list(cache_dir.iterdir())) == 4
    assert path.exists()


def test_entries_of_former_versions_make_room_too(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)
    [entry] = entries(cache_dir)
    former = cache_dir / f"{'a' * 40}.columns"
    former.touch(0o600)
    former.write_bytes(entry.read_bytes())
    os.utime(former, (0, 0))
    monkeypatch.setattr(cache_module, "LIMIT_BYTES", entry.stat().st_size)
    entry.unlink()
    read_trace(path)
    assert entries(cache_dir) == [entry]


def test_an_entry_over_the_limit_is_not_stored_and_removes_no_other(
    path: Path, write_trace: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)
    kept = entries(cache_dir)
    monkeypatch.setattr(cache_module, "LIMIT_BYTES", kept[0].stat().st_size)
    read_trace(write_trace(ops(3000)))
    assert list(cache_dir.iterdir()) == kept
    large = cache_dir / f"stepscope-{'a' * 40}.columns"
    large.write_bytes(bytes(2 * kept[0].stat().st_size))  # of a time with a higher limit
    kept[0].unlink()
    read_trace(path)
    assert list(cache_dir.iterdir()) == kept


def test_the_folder_is_the_users_alone_and_so_are_its_files(path: Path, cache_dir: Path) -> None:
    before = os.umask(0)
    try:
        read_trace(path)
    finally:
        os.umask(before)
    [entry] = entries(cache_dir)
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_an_existing_folder_keeps_its_permissions(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o1777)
    read_trace(path)
    read_trace(path)
    assert len(reads) == 1
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o1777


def test_an_entry_that_others_may_write_to_is_not_used(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    read_trace(path)
    [entry] = entries(cache_dir)
    entry.chmod(0o620)
    read_trace(path)
    assert len(reads) == 2
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600  # written anew


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_entry_of_another_user_is_not_used(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    read_trace(path)
    [entry] = entries(cache_dir)
    os.chown(entry, 12345, 12345)
    read_trace(path)
    assert len(reads) == 2
    assert entry.stat().st_uid == 0


def test_the_entry_of_another_trace_is_not_used(
    path: Path, write_trace: Any, cache_dir: Path, reads: list[Path]
) -> None:
    read_trace(path)
    [entry] = entries(cache_dir)
    other = write_trace(ops(7))
    entry.rename(entry.with_stem(Cache.default().key(other)))
    assert read_trace(other).events == 7


def test_what_lies_in_place_of_an_entry_is_replaced_or_read_past(
    path: Path, cache_dir: Path, tmp_path: Path, reads: list[Path]
) -> None:
    read_trace(path)
    [entry] = entries(cache_dir)
    whole = entry.read_bytes()
    for place in (
        lambda: os.mkfifo(entry),
        lambda: entry.symlink_to("/dev/zero"),
        lambda: entry.symlink_to(tmp_path / "nowhere"),
        lambda: entry.touch(0o600),
        lambda: (entry.touch(0o600), os.truncate(entry, 1 << 40)),
    ):
        entry.unlink()
        place()
        assert read_trace(path).events == 304
        assert entry.read_bytes() == whole
    entry.unlink()
    entry.mkdir()
    assert read_trace(path).events == 304
    assert list(cache_dir.iterdir()) == [entry]


def test_a_link_to_a_folder_is_a_folder_and_a_broken_one_is_none(
    path: Path, tmp_path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    cache_dir.symlink_to(tmp_path / "elsewhere")
    read_trace(path)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "elsewhere").mkdir()
    read_trace(path)
    read_trace(path)
    assert len(reads) == 2


def test_a_folder_that_nobody_may_write_to_is_read(
    path: Path, cache_dir: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)
    really = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & (os.O_WRONLY | os.O_CREAT):
            raise PermissionError(13, "Permission denied")
        return really(path, flags, *rest)

    monkeypatch.setattr(cache_module.os, "open", refuse)
    read_trace(path)
    assert len(reads) == 1
    entries(cache_dir)[0].unlink()
    read_trace(path)
    assert list(cache_dir.iterdir()) == []


def test_readers_and_writers_may_come_and_go_at_once(path: Path, cache_dir: Path) -> None:
    program = (
        "import sys; from stepscope.trace import cache, read; read._CACHE_FROM_BYTES = 0; "
        "cache.LIMIT_BYTES = int(sys.argv[2]); "
        "print({read.read_trace(sys.argv[1]).events for _ in range(40)})"
    )
    read_trace(path)
    size = entries(cache_dir)[0].stat().st_size
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for limit in (1 << 30, size - 1, 1 << 30)  # the second throws out what the others write
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert results == [(b"{304}\n", b"")] * 3
    assert list(cache_dir.iterdir()) == entries(cache_dir)


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = read_module._read

    def grow(path: Path, *rest: Any) -> Trace:
        trace = really(path, *rest)
        with path.open("ab") as file:
            file.write(b" ")
        return trace

    monkeypatch.setattr(read_module, "_read", grow)
    read_trace(path)
    assert entries(cache_dir) == []


def test_without_the_cache_nothing_is_read_from_it_or_written(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    read_trace(path, cache=False)
    read_trace(path, cache=False)
    assert len(reads) == 2
    assert not cache_dir.exists()


def test_small_files_are_not_worth_an_entry(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "_CACHE_FROM_BYTES", 1 << 20)
    read_trace(path)
    assert not cache_dir.exists()


def test_facts_that_no_entry_can_hold_only_mean_not_cached(write_trace: Any) -> None:
    head = {"big": 10**30, "distributedInfo": {"pg_config": [{"ranks": 2**80}]}}
    path = write_trace(ops(3), head=head)
    assert_same(read_trace(path), read_trace(path))


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", "/somewhere")
    assert Cache.default().folder == Path("/somewhere")
    monkeypatch.delenv("STEPSCOPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert Cache.default().folder == Path("/xdg/stepscope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert Cache.default().folder == Path("/home/someone/.cache/stepscope")


def test_a_user_without_a_home_gets_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert Cache.default().folder.name == "stepscope"


# Every reader keeps the rules, and each broken rule is seen (the others: test_cache.py).


def test_traces_of_every_reader_are_consistent(golden: Path, tmp_path: Path) -> None:
    names = ("cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph")
    files = [
        *(golden / f"{name}.json.gz" for name in names),
        small().write(tmp_path / "run.sqlite"),
    ]
    assert {find_inconsistency(read_trace(file, cache=False)) for file in files} == {None}


def test_the_broken_rule_is_named(golden: Path) -> None:
    trace = read_trace(golden / "cpu_step.json.gz", cache=False)
    negative = np.full(len(trace.host), -1)
    broken = replace(trace, host=replace(trace.host, dur_ns=negative))
    assert "a duration is negative" in (find_inconsistency(broken) or "")
    short = replace(trace, host=replace(trace.host, name=trace.host.name[:-1]))
    assert find_inconsistency(short) == "column name of HostEvents has another type or length"


def test_types_of_columns_are_those_that_the_record_declares() -> None:
    types = column_types(HostEvents)
    assert list(types) == list(HostEvents.__struct_fields__)
    assert (types["kind"], types["name"], types["dur_ns"]) == (np.int8, np.int32, np.int64)
