"""Collectives are read as torch recorded them, alike on all ranks; the training never notices."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from two_ranks import run_ranks

from stepscope.measure.cluster import clock_sync, flight_recorder
from stepscope.measure.cluster.flight_recorder import FIRST_STEP, SLOT, CollectiveLog, read_columns
from stepscope.measure.cluster.window_collectives import Comms
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.rank_folder import read_collective_log

FIRST, LAST = 3, 5
TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 8)
)
ddp = DDP(model, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
losses = []
def train(step):
    optimizer.zero_grad()
    loss = ddp(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
"""
FINISH = """
answer["losses"] = losses
answer["weights"] = [p.detach().double().sum().item().hex() for p in model.parameters()]
answer["parameter_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Eight DDP steps with a window over three of them, and clocks tied around it."""
    before = """
    from stepscope.measure.cluster.clock_sync import ClockSync
    from stepscope.measure.cluster.window_collectives import Comms
    comms, clock = Comms(), ClockSync()
    comms.attach()
    comms.attach()
    """
    body = f"""{TRAIN}
for step in range(8):
    if step == {FIRST}:
        clock.synchronise("start", step)
        comms.window_begins(step)
    elif step > {FIRST}:
        comms.step_begins(step)
    train(step)
    if step == {LAST}:
        answer["lines"] = comms.window_ends(step)
        clock.synchronise("end", step)
{FINISH}
group = dist.new_group([0, 1], group_desc="mine")
total = torch.ones(1)
dist.all_reduce(total, group=group)
answer["total"] = total.item()
answer["syncs"] = len(clock.content()["syncs"])
comms.group_ends()
dist.destroy_process_group()
answer["described"] = comms.describe(ddp.parameters())
"""
    return run_ranks(tmp_path_factory.mktemp("watched"), body, before=before)


def test_every_bucket_of_every_step_is_there_in_order(watched: list[Any]) -> None:
    for answer in watched:
        lines, (replica,) = answer["lines"], answer["described"]["ddp"]
        sizes = [bucket["size_bytes"] for bucket in replica["buckets"]]
        assert len(sizes) > 1
        steps = range(FIRST, LAST + 1)
        assert [(line["step"], line["bucket"], line["size_bytes"]) for line in lines] == [
            (step, bucket, size) for step in steps for bucket, size in enumerate(sizes)
        ]
        first = lines[0]["sequence"]
        assert [line["sequence"] for line in lines] == list(range(first, first + len(lines)))
        assert all(a["created_ns"] < b["created_ns"] for a, b in itertools.pairwise(lines))


def test_a_line_says_what_was_sent_and_what_was_not_measured(watched: list[Any]) -> None:
    assert watched[0]["lines"]
    for line in watched[0]["lines"]:
        assert (line["kind"], line["group"], line["group_size"]) == ("all_reduce", "0", 2)
        assert (line["dtype"], line["p2p"], line["source"]) == ("float32", False, "flight recorder")
        assert line["size_bytes"] == 4 * line["input_sizes"][0][0]
        assert line["started_ns"] is None
        assert line["ended_ns"] is None


def test_both_ranks_tell_the_same(watched: list[Any]) -> None:
    timeless = [
        [{k: v for k, v in line.items() if k != "created_ns"} for line in answer["lines"]]
        for answer in watched
    ]
    assert timeless[0] == timeless[1]


def test_buckets_add_up_to_the_parameters(watched: list[Any]) -> None:
    for answer in watched:
        (replica,) = answer["described"]["ddp"]
        assert sum(b["size_bytes"] for b in replica["buckets"]) == answer["parameter_bytes"]
        named = [name for bucket in replica["buckets"] for name in bucket["parameters"]]
        assert sorted(named) == ["0.bias", "0.weight", "2.bias", "2.weight", "3.bias", "3.weight"]
        assert replica["comm_hook"] is None
        assert replica["buckets_rebuilt"]
        assert replica["average_comm_ns"] > 0


def test_the_job_is_described_even_when_its_groups_are_gone(watched: list[Any]) -> None:
    for rank, answer in enumerate(watched):
        described = answer["described"]
        assert [(g["name"], g["description"]) for g in described["groups"]] == [
            ("0", "default_pg"),
            ("1", "mine"),
        ]
        assert all(g["ranks"] == [0, 1] and g["rank"] == rank for g in described["groups"])
        assert "gloo" in described["groups"][0]["backend"]
        assert described["nccl_version"] is None
        assert described["placements"] == []
        assert any("no communication hook was registered" in note for note in described["notes"])


def test_the_training_is_the_same_to_the_bit(watched: list[Any], tmp_path: Path) -> None:
    body = f"{TRAIN}\nfor step in range(8):\n    train(step)\n{FINISH}"
    for bare, answer in zip(run_ranks(tmp_path, body), watched, strict=True):
        assert answer["losses"] == bare["losses"]
        assert answer["weights"] == bare["weights"]
        assert answer["output"] == bare["output"] == []
        assert answer["total"] == 2
        assert answer["syncs"] == 2


