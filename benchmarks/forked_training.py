"""Workloads of the suite in forked processes: imports once, each way of training by itself.

    with forked("resnet50", "small", "cuda", [Way(), Way(remedies=("tf32",))]) as trainings:
        for training in trainings:
            training.build()
        measure_in_turns(trainings, turns)

The processes are forked before the device is used, so each has its own. They build and train only
when they are told to: one that was not built yet costs nothing, one that waits costs memory. fp32
is fp32 everywhere: torch's own default, tf32 for convolutions, is switched off until a remedy
switches it on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stepscope.bench.catalogue import load
from stepscope.bench.workload import TrainingPlace
from stepscope.fix.begin import begin
from stepscope.measure.hooks import install
from stepscope.measure.patches import surrounds, when_imported
from stepscope.measure.session.session import Session
from stepscope.measure.session.trial import TrialLog
from stepscope.measure.settings import Settings
from stepscope.measure.steps.step_times import Anchor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from library_turn import Turns
    from stepscope.bench.results import PredictedPeak

SEED = 0
FIRST = 3  # steps that build what later ones keep; with torch.compile, most of the time
HOST_THREADS = 4  # of a process whose model trains on a GPU
BLOCK_S, LEAST_BLOCK, LARGEST_BLOCK = 0.2, 3, 40  # of one block of steps
LEAST_PLAIN, LARGEST_PLAIN, PLAIN_S = 12, 40, 1.0  # captured steps before a window, and their time


class TrainingFailedError(Exception):
    """A training raised; the message is its last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a workload is trained."""

    remedies: tuple[str, ...] = ()  # as --with has them
    batches: int = 1  # times the size's batch
    optimizer: dict[str, Any] = field(default_factory=dict)  # arguments of every optimizer
    graph: bool = False  # the step is captured once as a CUDA graph and replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is captured, in the workload's steps: some plain ones, then those under the profiler.

    It begins where `capture` is called: the steps before it, which may have shared the device or
    waited for it, are no part of the run."""

    folder: Path
    wait: int
    warmup: int = 2
    active: int = 3
    per_step: int = 1  # steps that capture sees, for each of the workload's

    @property
    def steps(self) -> int:
        """From the first captured step to the last one under the profiler."""
        return self.wait + self.warmup + self.active


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """What is known once a training is built."""

    batch: int
    device: str
    captured_per_step: int  # by the rule that capture has for optimizers that take turns
    not_applied: str | None  # why the last remedy of the way changed nothing


class ForkedTraining:
    """The near end of one process."""

    def __init__(self, process: int, line: Connection) -> None:
        self.process, self._line = process, line

    def build(self) -> None:
        """And the first steps."""
        self._ask("build")

    def capture(self, window: Window) -> range:
        """From the next step on. The numbers of the steps that will be traced."""
        traced: range = self._ask("capture", window)
        return traced

    def train(self, steps: int) -> float:
        """Seconds, with the device waited for at both ends."""
        return float(self._ask("train", steps))

    def synced(self, steps: int) -> list[tuple[float, dict[str, float]]]:
        """Of each step: its seconds, with the device waited for, and the host's by phase."""
        found: list[tuple[float, dict[str, float]]] = self._ask("synced", steps)
        return found

    def peak_bytes(self) -> int | None:
        """The allocator's, since the first steps; None without one."""
        peak: int | None = self._ask("peak_bytes")
        return peak

    def predicted_peak(self) -> PredictedPeak:
        """As `stepscope bench` knows it before a run. To be asked instead of `build`."""
        peak: PredictedPeak = self._ask("predicted_peak")
        return peak

    def device_bytes(self) -> int | None:
        """All memory of the device; None for a host."""
        size: int | None = self._ask("device_bytes")
        return size

    def profile(self, file: Path, steps: int) -> None:
        """Write a trace of so many steps."""
        self._ask("profile", file, steps)

    def flops(self, numbers: Sequence[int]) -> list[int]:
        """Torch's own count of these steps. Trains them."""
        counted: list[int] = self._ask("flops", numbers)
        return counted

    def facts(self) -> TrainingFacts:
        facts: TrainingFacts = self._ask("facts")
        return facts

    def close(self) -> None:
        """End the capture and the process."""
        with contextlib.suppress(OSError, EOFError, TrainingFailedError):
            self._ask("close")
        self._line.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process, 0)

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            self._line.send((what, arguments))
            is_answer, answer = self._line.recv()
        except (EOFError, OSError):
            raise TrainingFailedError("its process ended") from None
        if not is_answer:
            raise TrainingFailedError(answer)
        return answer


