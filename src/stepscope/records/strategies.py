"""How a job is spread over its ranks: one record per strategy, for one rank and for the job.

Times are integer nanoseconds, means per step; shares are of the step. Unknown values are None. A
rank's record (`Rank...`) comes from its trace; the job's record joins those of all ranks.
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
    "hidden",  # not exposed
    "last",  # no compute is left to hide it
    "queued",  # began late, after an earlier bucket
    "long",  # takes longer than the compute that is left
    "late rank",  # one rank arrived after the others
    "gaps",  # compute pauses while it runs
]
Schedule = Literal["fill and drain", "one forward one backward", "interleaved"]


class _Tagged(msgspec.Struct, frozen=True, tag_field="kind"):
    """Written with the name of its strategy as `kind`."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce of gradients. Times count from the start of backward."""

    index: int
    size_bytes: int | None
    parameters: tuple[str, ...] = ()
    ready_ns: int | None  # its last gradient is ready
    start_ns: int | None
    end_ns: int | None
    time_ns: int
    exposed_ns: int
    why: Why
    wait_ns: int | None = None  # for the last rank; only in the job's record
    wait_error_ns: int | None = None  # how far off that may be, by the clocks
    late_rank: int | None = None  # most often the last to arrive; only in the job's record


class RankDataParallel(_Tagged, frozen=True, kw_only=True, tag="data_parallel"):
    """Replicas that sum their gradients, seen from one rank."""

    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    backward_ns: int | None
    comm_ns: int
    exposed_ns: int
    steps: tuple[int, ...]  # numbers of the steps that reduce gradients
    buckets: tuple[Bucket, ...]
    arrivals_ns: tuple[tuple[int, ...], ...] = ()  # steps x buckets, on the rank's own clock
    passes: int = 1  # backward passes of a step that exchange gradients
    early_exposed_ns: int = 0  # of `exposed_ns`, what passes before the last one cause


class DataParallel(_Tagged, frozen=True, kw_only=True, tag="data_parallel"):
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
    count: float  # per step
    size_bytes: int | None  # of one call
    time_ns: int
    exposed_ns: int
    lead_ns: int | None = None  # of a gather: from its start to the end of the compute before it
    prefetched: bool | None = None


class ShardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank by formula and as measured."""

    parameters: int  # of the whole model, as gathered (padding included)
    shards: int
    bytes_per_parameter: tuple[float, ...]  # stages 0 to 3, mixed-precision Adam
    formula_bytes: tuple[int, ...]  # bytes_per_parameter times parameters
    measured_parameter_bytes: int | None = None  # at rest, between steps
    measured_gradient_bytes: int | None = None
    measured_optimizer_bytes: int | None = None

    @property
    def measured_bytes(self) -> int | None:
        states = (self.measured_parameter_bytes, self.measured_gradient_bytes)
        known = [part for part in (*states, self.measured_optimizer_bytes) if part is not None]
        return sum(known) if len(known) == 3 else None


class RankFullySharded(_Tagged, frozen=True, kw_only=True, tag="fully_sharded"):
    """Sharded parameters, gathered when needed, seen from one rank."""

    flavour: Flavour
    stage: int  # of ZeRO: 3 gathers inside the step, 2 scatters gradients, 1 neither
    groups: tuple[Group, ...]  # the sharding groups
    replicate_groups: tuple[Group, ...]  # the groups that replicate the shards
    evidence: tuple[str, ...]
    step_ns: int
    comm_ns: int
    exposed_ns: int
    blocks: tuple[ShardedBlock, ...]
    prefetched_share: float | None  # of gathers, without the first of each phase
    memory: ShardMemory | None = None


class FullySharded(_Tagged, frozen=True, kw_only=True, tag="fully_sharded"):
    """Sharded parameters, gathered when needed; times are means over the ranks."""

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
    forward_count: float  # per step
    backward_count: float
    time_ns: int
    exposed_ns: int


class RankTensorParallel(_Tagged, frozen=True, kw_only=True, tag="tensor_parallel"):
    """Layers split over ranks, which communicate in forward and backward, seen from one rank."""

    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    forward_count: float  # collectives per step
    backward_count: float
    size_bytes: int | None  # per step
    comm_ns: int
    exposed_ns: int
    split_parameters: int | None  # as the capture counted them; None for a bare trace
    layers: tuple[Layer, ...] = ()


class TensorParallel(_Tagged, frozen=True, kw_only=True, tag="tensor_parallel"):
    """Layers split over ranks, which communicate in forward and backward; means over the ranks."""

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


class RankPipeline(_Tagged, frozen=True, kw_only=True, tag="pipeline"):
    """One rank's place in a pipeline. step = compute + other_comm + bubble."""

    stage_indices: tuple[int, ...]  # empty for a bare trace
    stages: int | None
    groups: tuple[Group, ...]
    evidence: tuple[str, ...]
    step_ns: int
    compute_ns: int
    other_comm_ns: int  # exposed communication of other strategies
    bubble_ns: int
    receive_wait_ns: int  # the part of the bubble inside receives
    microbatches: int | None  # as annotated
    receives: float  # per step; those without compute in between count once
    late_forward_share: float  # of forward compute: the part after backward has begun
    annotated: bool  # the schedule names its micro-batches


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage (in an interleaved schedule: the stages of one rank); means over its ranks."""

    stage_indices: tuple[int, ...]
    ranks: tuple[int, ...]
    step_ns: int
    compute_ns: int
    other_comm_ns: int
    bubble_ns: int
    bubble_share: float
    receive_wait_ns: int


class Pipeline(_Tagged, frozen=True, kw_only=True, tag="pipeline"):
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
    bound_share: float | None  # (p-1)/(m+p-1): the least that the schedule costs
    imbalance: float  # the longest stage's compute over the mean
    deciding_stage: int | None  # index into `stages`; None if they are alike


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one kind in one group, from one operator."""

    operation: str
    group: Group
    caller: str  # the operator or annotation around the call, or ""
    count: float  # per step
    time_ns: int
    exposed_ns: int


class RankOtherCommunication(_Tagged, frozen=True, kw_only=True, tag="other_communication"):
    """Communication that no strategy explains."""

    step_ns: int
    comm_ns: int
    exposed_ns: int
    uses: tuple[Use, ...]


class OtherCommunication(_Tagged, frozen=True, kw_only=True, tag="other_communication"):
    """Communication that no strategy explains; times are means over the ranks."""

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
