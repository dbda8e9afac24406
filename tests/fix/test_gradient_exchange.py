"""When gradients are exchanged, pass by pass, with a DDP that only keeps its flags."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stepscope.errors import TrainingStopped
from stepscope.fix.remedies import sync_once
from stepscope.fix.remedies.sync_once import GradientExchange

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class PretendDdp:
    """The flags of DistributedDataParallel, as its forward sets and reads them."""

    def __init__(self) -> None:
        self.static_graph = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._join_config = SimpleNamespace(enable=False)

    def modules(self) -> list[Any]:
        return []

    def forward(self) -> None:
        self.require_forward_param_sync = self.require_backward_grad_sync


class PretendTraining:
    """A training whose events a test makes happen."""

    def __init__(self) -> None:
        self.events: dict[str, Callable[..., Any]] = {}
        self.did: list[str] = []
        self.refused: list[str] = []

    def telling(self) -> Callable[[str], None]:
        return lambda what: self.did.append(what) if what not in self.did else None

    def refusing(self) -> Callable[[str], None]:
        return self.refused.append

    def guarded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        return act

    def when_imported(self, name: str, action: Callable[[Any], None]) -> None:
        """Nothing of torch is replaced here."""

    def after_building(self, _kind: str, act: Callable[..., Any]) -> None:
        self.events["built"] = act

    def __getattr__(self, name: str) -> Callable[[Callable[..., Any]], None]:
        def listen(act: Callable[..., Any]) -> None:
            self.events[name] = act

        return listen


class Job:
    """One DDP and what happened to its gradients: `exchanged` by a pass, or `averaged` by us."""

    def __init__(self, passes: int | None) -> None:
        self.training, self.ddp = PretendTraining(), PretendDdp()
        self.log: list[str] = []
        GradientExchange(self.training, passes)  # type: ignore[arg-type]
        self.training.events["built"](SimpleNamespace(object=self.ddp))

    def one_pass(self) -> None:
        events = self.training.events
        events["around_root"](self.ddp, (), {})
        self.ddp.forward()
        events["before_backward"](None)
        self.log.append("exchanged" if self.ddp.require_forward_param_sync else "kept")
        events["after_backward"]()

    def step(self, passes_inside: int = 0) -> None:
        self.training.events["before_step"](None)
        for _ in range(passes_inside):
            self.one_pass()
        self.training.events["after_step"](None)

    def passes(self, number: int) -> None:
        for _ in range(number):
            self.one_pass()


@pytest.fixture(autouse=True)
def averaged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ddps: list[Any] = []
    monkeypatch.setattr(sync_once, "average_gradients", ddps.append)
    return ddps


def test_the_last_pass_exchanges_what_all_have_added_up(averaged: list[Any]) -> None:
    job = Job(3)
    for _ in range(2):
        job.passes(3)
        job.step()
    assert job.log == ["kept", "kept", "exchanged"] * 2
    assert not averaged
    assert job.ddp.require_backward_grad_sync  # as the script left it


def test_without_a_number_the_first_step_is_left_alone(averaged: list[Any]) -> None:
    job = Job(None)
    for _ in range(2):
        job.passes(2)
        job.step()
    assert job.log == ["exchanged", "exchanged", "kept", "exchanged"]
    assert not averaged


def test_gradients_that_are_used_early_are_averaged_first(averaged: list[Any]) -> None:
    job = Job(4)
    job.passes(2)
    job.training.events["before_clipping"]()
    assert averaged == [job.ddp]
    job.step()
    assert averaged == [job.ddp]  # not twice
    job.passes(4)
    job.step()
    assert job.log[2:] == ["kept", "kept", "kept", "exchanged"]


def test_steps_that_always_come_early_end_it(averaged: list[Any]) -> None:
    job = Job(4)
    for _ in range(3):
        job.passes(2)
        job.step()
    assert job.log == ["kept"] * 4 + ["exchanged"] * 2
    assert len(averaged) == 2
    assert "gradients are exchanged in every pass again" in job.training.did[-1]


def test_a_pass_inside_the_optimizers_step_is_its_last(averaged: list[Any]) -> None:
    """Lightning hands the last pass of a step to the optimizer as a closure."""
    job = Job(3)
    job.passes(2)
    job.step(passes_inside=1)
    assert job.log == ["kept", "kept", "exchanged"]
    assert averaged == [job.ddp]  # before the closure it was not known that another pass comes


def test_what_the_script_switches_off_stays_off(averaged: list[Any]) -> None:
    job = Job(3)
    job.ddp.require_backward_grad_sync = False  # its own no_sync()
    job.passes(2)
    assert not job.ddp.require_backward_grad_sync
    job.ddp.require_backward_grad_sync = True
    job.one_pass()
    job.step()
    assert job.log == ["kept", "kept", "exchanged"]
    assert not averaged
    assert not job.training.did


def test_uneven_inputs_and_static_graphs_are_left_alone(averaged: list[Any]) -> None:
    job = Job(3)
    job.ddp._join_config.enable = True
    job.passes(3)
    assert job.log == ["exchanged"] * 3
    static = PretendDdp()
    static.static_graph = True
    job.training.events["built"](SimpleNamespace(object=static))
    assert job.training.refused == ["DDP does not support no_sync() with a static graph"]
    assert not averaged


def test_gradients_that_cannot_be_averaged_are_never_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_ddp: Any) -> None:
        raise RuntimeError("connection closed")

    monkeypatch.setattr(sync_once, "average_gradients", fail)
    job = Job(3)
    job.one_pass()
    with pytest.raises(TrainingStopped, match=str(TrainingStopped.exit_code)) as stopped:
        job.step()
    assert "connection closed" in stopped.value.why


def run_two(script: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run a script as ranks 0 and 1 of a gloo job."""
    file = folder / "train.py"
    file.write_text(_TWO + script)
    processes = [
        subprocess.Popen(
            [sys.executable, str(file), str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ended


_TWO = """\
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from stepscope.fix.remedies import sync_once
from stepscope.fix.remedies.sync_once import GradientExchange, average_gradients
from stepscope.fix.training_process import TrainingProcess

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=90))
torch.manual_seed(0)
calls = []
"""

_AVERAGED = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)]).double()
        self.single = nn.Linear(3, 3)
        self.some, self.none = nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        y = self.single(self.used(x).float())
        return self.some(y) if rank else y

