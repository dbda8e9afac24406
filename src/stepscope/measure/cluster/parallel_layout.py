"""How the job is laid out over its ranks: groups, replicas, shards, stages. Read, never hooked.

DDP accepts one communication hook, once, so ours would break a script that registers its own
later. Nor would its sums equal DDP's to the bit: DDP multiplies by 1/n while it copies a gradient
into its bucket, divides by n when the gradient already is the bucket, and uses another n in Join.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import replace
from stepscope.measure.ranks import initialised_groups

_LISTED_RANKS = 64
_OF_BUCKETS = ("buckets", "grad_ready_order")
_replicas: dict[int, weakref.ref[Any]] = {}  # living DDP instances, in the order they were built
_numbers = itertools.count()


@never_raise
def groups() -> list[dict[str, Any]]:
    """The process groups this rank is in."""
    dist = initialised_groups()
    if dist is None:
        return []
    world = dist.distributed_c10d._world
    return [
        {
            "name": str(world.pg_names.get(group, "")),
            "description": str(getattr(group, "group_desc", "")),
            "backend": str(world.pg_backend_config.get(group) or backend),
            "size": int(group.size()),
            "rank": int(group.rank()),
            **_list_members(sorted(world.pg_group_ranks.get(group, {}))),
        }
        for group, (backend, _store) in list(world.pg_map.items())
    ]


def _list_members(ranks: list[int]) -> dict[str, Any]:
    """`ranks`; of a large regular group `ranges` (first, last, distance). Every rank writes this:
    lists would grow with the square of the job."""
    if len(ranks) <= _LISTED_RANKS:
        return {"ranks": ranks}
    ranges: list[list[int]] = []
    for rank in ranks:
        last = ranges[-1] if ranges else None
        if last is not None and rank == last[1] + last[2]:
            last[1] = rank
        elif last is not None and last[0] == last[1]:
            last[1:] = [rank, rank - last[0]]
        else:
            ranges.append([rank, rank, 1])
    return {"ranks": [], "ranges": ranges} if 6 * len(ranges) < len(ranks) else {"ranks": ranks}


def brief_layout(layout: dict[str, Any]) -> dict[str, Any]:
    """Without the lists that only a trace can be explained by: buckets and their parameters."""
    replicas = [
        {name: value for name, value in replica.items() if name not in _OF_BUCKETS}
        for replica in layout.get("ddp") or ()
    ]
    return {**layout, "ddp": replicas}


@never_raise
def nccl_version() -> str:
    """Call only if a group runs on NCCL."""
    import torch.cuda.nccl

    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def alive(*kinds: type | None) -> list[Any]:
    """Living objects of these classes; takes some 10 ms per 100,000 objects.

    By type, never by isinstance: a proxy object's __class__ can run the script's code.
    """
    wanted = tuple(kind for kind in kinds if kind is not None)
    if not wanted:
        return []
    return [item for item in gc.get_objects() if issubclass(type(item), wanted)]


# DistributedDataParallel


def watch_replicas() -> None:
    """Remember every DDP instance as it is created, until detached. May be called again."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    kind: Any = getattr(module, "DistributedDataParallel", None)
    if kind is None or getattr(kind.__init__, "_stepscope", False):
        return
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        _remember(self)

    __init__._stepscope = True  # type: ignore[attr-defined]
    replace(kind, "__init__", __init__)


@never_raise
def search_replicas() -> None:
    """Find DDP instances created before watch_replicas()."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    known = {id(ref()) for ref in _replicas.values()}
    for ddp in alive(getattr(module, "DistributedDataParallel", None)):
        if id(ddp) not in known:
            _remember(ddp)


def _remember(ddp: Any) -> None:
    number = next(_numbers)
    _replicas[number] = weakref.ref(ddp, lambda _gone: _replicas.pop(number, None))


def replicas() -> list[dict[str, Any]]:
    described = [
        _replica(index, ddp) for index, ref in list(_replicas.items()) if (ddp := ref()) is not None
    ]
    return [replica for replica in described if replica is not None]


@never_raise
def _replica(index: int, ddp: Any) -> dict[str, Any]:
    """DDP's own record of itself. Its times are averages over sampled iterations."""
    data = ddp._get_ddp_logging_data()
    return {
        "index": index,
        "module": data.get("module_name"),
        "group": str(getattr(ddp.process_group, "group_name", "")),
        "world_size": data.get("world_size"),
        "comm_hook": _hook(ddp, data),
        "parameters": data.get("num_parameter_tensors"),
        "parameter_bytes": data.get("total_parameter_size_bytes"),
        "unused_parameter_bytes": data.get("unused_parameter_size"),
        "bucket_cap_bytes": data.get("bucket_cap_bytes"),
        "buckets_rebuilt": bool(data.get("has_rebuilt_buckets")),
        "buckets": _buckets(ddp, data),
        "grad_ready_order": _integers(data.get("prev_iteration_grad_ready_order_indices", "")),
        "gradient_as_bucket_view": bool(data.get("gradient_as_bucket_view")),
        "find_unused_parameters": bool(data.get("find_unused_parameters")),
        "static_graph": bool(getattr(ddp, "static_graph", False)),
        "broadcast_buffers": bool(data.get("broadcast_buffers")),
        "iteration": data.get("iteration"),
        "average_forward_ns": data.get("avg_forward_compute_time"),
        "average_backward_ns": data.get("avg_backward_compute_time"),
        "average_comm_ns": data.get("avg_backward_comm_time"),
        "average_overlap_ns": data.get("avg_backward_compute_comm_overlap_time"),
    }


