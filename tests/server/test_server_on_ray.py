"""The parameter server on a real Ray cluster of this machine: real processes, really killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from server_event_lines import event_from
from stepscope.errors import UsageError
from stepscope.fix.server import ParameterServer, ServerConnection
from stepscope.fix.server.membership import (
    ClockClosed,
    MemberChange,
    Pull,
    Push,
    ShardRestored,
    UpdateApplied,
)
from stepscope.fix.server.messages import ReportShard

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 8


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    folder = str(Path(__file__).parent)
    paths = os.pathsep.join([folder, *sys.path])
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        namespace="stepscope",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


def small_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return (model(inputs) - inputs[:, :2]).square().mean()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def plain_training(workers: int) -> dict[str, torch.Tensor]:
    model = small_model()
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(workers):
            loss_of(model, rank, step).backward()  # adds up in order of rank
        for parameter in model.parameters():
            parameter.grad /= workers
        optimizer.step()
    return model.state_dict()


class Trainer:
    """A Ray actor with an ordinary loop."""

    def train(self, server: ServerConnection, rank: int, steps: int, pause_s: float) -> int:
        torch.set_num_threads(1)
        model = small_model()
        optimizer = server.wrap(model, adam(model), rank)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            time.sleep(pause_s)
        clock = optimizer.worker.clock
        optimizer.close()
        return clock


def events(run: Path, kind: type) -> list[Any]:
    lines = [
        json.loads(line)
        for file in sorted((run / "together").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [event for line in lines if type(event := event_from(line)) is kind]


def primary(ray: Any, server: ServerConnection, shard: int) -> Any:
    """Where it is served; asking for an epoch that is long gone changes nothing."""
    report = ReportShard(shard=shard, epoch=0, dead=False)
    return ray.get(server._its_actor().answer.remote(report)).routes[shard].address


def start(ray: Any, server: ServerConnection, workers: int, steps: int, pause_s: float) -> list:
    trainer = ray.remote(Trainer)
    actors = [trainer.options(num_cpus=0).remote() for _ in range(workers)]
    return [
        (actor, actor.train.remote(server, rank, steps, pause_s))
        for rank, actor in enumerate(actors)
    ]


def test_strong_training_equals_plain_training_though_a_shard_is_killed(ray, tmp_path) -> None:
    model = small_model()
    with ParameterServer(
        model, optimizer=adam(model), replicas=1, consistency="strong", workers=2, run=tmp_path
    ) as server:
        jobs = start(ray, server, 2, STEPS, 0.3)
        while len(events(tmp_path, ClockClosed)) < 3:
            time.sleep(0.1)
        ray.kill(primary(ray, server, 0))
        ray.get([job for _, job in jobs])
        served = server.state_dict()
    expected = plain_training(2)
    assert all(torch.equal(served[name], one) for name, one in expected.items())
    (restored,) = events(tmp_path, ShardRestored)
    assert (restored.source, restored.lost) == ("replica", ())
    assert {one.gap for one in events(tmp_path, Pull)} == {0}
    pushes = events(tmp_path, Push)
    assert sorted((one.worker, one.clock) for one in pushes) == [
        (rank, clock) for rank in range(2) for clock in range(STEPS)
    ]
    assert all(one.compute_ns > 0 and one.size_bytes > 0 for one in pushes)


def test_a_killed_worker_is_evicted_and_the_others_go_on(ray, tmp_path) -> None:
    model = small_model()
    with ParameterServer(
        model,
        optimizer=adam(model),
        shards=1,
        consistency="bounded:1",
        workers=2,
        run=tmp_path,
        worker_deadline_s=4.0,
    ) as server:
        (_, survivor), (victim, _) = start(ray, server, 2, 40, 0.2)
        while not any(one.worker == 1 for one in events(tmp_path, Push)):
            time.sleep(0.1)
        ray.kill(victim)
        assert ray.get(survivor) == 40
        with server.worker(rank=1) as again:
            again.pull()
            assert again.clock > 1
            loss_of(model, 1, 0).backward()
            assert again.push()
    changes = [(one.change, one.worker, one.life) for one in events(tmp_path, MemberChange)]
    assert ("evicted", 1, 0) in changes
    assert ("joined", 1, 1) in changes
    assert max(one.gap for one in events(tmp_path, Pull)) <= 1
    applied = [(one.clock, *one.members) for one in events(tmp_path, UpdateApplied)]
    assert len(applied) == len(set(applied))
    acked = {(one.clock, f"{one.worker}.{one.life}") for one in events(tmp_path, Push)}
    assert acked <= set(applied)


def test_a_shard_without_replica_resumes_from_its_checkpoint(ray, tmp_path) -> None:
    model = small_model()
    options = {"optimizer": adam(model), "shards": 2, "consistency": "eventual"}
    with ParameterServer(model, checkpoint=tmp_path / "cuts", run=tmp_path, **options) as server:
        with server.worker() as worker:
            for step in range(6):
                worker.pull()
                loss_of(model, 0, step).backward()
                worker.push(step)
                if step == 2:
                    server.checkpoint()
            ray.kill(primary(ray, server, 1))
            worker.pull()
        after = server.state_dict()
        server.checkpoint()
    (restored,) = events(tmp_path, ShardRestored)
    assert restored.source == "checkpoint"
    assert [(one.member, one.first, one.last) for one in restored.lost] == [("0.0", 3, 5)]
    with ParameterServer(model, checkpoint=tmp_path / "cuts", **options) as server:
        resumed = server.state_dict()
    assert all(torch.equal(resumed[name], one) for name, one in after.items())


@pytest.mark.parametrize("compression", ["bf16", "top-k:0.1"])
def test_compressed_gradients_train(ray, tmp_path, compression: str) -> None:
    model = small_model()
    losses = []
    with (
        ParameterServer(
            model, optimizer=adam(model), shards=1, compression=compression, run=tmp_path
        ) as server,
        server.worker() as worker,
    ):
        for _ in range(80):
            worker.pull()
            loss = loss_of(model, 0, 0)
            loss.backward()
            worker.push(loss=loss.item())
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    plain = sum(one.numel() * 4 for one in model.parameters())
    assert all(one.size_bytes < 0.6 * plain for one in events(tmp_path, Push))


def test_wrong_use_is_said_in_a_sentence(ray) -> None:
    model = small_model()
    with ParameterServer(model, optimizer=adam(model), shards=1) as server:
        with pytest.raises(UsageError, match="which this worker's model lacks"):
            server.worker(torch.nn.Linear(2, 2)).join()
        with server.worker() as worker, pytest.raises(UsageError, match="without pull"):
            worker.push()
        gone = ServerConnection("no-such-server")
        with pytest.raises(UsageError, match='no parameter server named "no-such-server"'):
            gone.worker(model)


SCRIPT = """
import os, sys, torch
from stepscope.fix.server import ParameterServer
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
server = ParameterServer(model, optimizer=optimizer, shards=1, address="local", replicas=1)
import ray
print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
with server.worker() as worker:
    worker.pull()
    model(torch.ones(2, 3)).sum().backward()
    assert worker.push()
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
server.close()
"""


@pytest.mark.parametrize("end", ["close", "die"])
def test_nothing_stays_behind(tmp_path: Path, end: str) -> None:
    """Neither after a clean end nor after the driver is killed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, end], stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == (-signal.SIGKILL if end == "die" else 0)
    session = Path(done.stdout.strip().splitlines()[-1]).name
    deadline = time.monotonic() + 90
    while (left := processes_of(session)) and time.monotonic() < deadline:
        time.sleep(1)
    assert left == []


def processes_of(session: str) -> list[str]:
    """Command lines of living processes that name this session of Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            surroundings = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if session in line or session in surroundings:
            found.append(line[:200])
    return found