def test_a_hook_of_the_script_is_left_alone_however_late_it_comes(tmp_path: Path) -> None:
    body = f"""{TRAIN}
from stepscope.measure.cluster.window_collectives import Comms
comms = Comms()  # came after DDP was made
comms.attach()
comms.window_begins(0)
calls = 0
def my_hook(state, bucket):
    global calls
    calls += 1
    bucket.buffer().div_(2)
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
ddp.register_comm_hook(None, my_hook)
for step in range(2):
    train(step)
answer["lines"] = comms.window_ends(1)
answer["calls"] = calls
answer["described"] = comms.describe()
"""
    for answer in run_ranks(tmp_path, body):
        (replica,) = answer["described"]["ddp"]
        assert replica["comm_hook"] == "my_hook"
        reduced = [line for line in answer["lines"] if line["kind"] == "all_reduce"]
        assert answer["calls"] == len(reduced) > 0


def test_sharded_parameters_and_mesh_groups_are_described(tmp_path: Path) -> None:
    body = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from stepscope.measure.cluster.window_collectives import Comms
    comms = Comms()
    comms.attach()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["dp"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    comms.window_begins(0)
    model(torch.randn(4, 8)).sum().backward()
    answer["lines"] = comms.window_ends(0)
    answer["described"] = comms.describe(model.parameters())
    """
    for answer in run_ranks(tmp_path, body):
        described = answer["described"]
        (placement,) = described["placements"]
        assert (placement["mesh"], placement["shape"], placement["count"]) == (["dp"], [2], 4)
        assert described["fsdp_modules"] == {"FSDPLinear": 1, "FSDPSequential": 1}
        described_as = {group["name"]: group["description"] for group in described["groups"]}
        assert "mesh_tp" in described_as.values()
        assert placement["groups"]
        assert set(placement["groups"]) <= set(described_as)
        assert {line["kind"] for line in answer["lines"]} >= {"all_gather"}
        assert all(line["group_size"] == 2 for line in answer["lines"])


def test_what_is_trained_is_counted_once_and_shared_memory_is_told() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 5)  # 20 elements of 4 bytes
    model.bias.requires_grad_(False)
    twice = [*model.parameters(), *model.parameters()]
    trained = Comms().describe(twice)["trained"]
    assert trained == {"tensors": 1, "size_bytes": 60, "shared_tensors": 0}
    model.share_memory()
    assert Comms().describe(twice)["trained"]["shared_tensors"] == 1


def test_tensors_of_a_device_do_not_tell_whether_they_are_shared() -> None:
    torch = pytest.importorskip("torch")
    elsewhere = torch.nn.Linear(3, 5, device="meta")
    assert Comms().describe(elsewhere.parameters())["trained"]["shared_tensors"] is None


def test_outside_a_job_there_is_nothing_to_tell() -> None:
    comms = Comms()
    comms.attach()
    comms.step_begins(1)
    assert comms.window_ends(1) == []
    described = comms.describe()
    assert described["groups"] == []
    assert described["ddp"] == []
    assert described["notes"] == []


def entry(**values: Any) -> dict[str, Any]:
    """As torch 2.13 writes one."""
    return {
        "profiling_name": "nccl:all_reduce",
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 7,
        "p2p_seq_id": 0,
        "op_id": 9,
        "is_p2p": False,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["BFloat16"],
        "time_created_ns": 1000,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 2000,
        **values,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nccl:all_reduce", "all_reduce"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:all_gather_into_tensor_coalesced", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("nccl:all_to_all", "all_to_all"),
        ("nccl:_broadcast_oop", "broadcast"),
        ("nccl:reduce", "reduce"),
        ("nccl:send 0->1", "send"),
        ("nccl:recv 0<-1", "recv"),
        ("nccl:coalesced", "coalesced"),
        ("gloo:gather", "gather"),
    ],
)
def test_kinds_have_one_name_on_every_backend(name: str, kind: str) -> None:
    assert flight_recorder.as_line(entry(profiling_name=name), {}, None)["kind"] == kind


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "size"),
    [
        ("all_reduce", [[8]], [[8]], 16),
        ("all_reduce", [[8], [2]], [[8], [2]], 20),
        ("all_gather", [[8]], [[2, 8]], 32),
        ("reduce_scatter", [[2, 8]], [[8]], 32),
        ("gather", [[8]], [], 32),
        ("scatter", [], [[8]], 32),
        ("barrier", [], [], None),
    ],
)
def test_bytes_are_those_of_the_whole_message(
    kind: str, inputs: list[list[int]], outputs: list[list[int]], size: int | None
) -> None:
    made = entry(
        profiling_name=f"nccl:{kind}",
        input_sizes=inputs,
        input_dtypes=["BFloat16"] * len(inputs),
        output_sizes=outputs,
        output_dtypes=["BFloat16"] * len(outputs),
    )
    assert flight_recorder.as_line(made, {"0": 2}, None)["size_bytes"] == size


def test_what_a_watchdog_noticed_is_a_bound_and_not_a_time() -> None:
    line = flight_recorder.as_line(entry(duration_ms=1.5, is_p2p=True, p2p_seq_id=3), {}, 4)
    assert (line["started_ns"], line["ended_ns"]) == (None, None)
    assert (line["started_by_ns"], line["ended_by_ns"]) == (None, 2000)
    assert (line["duration_ns"], line["sequence"], line["step"]) == (1_500_000, 3, 4)


def test_a_ring_too_short_for_the_window_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [entry(record_id=5, time_created_ns=200), entry(record_id=6, time_created_ns=300)]
    dump = json.dumps({"entries": kept}).encode()
    monkeypatch.setattr(flight_recorder, "recorders", lambda: [("ring", lambda: dump)])
    times = iter([100, 400, 400])
    comms = Comms(now=lambda: next(times))
    comms.window_begins(1)
    lines = comms.window_ends(1)
    assert [line["created_ns"] for line in lines] == [200, 300]
    assert any("first collectives are lost" in note for note in comms.describe()["notes"])


# The recorder is read before it overwrites itself, within a budget, and packed small.

CAPACITY = 2000


class Recorder:
    """A ring like torch's: it takes 20 microseconds to read an logged_entry."""

    def __init__(self, per_step: int, step_s: float = 0.01) -> None:
        self.per_step, self.step_s = per_step, step_s
        self.now = 0.0
        self.count = 0
        self.spent = 0.0

    def run_until(self, log: CollectiveLog, steps: int) -> None:
        for step in range(steps):
            self.now += self.step_s
            self.count += self.per_step
            log.step_begins(step + 1)

    def dump(self) -> bytes:
        entries = [
            logged_entry(number) for number in range(max(0, self.count - CAPACITY), self.count)
        ]
        self.now += 20e-6 * len(entries)
        self.spent += 20e-6 * len(entries)
        return json.dumps({"entries": entries}, separators=(",", ":")).encode()

    def log(self, folder: Path) -> CollectiveLog:
        dumps = [("_dump_fr_trace_json", self.dump)]
        return CollectiveLog(folder, recorders=lambda: dumps, now=lambda: self.now)


def logged_entry(number: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "collective_seq_id": number + 1,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "record_id": number,
        "time_created_ns": 1_700_000_000_000_000_000 + 1_000_000 * number,
    }
    return {**usual, **changes}


def text(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"entries": entries}, separators=(",", ":")).encode()