@contextlib.contextmanager
def forked(
    name: str, size: str, device: str, ways: Sequence[Way]
) -> Iterator[tuple[ForkedTraining, ...]]:
    """One process for each way. Call it before anything uses the device or torch's threads."""
    lines: list[Connection] = []
    trainings: list[ForkedTraining] = []
    for way in ways:
        near, far = Pipe()
        lines.append(near)
        process = os.fork()
        if process == 0:
            # An end that a sister holds open would never tell that this process's parent is gone.
            for line in lines:
                line.close()
            _serve(far, name, size, device, way)
        far.close()
        trainings.append(ForkedTraining(process, near))
    try:
        yield tuple(trainings)
    finally:
        for training in trainings:
            training.close()


def measure_in_turns(
    trainings: Sequence[ForkedTraining], turns: Turns, rounds: int
) -> list[list[float]]:
    """Milliseconds a step of each training's blocks, with the device to themselves: in each round
    every training has one block, forwards and backwards in turn, so that drift hits all alike."""
    found: list[list[float]] = [[] for _ in trainings]
    with turns.alone():
        lengths = [_block_length(training.train(2) / 2) for training in trainings]
        for number in range(rounds):
            order = range(len(trainings))
            for place in order if number % 2 == 0 else reversed(order):
                seconds = trainings[place].train(lengths[place])
                found[place].append(seconds / lengths[place] * 1e3)
    return found


def plain_steps(step_s: float) -> int:
    """How many to capture before the window."""
    return min(LARGEST_PLAIN, max(LEAST_PLAIN, round(PLAIN_S / max(step_s, 1e-6))))


def _block_length(step_s: float) -> int:
    return min(LARGEST_BLOCK, max(LEAST_BLOCK, round(BLOCK_S / max(step_s, 1e-6))))


def middle(blocks_ms: Sequence[float]) -> float:
    """The median of the blocks."""
    return statistics.median(blocks_ms)


