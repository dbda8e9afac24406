"""How a job is spread over its ranks: one record a strategy, of one rank and of the job.

Times are integer nanoseconds, means a step; shares are of the step. What is not known is None.
A rank's record (`Rank...`) is made where its trace is; the job's is joined from all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from stepscope.records.job import Group

Flavour = Literal["FSDP1", "FSDP2", "ZeRO"]
Phase = Literal["forward", "backward"]
Operation = Literal["gather", "scatter", "all_reduce"]
Why = Literal[
    "hidden",  # it is not exposed
    "last",  # nothing left to hide it
    "queued",  # it began late, behind an earlier bucket
    "long",  # it takes longer than the compute that is left
    "late rank",  # the others had come, one had not
    "gaps",  # compute pauses while it runs
]
Schedule = Literal["fill and drain", "one forward one backward", "interleaved"]


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce of gradients. Times count from the start of backward."""

    index: int
    size_bytes: int | None
    parameters: tuple[str, ...] = ()
    ready_ns: int | None  # its last gradient is there
    start_ns: int | None
    end_ns: int | None
    time_ns: int
    exposed_ns: int
    why: Why
    wait_ns: int | None = None  # for the last rank to come; joined only
    late_rank: int | None = None  # most often the last to come; joined only


class RankDataParallel(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="data_parallel"
):
    """Replicas that sum their gradients, as one rank sees them."""

    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    backward_ns: int | None
    comm_ns: int
    exposed_ns: int
    steps: tuple[int, ...]  # their numbers; steps that reduce nothing are left out
    buckets: tuple[Bucket, ...]
    arrivals_ns: tuple[tuple[int, ...], ...] = ()  # steps x buckets, on the rank's own clock


class DataParallel(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="data_parallel"
):
    """Replicas that sum their gradients; times are means over the ranks."""

    ranks: tuple[int, ...]
    size: int | None  # replicas
    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    backward_ns: int | None
    comm_ns: int
    exposed_ns: int
    exposed_share: float
    buckets: tuple[Bucket, ...]


class ShardedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of communication of one sharded block; the root's name is "(root)"."""

    name: str
    operation: Operation
    phase: Phase
    count: float  # a step
    size_bytes: int | None  # of one
    time_ns: int
    exposed_ns: int
    lead_ns: int | None = None  # gathers: began so long before the compute in front of it ended
    prefetched: bool | None = None


class ShardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the formula says against what was measured, on one rank."""

    parameters: int  # of the whole model, as gathered (padding included)
    shards: int
    bytes_per_parameter: tuple[float, ...]  # stages 0 to 3, mixed-precision Adam
    formula_bytes: tuple[int, ...]  # the same times parameters
    measured_parameter_bytes: int | None = None  # at rest, between steps
    measured_gradient_bytes: int | None = None
    measured_optimizer_bytes: int | None = None

    @property
    def measured_bytes(self) -> int | None:
        parts = (
            self.measured_parameter_bytes,
            self.measured_gradient_bytes,
            self.measured_optimizer_bytes,
        )
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


class RankFullySharded(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="fully_sharded"
):
    """Sharded parameters, gathered where they are needed, as one rank sees them."""

    flavour: Flavour
    stage: int  # of ZeRO: 3 gathers inside the step, 2 scatters gradients, 1 neither
    groups: tuple[Group, ...]  # that shard
    replicate_groups: tuple[Group, ...]  # that replicate the shards
    evidence: tuple[str, ...]
    step_ns: int
    comm_ns: int
    exposed_ns: int
    blocks: tuple[ShardedBlock, ...]
    prefetched_share: float | None  # of gathers, the first of a phase left out
    memory: ShardMemory | None = None


class FullySharded(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="fully_sharded"
):
    """Sharded parameters, gathered where they are needed; times are means over the ranks."""

    flavour: Flavour
    stage: int
    ranks: tuple[int, ...]
    size: int | None  # shards
    replicas: int | None  # of every shard
    groups: tuple[Group, ...]
    replicate_groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    comm_ns: int
    exposed_ns: int
    exposed_share: float
    blocks: tuple[ShardedBlock, ...]
    prefetched_share: float | None
    memory: ShardMemory | None  # of the rank that holds most


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Communication inside one module."""

    name: str
    forward_count: float  # a step
    backward_count: float
    time_ns: int
    exposed_ns: int


class RankTensorParallel(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tensor_parallel"
):
    """Layers split over ranks that meet inside forward and backward, as one rank sees them."""

    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    forward_count: float  # collectives a step
    backward_count: float
    size_bytes: int | None  # a step
    comm_ns: int
    exposed_ns: int
    split_parameters: int | None  # as the capture counted them; None for a bare trace
    layers: tuple[Layer, ...] = ()


class TensorParallel(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tensor_parallel"
):
    """Layers split over ranks that meet inside forward and backward; means over the ranks."""

    ranks: tuple[int, ...]
    size: int | None
    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    forward_count: float
    backward_count: float
    size_bytes: int | None
    comm_ns: int
    comm_share: float
    exposed_ns: int
    exposed_share: float
    split_parameters: int | None
    layers: tuple[Layer, ...]


class RankPipeline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pipeline"):
    """One rank's place in a pipeline. step = compute + other_comm + bubble."""

    stage_indices: tuple[int, ...]  # empty for a bare trace
    stages: int | None
    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    compute_ns: int
    other_comm_ns: int  # communication of other strategies that nothing hides
    bubble_ns: int
    receive_wait_ns: int  # the part of the bubble inside receives
    microbatches: int | None  # as annotated
    receives: float  # a step; those without compute in between count once
    late_forward_share: float  # of forward compute, what runs after backward has begun
    annotated: bool  # the schedule names its micro-batches


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage (of an interleaved schedule: what one rank holds); means over its ranks."""

    stage_indices: tuple[int, ...]
    ranks: tuple[int, ...]
    step_ns: int
    compute_ns: int
    other_comm_ns: int
    bubble_ns: int
    bubble_share: float
    receive_wait_ns: int


class Pipeline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pipeline"):
    """A pipeline, its stages in order."""

    ranks: tuple[int, ...]
    size: int  # ranks in a pipeline
    replicas: int
    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    schedule: Schedule | None
    microbatches: int | None
    stages: tuple[Stage, ...]
    bubble_share: float  # mean over the stages
    bound_share: float | None  # (p-1)/(m+p-1): what the schedule costs at the least
    imbalance: float  # the longest stage's compute over the mean
    deciding_stage: int | None  # place in `stages`; None where they are alike


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind in one group, from one operator."""

    operation: str
    group: Group
    caller: str  # the operator or annotation around it, "" where there is none
    count: float  # a step
    time_ns: int
    exposed_ns: int


class RankOtherCommunication(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="other_communication"
):
    """What no strategy explains."""

    step_ns: int
    comm_ns: int
    exposed_ns: int
    uses: tuple[Use, ...]


class OtherCommunication(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="other_communication"
):
    """What no strategy explains; times are means over the ranks."""

    ranks: tuple[int, ...]
    step_ns: int
    comm_ns: int
    exposed_ns: int
    exposed_share: float
    uses: tuple[Use, ...]


RankStrategy = (
    RankDataParallel | RankFullySharded | RankTensorParallel | RankPipeline | RankOtherCommunication
)
Strategy = DataParallel | FullySharded | TensorParallel | Pipeline | OtherCommunication