def sequences(folder: Path) -> list[int]:
    oddities = Oddities("collectives")
    log = read_collective_log(folder, oddities)
    assert not oddities.notes
    return log.sequence.tolist() if log is not None else []


def test_every_collective_of_a_small_job_is_kept_once(tmp_path: Path) -> None:
    recorder = Recorder(per_step=2, step_s=0.05)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 5000)
    log.close(5000)
    assert sequences(tmp_path) == list(range(1, 10_001))


@pytest.mark.parametrize("per_step", [1, 5, 100, 5000])
@pytest.mark.parametrize("step_s", [0.01, 1.0])
def test_reading_takes_at_most_a_500th_of_the_run(
    tmp_path: Path, per_step: int, step_s: float
) -> None:
    recorder = Recorder(per_step, step_s)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 20_000 if step_s < 1 else 2000)
    # The very first reading comes when nothing is known of the recorder yet.
    assert recorder.spent <= 0.002 * recorder.now + 0.04
    assert sequences(tmp_path)


def test_many_collectives_a_step_are_seen_in_stretches(tmp_path: Path) -> None:
    recorder = Recorder(per_step=500)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 10_000)
    log.close(10_000)
    kept = sequences(tmp_path)
    assert kept[-1] == 5_000_000
    assert CAPACITY <= len(kept) < 50_000


def test_a_month_of_steps_stays_small(tmp_path: Path) -> None:
    """Readings become rarer: a few hundred of them, and a few megabytes."""
    recorder = Recorder(per_step=5, step_s=1.0)
    log = recorder.log(tmp_path)
    step = 0
    while step < 30 * 86_400:
        step = log.due
        recorder.now, recorder.count = float(step), 5 * step
        log.step_begins(step)
    log.close(step + 1)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000_000


