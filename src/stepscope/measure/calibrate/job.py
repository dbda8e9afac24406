"""Join the other ranks, measure everything, leave."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.errors import UsageError
from stepscope.measure.calibrate.ceilings import measure_ceilings
from stepscope.measure.calibrate.collective_algorithms import LostRankError, short_reason
from stepscope.measure.calibrate.collectives import (
    Buffers,
    ContentionTimer,
    KindSweeper,
    NotOfferedError,
    elements,
    gather_hosts,
    make_groups,
)
from stepscope.measure.calibrate.laboratory import Laboratory
from stepscope.measure.machine import free_host_bytes
from stepscope.records.processors import processor_name

if TYPE_CHECKING:
    from stepscope.measure.calibrate.settings import CalibrationSettings

    Progress = Callable[[str, float], None]  # what is being measured, share of all that is done

SCHEMA = 1
_JOIN_WITHIN = datetime.timedelta(minutes=10)
_COPIES_IN_FLIGHT = 6  # our two buffers, and the backends' own
# Probes have six chunks of the vector's size, in two buffers; scratch space.
_LABORATORY_COPIES = 20


def is_launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def measure(settings: CalibrationSettings, progress: Progress) -> dict[str, Any] | None:
    """Everything measured, on rank 0; None on the other ranks."""
    device = _own_device()
    if settings.algorithms and not is_launched():
        raise UsageError(
            "collectives need at least 2 ranks, and this is the only one: use --ranks N, or "
            "torchrun --nproc-per-node=N"
        )
    if not is_launched():
        progress("machine", 0.0)
        return _facts(device, None) | {
            "machine": measure_ceilings(device, quick=settings.quick),
            "sweeps": [],
            "not_offered": [],
        }
    backend = _backend(settings, device)
    dist.init_process_group(
        backend, timeout=_JOIN_WITHIN, device_id=device if backend == "nccl" else None
    )
    try:
        return _measure_together(settings, progress, device, backend)
    finally:
        dist.destroy_process_group()


def _measure_together(
    settings: CalibrationSettings, progress: Progress, device: torch.device, backend: str
) -> dict[str, Any] | None:
    first = dist.get_rank() == 0
    # gloo carries tensors of the host whatever else the machine has.
    carrier = device if backend != "gloo" else torch.device("cpu")
    dist.barrier()
    machine = None
    if settings.algorithms:
        laboratory = Laboratory(carrier, backend, gather_hosts())
        sizes = _sizes_that_fit(settings.sizes(), carrier, copies=_LABORATORY_COPIES)
        try:
            measured = laboratory.run(settings, sizes, progress)
        except RuntimeError as error:  # from a barrier: gloo and NCCL raise nothing more precise
            raise LostRankError(
                "another rank ended or stopped answering while algorithms were measured "
                f"({short_reason(error)})"
            ) from None
        return _facts(device, backend) | measured if dist.get_rank() == 0 else None
    if first:
        progress("machine", 0.0)
        machine = measure_ceilings(device, quick=settings.quick)
    dist.barrier()
    hosts = len(set(gather_hosts()))
    sweeps, refused, contention = _sweep_all(settings, progress, carrier, backend)
    if not first:
        return None
    return _facts(device, backend) | {
        "hosts": hosts,
        "machine": machine,
        "sweeps": sweeps,
        "not_offered": refused,
        "contention": contention,
    }


def _sweep_all(
    settings: CalibrationSettings, progress: Progress, device: torch.device, backend: str
) -> tuple[list[dict[str, Any]], list[dict[str, str]], list[dict[str, Any]]]:
    sweeps: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    groups = make_groups()
    sizes = _sizes_that_fit(settings.sizes(), device)
    buffers = Buffers.allocate(max(elements(sizes[-1], group.size) for group in groups), device)
    pairs = [(group, kind) for group in groups for kind in settings.kinds]
    whole = 1 + len(pairs)
    for number, (group, kind) in enumerate(pairs, start=1):
        sweeper = KindSweeper(kind=kind, group=group, buffers=buffers, device=device)

        def shown(share: float, number: int = number, what: str = f"{kind}, {group.name}") -> None:
            progress(what, (number + share) / whole)

        shown(0.0)
        try:
            sweeps.append(sweeper.run(sizes, settings.budget_ns, settings.seed, shown))
        except NotOfferedError as error:
            what = {"kind": kind, "group": group.name, "backend": backend}
            refused.append({**what, "why": str(error)})
    contention: list[dict[str, Any]] = []
    world = groups[0].place
    if device.type == "cpu" and "all_reduce" in settings.kinds and world is not None:
        contention = ContentionTimer(world, buffers).run(sizes[-1], quick=settings.quick)
    return sweeps, refused, contention


def _sizes_that_fit(
    sizes: list[int], device: torch.device, *, copies: int = _COPIES_IN_FLIGHT
) -> list[int]:
    """Sizes that fit the rank with the least free memory; never fewer than the smallest two."""
    room = torch.tensor([_free_bytes(device) // copies], device=device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    fitting = [size for size in sizes if size <= int(room)]
    return fitting if len(fitting) > 1 else sizes[:2]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return free_host_bytes() // here


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK") or 0)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(settings: CalibrationSettings, device: torch.device) -> str:
    backend = settings.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise UsageError("--backend nccl: torch finds no CUDA device on this machine")
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise UsageError(f"--backend {backend}: this torch was built without it")
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if backend == "nccl" and ranks_here > torch.cuda.device_count():
        raise UsageError(
            f"nccl needs a GPU for each rank: {ranks_here} ranks, {torch.cuda.device_count()} GPUs "
            "here; start fewer ranks or use --backend gloo"
        )
    return backend


def _facts(device: torch.device, backend: str | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "host": socket.gethostname(),
        "device": _device_name(device),
        "kind": "rocm" if device.type == "cuda" and torch.version.hip else device.type,
        "torch": str(torch.__version__),
        "when_unix": time.time(),
        "world_size": dist.get_world_size() if backend else 1,
        "backend": backend,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name()
