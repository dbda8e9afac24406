"""The collectives laboratory: seven algorithms, the backend's own, and probes of the links,
interleaved over all sizes. Every algorithm is checked against torch before it is timed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepscope.errors import StepscopeError
from stepscope.measure.calibrate.collective_algorithms import (
    Options,
    ScheduleRunner,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from stepscope.measure.calibrate.collectives import (
    Buffers,
    GroupPlace,
    Sweeper,
    SweepLimits,
    SweptTimes,
    actual_bytes,
    elements,
    make_call,
    ranks_by_host,
)
from stepscope.records.collective_schedules import (
    ALGORITHMS,
    COLLECTIVES,
    CollectiveSchedule,
    LinkProbe,
    build_probes,
    build_schedule,
    host_groups,
)

if TYPE_CHECKING:
    from stepscope.measure.calibrate.settings import CalibrationSettings

_PATIENCE = datetime.timedelta(minutes=2)  # for one message
_ODD = 1001  # elements of a check: no number of ranks below 7 divides it
_SMALL_FAN = 4 << 10  # bytes: larger fans measure the rate again
_ELEMENT_BYTES = 4
_LIMITS = SweepLimits(visit_ns=15_000_000, repeats=(2, 15), passes=(3, 12), always_bytes=0)


class Laboratory:
    """One job's ranks; every rank calls the same methods."""

    def __init__(self, device: torch.device, backend: str, hosts: list[str]) -> None:
        self._device, self._backend = device, backend
        self._ranks = dist.get_world_size()
        self._hosts = ranks_by_host(hosts)
        self._groups = host_groups(self._ranks, self._hosts)
        self._group = dist.new_group(list(range(self._ranks)), timeout=_PATIENCE)

    def run(
        self,
        settings: CalibrationSettings,
        sizes: list[int],
        progress: Callable[[str, float], None],
    ) -> dict[str, Any]:
        """Raw times of all algorithms and probes."""
        kinds = [kind for kind in COLLECTIVES if kind in settings.kinds]
        checked = self._check_all()
        probes: list[dict[str, Any]] = []
        algorithms: list[dict[str, Any]] = []
        for place, kind in enumerate(kinds):

            def shown(share: float, place: int = place, kind: str = kind) -> None:
                progress(kind, (place + share) / len(kinds))

            shown(0.0)
            times, contenders = self._sweep(kind, sizes, settings, shown)
            for name, passes in times.passes_ns.items():
                measured = {"kind": kind, "passes_ns": passes}
                if name in contenders:
                    probe = contenders[name]
                    link = {"name": probe.name, "steps": probe.steps}
                    probes.append(measured | link | {"sizes_bytes": times.sizes_bytes})
                else:
                    actual = [actual_bytes(size, self._ranks) for size in times.sizes_bytes]
                    algorithms.append(measured | {"algorithm": name, "sizes_bytes": actual})
        return {
            "hosts": [list(host) for host in self._hosts],
            "groups": [list(group) for group in self._groups],
            "checked": checked,
            "probes": probes,
            "algorithms": algorithms,
        }

    def _sweep(
        self,
        kind: str,
        sizes: list[int],
        settings: CalibrationSettings,
        progress: Callable[[float], None],
    ) -> tuple[SweptTimes, dict[str, LinkProbe]]:
        """Algorithms, the backend's own and probes take turns: what slows one slows all."""
        probes = {
            f"{probe.name} {probe.steps}": probe for probe in build_probes(self._ranks, self._hosts)
        }
        chunks = max(probe.schedule.chunks for probe in probes.values() if probe.name != "fan")
        fan = 2 * self._ranks * _SMALL_FAN // _ELEMENT_BYTES
        room = max(chunks * (sizes[-1] // _ELEMENT_BYTES), fan, elements(sizes[-1], self._ranks))
        buffers = Buffers.allocate(room, self._device)
        place = GroupPlace(
            handle=self._group, ranks=tuple(range(self._ranks)), rank=dist.get_rank()
        )
        contenders: dict[str, Callable[[int], Callable[[], object]]] = {
            name: partial(
                self._run_algorithm,
                build_schedule(name, kind, self._ranks, self._groups),
                buffers.first,
            )
            for name in ALGORITHMS
        }
        contenders[self._backend] = partial(make_call, kind, place, buffers)
        contenders |= {
            name: partial(self._run_probe, probe, buffers.first) for name, probe in probes.items()
        }
        sweeper = Sweeper(contenders, self._device, group=self._group, limits=_LIMITS)
        seed = f"{settings.seed} {kind}"
        return sweeper.run(sizes, settings.budget_ns, seed, progress), probes

    def _run_algorithm(
        self, schedule: CollectiveSchedule, vector: torch.Tensor, size: int
    ) -> Callable[[], object]:
        return self._run_on(schedule, vector[: elements(size, self._ranks)])

    def _run_probe(
        self, probe: LinkProbe, vector: torch.Tensor, message: int
    ) -> Callable[[], object]:
        size = min(message, _SMALL_FAN) if probe.name == "fan" else message
        return self._run_on(
            probe.schedule, vector[: size // _ELEMENT_BYTES * probe.schedule.chunks]
        )

    def _run_on(self, schedule: CollectiveSchedule, vector: torch.Tensor) -> Callable[[], object]:
        runner = ScheduleRunner(schedule, vector, group=self._group, timeout=_PATIENCE)
        return partial(runner.run, vector)

    def _check_all(self) -> int:
        """How many comparisons with torch were made; a difference is a defect of ours."""
        for name in ALGORITHMS:
            # The collectives in which an algorithm and torch differ.
            options = Options(group=self._group, hosts=self._groups, timeout=_PATIENCE)
            rank = dist.get_rank()
            given = torch.arange(_ODD * self._ranks, device=self._device) * (rank + 1)
            summed, odd = given.clone(), given[:_ODD].clone()
            dist.all_reduce(summed, group=self._group)
            all_reduce(odd, name, **options)
            own = torch.empty(_ODD, dtype=given.dtype, device=self._device)
            reduce_scatter(own, given, name, **options)
            everyones = torch.empty_like(given)
            torchs = [torch.empty_like(own) for _ in range(self._ranks)]
            all_gather(everyones, given[:_ODD].clone(), name, **options)
            dist.all_gather(torchs, given[:_ODD].clone(), group=self._group)
            same = {
                "all_reduce": torch.equal(odd, summed[:_ODD]),
                "reduce_scatter": torch.equal(own, summed[rank * _ODD : (rank + 1) * _ODD]),
                "all_gather": torch.equal(everyones, torch.cat(torchs)),
            }
            wrong = [kind for kind, right in same.items() if not right]
            if wrong:
                raise StepscopeError(
                    f"{name} over {self._ranks} ranks differs from torch in {', '.join(wrong)}: "
                    "please report this"
                )
        return len(ALGORITHMS) * len(COLLECTIVES)