def larger_batch(values: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Settings for a batch so many times as large. As many samples lie ready on the device as
    before, in fewer batches: whoever changes the batch does not change the data."""
    changes = {"batch": values["batch"] * times}
    if "batches" in values:
        changes["batches"] = max(1, values["batches"] // times)
    return changes


# In the forked process


def _serve(line: Connection, name: str, size: str, device: str, way: Way) -> None:
    """Answer until the other end is gone. Never returns."""
    code = 0
    training = _Training(name, size, device, way)
    try:
        while True:
            what, arguments = line.recv()
            try:
                answer = (True, getattr(training, what)(*arguments))
            except Exception as error:
                answer = (False, _last_line(error))
            line.send(answer)
            if what == "close":
                break
    except (EOFError, OSError):
        code = 1
    finally:
        os._exit(code)  # nothing of the parent's is ended twice


def _last_line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


class _Training:
    """What the near end asks for, done here."""

    def __init__(self, name: str, size: str, device: str, way: Way) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._workload, self._device, self._way = load(name), torch.device(device), way
        self._size = size
        changes = larger_batch(self._workload.sizes[size], way.batches)  # type: ignore[index]
        self._config = self._workload.config(size, changes)  # type: ignore[arg-type]
        self._session: Session | None = None
        self._number = 0
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        if self._device.type == "cuda":  # many processes make their models on the host's cores
            torch.set_num_threads(HOST_THREADS)

    def build(self) -> None:
        changed = begin(self._way.remedies, when_imported, surrounds, watch=False)
        self._changed = changed
        if arguments := self._optimizer_arguments():
            changed.training.before_building(
                "optimizer", lambda made: made.arguments.update(arguments)
            )
        torch.manual_seed(SEED)
        self._step = self._workload.build(self._config, TrainingPlace(self._device, seed=SEED))
        if self._way.graph:
            self._step = _graphed(self._step)
        with _captured_steps() as ended:
            self.train(FIRST)
        self._captured = sum(ended)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _optimizer_arguments(self) -> dict[str, Any]:
        capturable = {"capturable": True} if self._way.graph else {}
        return {**self._way.optimizer, **capturable}

    def capture(self, window: Window) -> range:
        settings = Settings(
            folder=str(window.folder),
            wait=window.wait * window.per_step,
            warmup=window.warmup * window.per_step,
            active=window.active * window.per_step,
            sample_hz=0,
            remedies=self._way.remedies,
        )
        trial = TrialLog(self._changed, 0, keep_losses=False) if settings.remedies else None
        self._session = Session(settings, trial=trial, from_outside=trial is not None)
        install(self._session)
        first = self._number + window.wait + window.warmup
        return range(first, first + window.active)

    def train(self, steps: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            self._step(self._number)
            self._number += 1
        self._wait()
        return time.perf_counter() - began

    def synced(self, steps: int) -> list[tuple[float, dict[str, float]]]:
        found = []
        with _host_phases() as spent:
            for _ in range(steps):
                self._wait()
                before, began = dict(spent), time.perf_counter()
                self._step(self._number)
                self._number += 1
                host_s = time.perf_counter() - began
                self._wait()
                phases = {name: spent[name] - before[name] for name in spent}
                phases["forward"] = host_s - sum(phases.values())
                found.append((time.perf_counter() - began, phases))
        return found

    def profile(self, file: Path, steps: int) -> None:
        warmup = 2
        plan = torch.profiler.schedule(wait=0, warmup=warmup, active=steps)
        with torch.profiler.profile(
            schedule=plan,
            record_shapes=True,
            on_trace_ready=lambda found: found.export_chrome_trace(str(file)),
        ) as profiler:
            for _ in range(warmup + steps):
                self._step(self._number)
                self._number += 1
                profiler.step()

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None

    def predicted_peak(self) -> PredictedPeak:
        from stepscope.bench.predict_peak import predict
        from stepscope.bench.results import PeakRequest

        changes = {"batch": str(self._config.batch)}
        request = PeakRequest(name=self._workload.name, size=self._size, changes=changes)
        return predict(request, self._device)

    def device_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info()[1]) if self._device.type == "cuda" else None

    def flops(self, numbers: Sequence[int]) -> list[int]:
        from torchs_flops import count_flops

        return count_flops(self._step, numbers)

    def facts(self) -> TrainingFacts:
        is_cuda = self._device.type == "cuda"
        asked = self._way.remedies[-1:]  # what tells this way from others
        idle = [
            remedy["refused"] or "nothing to change"
            for remedy in self._changed.content()
            if remedy["id"] in asked and (remedy["refused"] or not remedy["did"])
        ]
        return TrainingFacts(
            batch=self._config.batch,
            device=torch.cuda.get_device_name() if is_cuda else "CPU",
            captured_per_step=max(1, round(self._captured / FIRST)),
            not_applied=idle[0] if idle else None,
        )

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def _captured_steps() -> Iterator[list[int]]:
    """How many steps capture would end at each optimizer's step, meanwhile."""
    anchor, ended = Anchor(), []

    def stepped(optimizer: Any, *_: Any) -> None:
        ended.append(anchor.ends_steps(optimizer))

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield ended
    finally:
        hook.remove()


@contextlib.contextmanager
def _host_phases() -> Iterator[dict[str, float]]:
    """Seconds that the host spends in backward and in optimizers, meanwhile."""
    spent, began = {"backward": 0.0, "optimizer": 0.0}, [0.0]
    backward = torch.autograd.backward

    def timed(*args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        backward(*args, **kwargs)
        spent["backward"] += time.perf_counter() - start

    def begins(*_: Any) -> None:
        began[0] = time.perf_counter()

    def ends(*_: Any) -> None:
        spent["optimizer"] += time.perf_counter() - began[0]

    hooks = (register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends))
    torch.autograd.backward = timed
    try:
        yield spent
    finally:
        torch.autograd.backward = backward
        for hook in hooks:
            hook.remove()


def _graphed(step: Any) -> Any:
    """Replays one step, always with the same batch."""
    torch.set_autocast_cache_enabled(False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(0)

    def replayed(_number: int, _held: object = step) -> Any:  # its tensors outlive the capture
        graph.replay()
        return loss

    return replayed
