"""Traces whose values, structure, categories or communication arguments are odd."""

from __future__ import annotations

import copy
import gzip
import json
from functools import cache
from typing import TYPE_CHECKING, Any

from fuzz.odd_json import HUGE_NUMBERS, NUMBERS, VALUES, damage, odd_value, text
from shared_traces import GOLDEN, SHARED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

Trace = dict[str, Any]
Event = dict[str, Any]

_OURS = ("cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph")
_FROM_OUTSIDE = (
    "third_party/a100_event_sync",
    "third_party/a100_nccl_rank0of2",
    "third_party/cpu_only_gloo_rank34",
    "third_party/pair_rank0of128",
    "h200/mlp_b32_fp32_loop",
    "h200/gpt2s_b8_bf16_graph",
)
_MOST_EVENTS = 900
_CATEGORIES = (
    *("cpu_op", "user_annotation", "python_function", "cuda_runtime", "overhead", "kernel"),
    *("gpu_memcpy", "gpu_memset", "cuda_sync", "gpu_user_annotation", "cuda_event", "Trace", ""),
    *("ac2g", "fwdbwd", "cpu_instant_event", "hip_runtime", "mtia_ccp_events", "Kernel", "x"),
)
_PHASES = ("X", "s", "f", "t", "i", "I", "M", "B", "E", "C", "", "x")
_ARGUMENTS = (
    *("correlation", "Sequence number", "Fwd thread id", "Input type", "Input Dims", "stream"),
    *("Concrete Inputs", "device", "bytes", "grid", "block", "graph node id", "Total Allocated"),
    *("Total Reserved", "Bytes", "Device Id", "Device Type", "Addr", "External id", "name"),
    *("Input Strides", "Python parent id", "Python id", "Python module id", "Ev Idx"),
)
_COMMUNICATION = {
    "Collective name": ("allreduce", "_allgather_base", "send", "recv", "barrier", "x", ""),
    "In msg nelems": (1024, 0, -5),
    "Out msg nelems": (1024, 0),
    "dtype": ("Float", "BFloat16", "Byte", "ComplexDouble", "x"),
    "Process Group Name": ("0", "1", "default_pg", ""),
    "Process Group Description": ("default_pg", "mesh_dp", ""),
    "Group size": (2, 8, 0, -1, 1),
    "Process Group Ranks": ("[0, 1]", "[0, 0]", "[]", "[0, 1, ..., 6, 7]", "[-1]", [0, 1], "[1e9]"),
    "In split size": ("[]", "[1, 2]"),
    "Out split size": ("[]", "[1, 2]"),
    "Src Rank": (0, 1),
    "Dst Rank": (0, 1),
    "Seq": (0, 1, 2),
}
_HEADS: dict[str, Any] = {
    "schemaVersion": 1,
    "distributedInfo": {
        "backend": "nccl",
        "rank": 0,
        "world_size": 2,
        "pg_count": 1,
        "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}],
    },
    "deviceProperties": [
        {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000, "numSms": 132}
    ],
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "displayTimeUnit": "ms",
    "traceName": "trace.json",
}


@cache
def seeds() -> tuple[bytes, ...]:
    """Small traces of many kinds; those from outside only where they lie beside the repository."""
    paths = [
        *(GOLDEN / f"{name}.json.gz" for name in _OURS),
        *(SHARED / "traces" / f"{name}.json.gz" for name in _FROM_OUTSIDE),
    ]
    return tuple(json.dumps(_short(path)).encode() for path in paths if path.is_file())


def _short(path: Path) -> Trace:
    """The first few hundred events, or, of device traces, some from the middle too."""
    found: Trace = json.loads(gzip.decompress(path.read_bytes()), strict=False)
    events = found["traceEvents"]
    middle = len(events) // 2
    if len(events) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        found["traceEvents"] = [*events[:half], *events[middle : middle + half]]
    return found


def mutate(rng: Random, folder: Path) -> Path:
    trace: Trace = json.loads(rng.choice(seeds()))
    damage_trace(rng, trace)
    path = folder / "trace.json"
    path.write_bytes(text(trace))
    return path


