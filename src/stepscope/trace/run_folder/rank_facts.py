"""rank.json: a rank's facts about itself, its machine and how the job is spread over its ranks.

Readers get plain dictionaries with the names that capture writes. Every value has the type and
range that its name promises; values that were not written, or make no sense, are missing.
"""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from stepscope.records.folders import ProcessIdentity
from stepscope.records.quality import Bytes, Count, DurationNs, RankNumber, Ranks, StampNs
from stepscope.records.rank_facts import (
    DataFacts,
    HostLoad,
    HostStepTimes,
    NetworkPlace,
    OptimizerLine,
)
from stepscope.records.run import AppliedRemedy
from stepscope.trace.decode import Oddities, read_record

RANK = "rank.json"
_MOST_MEMBERS = 1 << 20


class CapturedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of communication.groups."""

    name: str = ""
    description: str = ""
    backend: str = ""
    size: Ranks | None = None
    rank: RankNumber | None = None
    ranks: list[RankNumber] = []
    ranges: list[tuple[RankNumber, RankNumber, Ranks]] = []  # first, last, distance

    def members(self) -> list[int]:
        """All ranks of the group; large groups are written as ranges."""
        each = (range(first, last + 1, distance) for first, last, distance in self.ranges)
        return sorted({*self.ranks, *islice(chain.from_iterable(each), _MOST_MEMBERS)})


class CapturedBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients that DDP reduces together."""

    size_bytes: Bytes | None = None
    parameters: list[str] | None = None


class CapturedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of communication.ddp."""

    index: Count | None = None
    module: str | None = None
    group: str = ""
    world_size: Ranks | None = None
    comm_hook: str | None = None
    parameters: Count | None = None
    parameter_bytes: Bytes | None = None
    unused_parameter_bytes: Bytes | None = None
    bucket_cap_bytes: Bytes | None = None
    buckets_rebuilt: bool | None = None
    buckets: list[CapturedBucket] = []
    grad_ready_order: list[Count] = []
    gradient_as_bucket_view: bool | None = None
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    broadcast_buffers: bool | None = None
    iteration: Count | None = None
    average_forward_ns: DurationNs | None = None
    average_backward_ns: DurationNs | None = None
    average_comm_ns: DurationNs | None = None
    average_overlap_ns: DurationNs | None = None


class CapturedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of communication.placements. Older captures have no groups."""

    mesh: list[str] = []
    shape: list[Ranks] = []
    groups: list[str] | UnsetType = UNSET
    placements: list[str] = []
    count: Count = 0


class CapturedStage(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of communication.pipeline_stages."""

    stage: RankNumber
    stages: Ranks | None = None


class CapturedTraining(msgspec.Struct, frozen=True, kw_only=True):
    """communication.trained."""

    tensors: Count | None = None
    size_bytes: Bytes | None = None
    shared_tensors: Count | None = None


class CapturedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the job is spread over its ranks."""

    groups: list[CapturedGroup] | UnsetType | None = UNSET
    ddp: list[CapturedReplica] | UnsetType | None = UNSET
    placements: list[CapturedPlacement] | UnsetType | None = UNSET
    trained: CapturedTraining | UnsetType | None = UNSET
    rpc: bool | UnsetType | None = UNSET
    libraries: list[str] | UnsetType | None = UNSET
    fsdp_modules: dict[str, Count] | UnsetType | None = UNSET
    pipeline_stages: list[CapturedStage] | UnsetType | None = UNSET
    nccl_version: str | UnsetType | None = UNSET
    flight_recorder: dict[str, Count] | UnsetType | None = UNSET
    notes: list[str] | UnsetType | None = UNSET


class CapturedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The accelerator that the rank trains on."""

    index: Count | UnsetType = UNSET
    name: str | UnsetType | None = UNSET
    memory_bytes: Bytes | UnsetType | None = UNSET
    multiprocessors: Count | UnsetType = UNSET


class CapturedStartUp(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank did before its first step."""

    began_unix_ns: StampNs | None = None  # our code was loaded
    torch_unix_ns: StampNs | None = None  # torch had been imported
    group_ns: DurationNs = 0  # inside init_process_group
    first_batch_unix_ns: StampNs | None = None


class CapturedEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank did after its last step."""

    evaluation_ns: DurationNs = 0
    checkpoint_ns: DurationNs = 0
    between_epochs_ns: DurationNs = 0


class CapturedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the rank was chosen for a trace, and by which rule."""

    chosen: bool = True
    ranks: str = ""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that capture writes into rank.json."""

    schema: Count | UnsetType = UNSET
    rank: RankNumber | UnsetType | None = UNSET
    world_size: Ranks | UnsetType | None = UNSET
    status: str | UnsetType = UNSET
    steps: Count | UnsetType = UNSET
    steps_end_with: str | UnsetType | None = UNSET
    skipped: Count | UnsetType = UNSET
    argv: list[str] | UnsetType | None = UNSET
    problems: list[str] | UnsetType = UNSET
    host: str | UnsetType | None = UNSET
    network_place: NetworkPlace | UnsetType | None = UNSET
    pid: Count | UnsetType | None = UNSET
    process: ProcessIdentity | UnsetType | None = UNSET
    python: str | UnsetType | None = UNSET
    torch: str | UnsetType | None = UNSET
    math: dict[str, bool] | UnsetType | None = UNSET
    host_steps: list[HostStepTimes] | UnsetType | None = UNSET
    optimizer_lines: list[OptimizerLine] | UnsetType | None = UNSET
    cuda: str | UnsetType | None = UNSET
    hip: str | UnsetType | None = UNSET
    device: CapturedDevice | str | UnsetType | None = UNSET
    communication: CapturedLayout | UnsetType | None = UNSET
    host_load: HostLoad | UnsetType | None = UNSET
    start_up: CapturedStartUp | UnsetType | None = UNSET
    after_last_step: CapturedEnd | UnsetType | None = UNSET
    trace: CapturedChoice | UnsetType | None = UNSET
    remedies: list[AppliedRemedy] | UnsetType | None = UNSET
    data: DataFacts | UnsetType | None = UNSET


def decode_facts(folder: Path, oddities: Oddities | None = None) -> RankFacts:
    """Return the facts of a rank's folder; all unset without a rank.json."""
    oddities = oddities or Oddities(RANK)
    facts = read_record(folder / RANK, RankFacts, oddities) or RankFacts()
    rank = folder_rank(folder)
    if rank is not None and facts.rank not in (UNSET, None, rank):
        oddities.add("rank", f"{facts.rank} in the folder {folder.name}")
        return msgspec.structs.replace(facts, rank=rank)
    return facts


def read_facts(folder: Path) -> dict[str, Any]:
    """rank.json of a rank's folder; empty if it was not captured."""
    facts: dict[str, Any] = msgspec.to_builtins(decode_facts(folder))
    return facts


def folder_rank(folder: Path) -> int | None:
    """3 for rank-00003, and for rank-00003.2, a second process that calls itself rank 3."""
    word, _, number = folder.name.partition(".")[0].partition("-")
    return int(number) if word == "rank" and number.isdecimal() and len(number) <= 8 else None