net = Net()
net.single.weight.data = net.single.weight.data.t()  # not contiguous
ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
torch.manual_seed(rank)
x = torch.randn(4, 3).double()
ddp(x).square().sum().backward()
expected = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
net.zero_grad()
with ddp.no_sync():
    ddp(x).square().sum().backward()
reduce = dist.all_reduce
dist.all_reduce = lambda *args, **kw: (calls.append(args), reduce(*args, **kw))
sync_once._BUCKET_BYTES = 1000
average_gradients(ddp)
for parameter, gradient in zip(net.parameters(), expected):
    assert (parameter.grad is None) == (gradient is None)
    assert gradient is None or torch.allclose(parameter.grad, gradient, rtol=1e-6)
assert net.none.weight.grad is None and net.some.weight.grad is not None
print(len(calls))
"""

_FAILS = """\
import importlib

training = TrainingProcess(
    lambda name, act: act(importlib.import_module(name)), lambda function: function
)
with training.applying("sync-once=4") as applied:
    GradientExchange(training, 4)

def fail(*_args, **_kw):
    raise ValueError("for a test")

ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
if rank:
    FAILS = fail
for _ in range(2):
    ddp(torch.randn(4, 3)).square().sum().backward()
try:
    optimizer.step()
except Exception:
    print("caught")
finally:
    print(applied.refused)
print("trained on")
"""


def test_averaging_takes_one_exchange_for_many_tensors_and_gives_ddps_gradients(
    tmp_path: Path,
) -> None:
    for run in run_two(_AVERAGED, tmp_path):
        assert run.returncode == 0, run.stderr
        # What is used, who failed, two of float64 and one of float32: not one for each of 44.
        assert int(run.stdout) == 5


@pytest.mark.parametrize("fails", ["sync_once._prepared_buckets", "dist.all_reduce"])
def test_one_rank_that_cannot_average_stops_all(tmp_path: Path, fails: str) -> None:
    for run in run_two(_FAILS.replace("FAILS", fails), tmp_path):
        assert run.returncode == TrainingStopped.exit_code, run.stderr
        assert "the training was stopped: sync-once could not average gradients" in run.stderr
        assert run.stdout.startswith("sync-once could not average")  # what rank.json will say
        assert "trained on" not in run.stdout
        assert "caught" not in run.stdout