def damage_trace(rng: Random, trace: Trace) -> None:
    """In one way or in several."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        rng.choice(_WAYS)(rng, trace)


def _some(rng: Random, trace: Trace) -> list[Event]:
    """One event, a few, or all of a category: odd values seldom come alone."""
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    if not events:
        return []
    pick = rng.random()
    if pick < 0.4:
        return [rng.choice(events)]
    if pick < 0.7:
        return rng.sample(events, min(len(events), rng.randrange(1, 40)))
    category = rng.choice(events).get("cat")
    return [event for event in events if event.get("cat") == category]


def _values(rng: Random, trace: Trace) -> None:
    events = trace["traceEvents"]
    for place in rng.sample(range(len(events)), min(len(events), rng.randrange(1, 30))):
        events[place] = damage(rng, events[place], rng.randrange(1, 4))


def _one_field(rng: Random, trace: Trace) -> None:
    field, value = (
        rng.choice(("ts", "dur", "pid", "tid", "id", "name", "cat", "ph")),
        odd_value(rng),
    )
    for event in _some(rng, trace):
        event[field] = value


def _arguments(rng: Random, trace: Trace) -> None:
    name, value = rng.choice(_ARGUMENTS), odd_value(rng)
    for event in _some(rng, trace):
        if isinstance(event.setdefault("args", {}), dict):
            event["args"][name] = value


def _shapes(rng: Random, trace: Trace) -> None:
    """Sides that are zero, negative or enormous, and dtypes that do not match them."""
    for event in _some(rng, trace):
        args = event.get("args")
        if isinstance(args, dict) and isinstance(args.get("Input Dims"), list):
            args["Input Dims"] = [_odd_shape(rng, shape) for shape in args["Input Dims"]]
            if rng.random() < 0.3:
                args["Input type"] = rng.choice((["float"], [], ["c10::Half"] * 9, "float", [1]))


def _odd_shape(rng: Random, shape: Any) -> Any:
    if not isinstance(shape, list) or rng.random() < 0.3:
        return rng.choice((shape, odd_value(rng), [rng.choice(NUMBERS)] * rng.randrange(9)))
    return [rng.choice((side, side, rng.choice(HUGE_NUMBERS), 0, -1)) for side in shape]


def _large_shapes(rng: Random, trace: Trace) -> None:
    """Every side of every shape times one factor: each is possible, their products are not."""
    factor = rng.choice((2**10, 2**15, 2**20, 2**30))
    for event in trace["traceEvents"]:
        args = event.get("args") if isinstance(event, dict) else None
        if isinstance(args, dict) and isinstance(args.get("Input Dims"), list):
            shapes = json.dumps(args["Input Dims"])
            args["Input Dims"] = json.loads(shapes, parse_int=lambda digits: int(digits) * factor)


def _plain_values(rng: Random, trace: Trace) -> None:
    """What operators were given besides tensors: strides, sizes, flags, as text."""
    odd = ("-1", "0", "9" * 30, "9" * 6000, "[]", "[0, 0]", "[1, -1]", "True", "x", "1e9", "[[1]]")
    for event in _some(rng, trace):
        args = event.get("args")
        if isinstance(args, dict) and isinstance(args.get("Concrete Inputs"), list):
            args["Concrete Inputs"] = [
                rng.choice(odd) if rng.random() < 0.5 else value
                for value in args["Concrete Inputs"]
            ]


def _clocks(rng: Random, trace: Trace) -> None:
    """Clocks that jump, stand, run backwards, or tell another century."""
    shift, factor = rng.choice(NUMBERS), rng.choice((0, -1, 1, 1, 1e-6, 1e6, 1e12))
    field = rng.choice(("ts", "ts", "dur"))
    for event in _some(rng, trace):
        if isinstance(event.get(field), int | float):
            event[field] = event[field] * factor + shift


def _categories(rng: Random, trace: Trace) -> None:
    category = rng.choice(_CATEGORIES)
    phase = rng.choice(_PHASES) if rng.random() < 0.3 else None
    for event in _some(rng, trace):
        event["cat"] = category
        if phase is not None:
            event["ph"] = phase


def _names(rng: Random, trace: Trace) -> None:
    """Names that mean something to the analysis, where they do not belong."""
    name = rng.choice(
        (
            *("ProfilerStep#" + "9" * 30, "ProfilerStep#" + "9" * 5000, "Forward " + "9" * 5000),
            *("train.py(" + "9" * 5000 + "): main", "OpaqueType<" + "9" * 5000 + ">"),
            *("ProfilerStep#0", "ProfilerStep#x", "Optimizer.step#Adam.step", "aten::mm"),
            *("aten::convolution_backward", "nccl:all_reduce", "gloo:all_reduce", "Memcpy HtoD"),
            *("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "cudaLaunchKernel", "autograd::engine"),
            *("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "cudaGraphLaunch"),
            *(
                "aten::_scaled_dot_product_flash_attention",
                "stepscope:closure",
                "aten::_foreach_add_",
            ),
            *("DistributedDataParallel.forward", "nn.Module: Linear_0", "cudaDeviceSynchronize"),
            *("aten::_thnn_fused_lstm_cell", "aten::embedding_dense_backward", "[memory]"),
        )
    )
    for event in _some(rng, trace):
        event["name"] = name


def _communication(rng: Random, trace: Trace) -> None:
    """Collective calls with arguments that do not fit each other."""
    for event in _some(rng, trace):
        if not isinstance(event.setdefault("args", {}), dict):
            continue
        for name, usual in _COMMUNICATION.items():
            if rng.random() < 0.8:
                odd = rng.random() < 0.25
                event["args"][name] = odd_value(rng) if odd else rng.choice(usual)
        if rng.random() < 0.5:
            event["name"] = rng.choice(
                ("record_param_comms", "nccl:all_reduce", "c10d::allreduce_")
            )


def _head(rng: Random, trace: Trace) -> None:
    for name, value in _HEADS.items():
        if rng.random() < 0.5:
            trace[name] = damage(rng, {"": copy.deepcopy(value)}, rng.randrange(3)).get("", value)
    if rng.random() < 0.2:
        trace[rng.choice(tuple(_HEADS))] = rng.choice(VALUES)


def _order(rng: Random, trace: Trace) -> None:
    """Events shuffled, doubled, left out, or only a few of them."""
    events = trace["traceEvents"]
    pick = rng.randrange(4)
    if pick == 0:
        rng.shuffle(events)
    elif pick == 1:
        events += [copy.deepcopy(event) for event in _some(rng, trace)]
    elif pick == 2:
        gone = {id(event) for event in _some(rng, trace)}
        trace["traceEvents"] = [event for event in events if id(event) not in gone]
    else:
        first = rng.randrange(len(events) + 1)
        trace["traceEvents"] = events[first : first + rng.choice((0, 1, 2, 5, 50))]


def _elements(rng: Random, trace: Trace) -> None:
    """Things that are no events among the events."""
    for _ in range(rng.randrange(1, 6)):
        trace["traceEvents"].insert(rng.randrange(len(trace["traceEvents"]) + 1), odd_value(rng))


_WAYS: list[Callable[[Random, Trace], None]] = [
    _values, _values, _one_field, _one_field, _arguments, _arguments, _arguments, _shapes, _shapes,
    _large_shapes, _plain_values, _clocks, _clocks, _categories, _names, _communication,
    _communication, _head, _order, _elements,
]  # fmt: skip