def test_a_step_that_is_profiled_is_left_alone(tmp_path: Path) -> None:
    recorder = Recorder(per_step=1)
    log = recorder.log(tmp_path)
    log.step_begins(FIRST_STEP, disturbed=True)
    assert recorder.spent == 0
    assert log.due == FIRST_STEP + SLOT


def test_a_disk_that_refuses_and_a_recorder_that_fails_do_no_harm(tmp_path: Path) -> None:
    log = Recorder(per_step=1).log(tmp_path / "missing")
    log.step_begins(FIRST_STEP)
    log.close(FIRST_STEP + 1)

    def broken() -> bytes:
        raise RuntimeError("no recorder")

    log = CollectiveLog(tmp_path, recorders=lambda: [("broken", broken)])
    log.step_begins(FIRST_STEP)
    assert log.due > FIRST_STEP
    log.close(FIRST_STEP + 1)
    assert not list(tmp_path.iterdir())


def test_sends_and_receives_are_left_out() -> None:
    columns = read_columns(text(logged_entry(0), logged_entry(1, is_p2p=True), logged_entry(2)))
    assert columns["sequence"] == [1, 3]


def test_names_that_need_escapes_are_read_too() -> None:
    columns = read_columns(text(logged_entry(0, process_group=['a "b"', ""]), logged_entry(1)))
    assert columns["group"] == ['a "b"', "0"]
    assert columns["created_ns"][1] - columns["created_ns"][0] == 1_000_000


def test_durations_are_kept_where_all_entries_have_them() -> None:
    assert read_columns(text(logged_entry(0, duration_ms=1.5)))["duration_ns"] == [1_500_000]
    assert "duration_ns" not in read_columns(
        text(logged_entry(0, duration_ms=1.5), logged_entry(1))
    )


def test_an_empty_recorder_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(per_step=0)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 200)
    log.close(200)
    assert not list(tmp_path.iterdir())


def test_a_log_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    recorder = Recorder(per_step=1, step_s=0.1)
    log = recorder.log(tmp_path)
    recorder.run_until(log, 1000)
    log.close(1000)
    (file,) = tmp_path.iterdir()
    packed = file.read_bytes()
    file.write_bytes(packed[:-20])
    kept = sequences(tmp_path)
    assert kept == list(range(1, len(kept) + 1))
    assert 0 < len(kept) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense",
        gzip.compress(b"nonsense\n"),
        gzip.compress(b'{"created_ns": [1], "sequence": [1, 2], "group": [0], "name": [0], '
                      b'"groups": ["0"], "names": ["x"]}\n'),
        gzip.compress(b'{"created_ns": [1], "sequence": [1], "group": [7], "name": [0], '
                      b'"groups": ["0"], "names": ["x"]}\n'),
    ],
    ids=["no gzip", "no JSON", "uneven columns", "unknown group"],
)  # fmt: skip
def test_a_log_that_makes_no_sense_is_not_captured(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "collectives-00001.json.gz").write_bytes(content)
    oddities = Oddities("collectives")
    assert read_collective_log(tmp_path, oddities) is None
    assert oddities.notes


def test_a_real_job_is_read_after_its_group_is_gone(tmp_path: Path) -> None:
    """Rank 1 sleeps before every collective: its arrivals are later, at the same collectives."""
    body = f"""
    import pathlib
    from stepscope.measure.cluster.flight_recorder import CollectiveLog
    folder = pathlib.Path({str(tmp_path)!r}) / f"rank-{{rank}}"
    folder.mkdir()
    log = CollectiveLog(folder)
    for step in range(8):
        time.sleep(0.02 * rank)
        dist.all_reduce(torch.ones(4))
        log.step_begins(step)
    dist.destroy_process_group()
    log.close(8)
    answer["steps"] = 8
    """
    assert run_ranks(tmp_path, body)
    logs = [
        read_collective_log(tmp_path / f"rank-{rank}", Oddities("collectives")) for rank in (0, 1)
    ]
    assert logs[0] is not None
    assert logs[1] is not None
    reduces = [
        log.created_ns[log.name == log.names.index("gloo:all_reduce")][-8:]
        for log in logs
        if log is not None
    ]
    assert [len(created) for created in reduces] == [8, 8]
    late = sorted((reduces[1] - reduces[0]).tolist())[4]
    assert late > 5_000_000
    assert set(logs[0].sequence[-8:].tolist()) == set(logs[1].sequence[-8:].tolist())


# Clocks of several hosts


@pytest.mark.parametrize(
    ("local", "world", "several"),
    [("4", "4", False), ("4", "8", True), ("", "8", True), ("", "", True)],
)
def test_only_ranks_on_several_hosts_meet(
    monkeypatch: pytest.MonkeyPatch, local: str, world: str, several: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("WORLD_SIZE", world)
    sync = clock_sync.ClockSync()
    assert (sync.next_meeting(5) == 100) is several
    assert (sync.next_meeting(101) == 200) is several