def _hook(ddp: Any, data: dict[str, Any]) -> str | None:
    hooks = getattr(ddp, "_comm_hooks", None)
    if hooks:
        return str(getattr(hooks[0][0], "__qualname__", hooks[0][0]))
    return data.get("comm_hook") or None


def _buckets(ddp: Any, data: dict[str, Any]) -> list[dict[str, Any]]:
    """In the order of their reductions; DDP rebuilds buckets in its second iteration."""
    rebuilt = bool(data.get("has_rebuilt_buckets"))
    sizes = _integers(data.get("rebuilt_bucket_sizes" if rebuilt else "bucket_sizes", ""))
    members = str(data.get("rebuilt_per_bucket_param_indices", "")).split(",") if rebuilt else []
    if len(members) != len(sizes):
        return [{"size_bytes": size, "parameters": None} for size in sizes]
    names = _parameter_names(ddp, data.get("num_parameter_tensors"))
    return [
        {"size_bytes": size, "parameters": [names[i] for i in _integers(own)] if names else None}
        for size, own in zip(sizes, members, strict=True)
    ]


def _parameter_names(ddp: Any, expected: Any) -> list[str] | None:
    """In the order of DDP's indices, or None if that is unknown."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    names = [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    return names if len(names) == expected else None


def _integers(text: Any) -> list[int]:
    return [int(part) for part in str(text).replace(",", " ").split() if part.isdigit()]


# What is trained, and exchanges without process groups


@never_raise
def trained(parameters: Iterable[Any]) -> dict[str, Any]:
    """The trained tensors: how many, their bytes, and how many are shared between processes.

    Device tensors always report that they are shared, so only CPU tensors count.
    """
    own = {id(tensor): tensor for tensor in parameters if tensor.requires_grad}
    plain = [tensor for tensor in own.values() if tensor.device.type == "cpu"]
    return {
        "tensors": len(own),
        "size_bytes": sum(tensor.numel() * tensor.element_size() for tensor in own.values()),
        "shared_tensors": sum(map(_is_shared, plain)) if len(plain) == len(own) else None,
    }


def _is_shared(tensor: Any) -> bool:
    try:
        return bool(tensor.is_shared())
    except Exception:  # a subclass without a storage of its own
        return False


@never_raise
def uses_rpc() -> bool:
    """Whether an RPC agent runs: gradients may travel without a collective."""
    api = sys.modules.get("torch.distributed.rpc.api")
    known = getattr(api, "_is_current_rpc_agent_set", None)
    return bool(known()) if known is not None else False


def exchanging_libraries() -> list[str]:
    """Imported libraries that exchange gradients without torch's process groups."""
    return [name for name in ("bagua", "byteps", "hivemind", "horovod") if name in sys.modules]


# DTensor, FSDP, pipelines


@never_raise
def placements(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """How parameters lie on device meshes: FSDP2, tensor parallelism, or both."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    count: Counter[tuple[Any, ...]] = Counter()
    for parameter in parameters:
        if kind is not None and issubclass(type(parameter), kind):
            count[(parameter.device_mesh, tuple(map(str, parameter.placements)))] += 1
    return [
        {
            "mesh": list(mesh.mesh_dim_names or ()),
            "shape": list(mesh.shape),
            # A dimension over all ranks is the default group and does not carry its name.
            "groups": [str(group.group_name) for group in mesh.get_all_groups()],
            "placements": list(layout),
            "count": number,
        }
        for (mesh, layout), number in count.items()
    ]


@never_raise
def shards_and_stages() -> dict[str, Any]:
    """Modules under FSDP (1 or 2) by class, and pipeline stages, in one search."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    before_2_6 = sys.modules.get("torch.distributed._composable.fsdp")
    old: Any = getattr(fsdp, "FullyShardedDataParallel", None)
    new: Any = getattr(fsdp, "FSDPModule", None) or getattr(before_2_6, "FSDPModule", None)
    if new is not None and not new.__subclasses__():  # fully_shard makes one for each class
        new = None
    stage: Any = getattr(
        sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None
    )
    modules: Counter[str] = Counter()
    stages = []
    for item in alive(old, new, stage):
        if stage is not None and issubclass(type(item), stage):
            stages.append({"stage": item.stage_index, "stages": item.num_stages})
        else:
            modules[type(item).__name__] += 1
    return {"fsdp_modules": dict(modules), "pipeline_stages": stages}
