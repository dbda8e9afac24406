"""Every remedy that stepscope knows, by id, and the two spellings of one change: as `whatif
--set` predicts it and as `run --with` applies it.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stepscope.records.explanation import Remedy

# Every remedy that stepscope knows, by id: one closed set for findings, what-ifs, docs and fixes.
#
# A finding offers a remedy with `offer`. What-ifs and fixes name the same ids. A test checks that
# each remedy is offered by a finding or reserved for the fix room.


class KnownRemedy(NamedTuple):
    """One thing the user can do. `action` says it in general."""

    id: str
    action: str

    def offer(self, summary: str = "") -> Remedy:
        """The remedy as a finding offers it; `summary` fits the action to the case at hand."""
        from stepscope.records.explanation import Remedy  # the fix room needs the ids alone

        return Remedy(id=self.id, summary=summary or self.action)


REMEDIES: dict[str, KnownRemedy] = {}


def _add(name: str, action: str) -> KnownRemedy:
    assert name not in REMEDIES, name
    return REMEDIES.setdefault(name, KnownRemedy(name, action))


# Fewer launches, less Python
COMPILE = _add(
    "compile", "Call torch.compile(model): it fuses operators and launches fewer kernels"
)
REDUCE_OVERHEAD = _add(
    "reduce-overhead",
    'Call torch.compile(model, mode="reduce-overhead"): each of its graphs becomes one launch',
)
CUDA_GRAPHS = _add(
    "cuda-graphs", "Capture the step with torch.cuda.graph() and replay it: one launch per step"
)
FUSED_OPTIMIZER = _add("fused-optimizer", "Pass fused=True to the optimizer")
FOREACH_OPTIMIZER = _add(
    "foreach-optimizer", "Pass foreach=True to the optimizer: one call updates all parameters"
)
SET_TO_NONE = _add(
    "set-to-none", "Call zero_grad(set_to_none=True): gradients are written, not added to zeros"
)
BATCH = _add("batch", "Use a larger batch: each operator has more to do per call")
FUSE = _add(
    "fuse",
    "Train several of these models together in one process: `stepscope sweep`, or "
    "stepscope.fix.fuse",
)
NO_SYNC = _add(
    "no-sync",
    "Move .item(), .cpu() and print() of tensors out of the step, or call them every N steps. "
    "Copy with non_blocking=True",
)

OWN_PYTHON = _add(
    "own-python",
    "Spend less time outside the model: turn loops over samples into tensor operators, and keep "
    "lists out of the step",
)

LOOK_AT_LINE = _add("look-at-line", "Look at the line that takes longer than before")

# Pauses of the training thread
GC_FREEZE = _add(
    "gc-freeze",
    "Call gc.freeze() once model and data are built: collections then skip those objects",
)
GC_BY_HAND = _add(
    "gc-by-hand", "Call gc.disable(), and gc.collect() every N steps, on all ranks at the same step"
)
MARK_DYNAMIC = _add(
    "mark-dynamic",
    "Mark the dimension that changes with torch._dynamo.mark_dynamic, or pass dynamic=True to "
    "torch.compile: one graph then fits all sizes",
)
STEADY_VALUES = _add(
    "steady-values",
    "Pass the value that changes as a tensor, or keep it out of the compiled function: a plain "
    "Python value is part of the graph",
)
KEEP_COMPILE_CACHE = _add(
    "keep-compile-cache",
    "Set TORCHINDUCTOR_CACHE_DIR to a folder that outlives the job: later runs compile less",
)
COMPILE_BLOCKS = _add(
    "compile-blocks",
    "Compile the block that repeats with block.compile(), not the whole model: one compilation "
    "serves all of them",
)
NO_BREAKS = _add(
    "no-breaks",
    "Rewrite the line so that torch.compile can trace it, or move it out of the compiled function",
)
FUSE_NEIGHBOURS = _add(
    "fuse-neighbours",
    'Try mode="max-autotune", or make the operators beside each other fusible: the same shapes, '
    "reductions over the same dimension, no in-place update or view in between",
)
GRAPHABLE = _add(
    "graphable",
    "Remove what keeps the graph from being replayed: inputs that are written to, work on the CPU",
)
ON_STALL = _add(
    "on-stall",
    "Record with `stepscope run --on-stall`: the profiler then opens at the next such stall",
)
LATE_WINDOW = _add(
    "late-window",
    "Record windows over the whole run (`stepscope run --every N`) and compare a late one with "
    "an early one",
)
WAIT_ELSEWHERE = _add(
    "wait-elsewhere",
    "Find what the training thread waits for (a queue, a lock, a socket, time.sleep), and let "
    "another thread or DataLoader workers wait for it ahead of time",
)

# Work beside the steps
EVALUATE_LESS = _add(
    "evaluate-less",
    "Evaluate less often, on fewer batches or with larger ones, under torch.inference_mode()",
)
MORE_ENVIRONMENTS = _add(
    "more-environments",
    "Step several environments at once under torch.inference_mode(), so that one forward pass "
    "acts for all of them",
)
GENERATE_LESS = _add(
    "generate-less",
    "Generate less often, fewer samples or larger batches of them, under torch.inference_mode()",
)
INFERENCE_MODE = _add(
    "inference-mode",
    "Run passes without gradients under torch.inference_mode(), on larger batches or less often",
)
ASYNC_CHECKPOINT = _add(
    "async-checkpoint",
    "Save with torch.distributed.checkpoint.async_save: training goes on while files are written",
)
FAST_START = _add(
    "fast-start", "Import less, prepare data once and store it, create the model on its device"
)

# Recurrences
TRUNCATE_BACKWARD = _add(
    "truncate-backward",
    "Measure how far back the gradient reaches: stepscope.fix.scan.gradient_horizon. If only N "
    "steps matter, detach the state every 2N steps",
)
SCAN_BACKWARD = _add(
    "scan-backward",
    "Call stepscope.fix.scan.scan_backward(model): it runs the backward pass of nn.RNN, nn.GRU "
    "and nn.LSTM in chunks at the same time",
)

# Precision and kernels
BF16 = _add("bf16", "Run forward and loss under bf16 autocast")
FP16 = _add(
    "fp16",
    'Run forward and loss under torch.autocast("cuda", dtype=torch.float16), with a GradScaler',
)
TF32 = _add(
    "tf32", 'Call torch.set_float32_matmul_precision("high"): tensors stay fp32, matmuls use TF32'
)
CUDNN_BENCHMARK = _add(
    "cudnn-benchmark", "Set torch.backends.cudnn.benchmark = True: cuDNN tries its algorithms"
)
SDPA = _add(
    "sdpa", "Replace hand-written attention by torch.nn.functional.scaled_dot_product_attention"
)
CHANNELS_LAST = _add("channels-last", "Convert model and inputs to torch.channels_last")
VECTORS = _add("vectors", "Unset ATEN_CPU_CAPABILITY: torch then uses the widest vectors")
ONEDNN = _add("onednn", "Set torch.backends.mkldnn.enabled = True")
FLUSH_DENORMAL = _add(
    "flush-denormal",
    "Call torch.set_flush_denormal(True) before training: denormal values become 0",
)

# Data
NO_DATA_WAIT = _add(
    "no-data-wait",
    "Try more DataLoader workers (num_workers) and a longer prefetch (prefetch_factor)",
)
CHEAPER_BATCH = _add(
    "cheaper-batch", "Make a batch cheaper to load: decode less, store what is prepared"
)
LOADER_WORKERS = _add("loader-workers", "Set num_workers of the DataLoader")
PIN_MEMORY = _add(
    "pin-memory", "Set pin_memory=True in the DataLoader, and copy with non_blocking=True"
)
PREFETCH_FACTOR = _add(
    "prefetch-factor",
    "Raise prefetch_factor of the DataLoader: every worker then loads more batches ahead",
)
PREFETCH = _add("prefetch", "Copy the next batch on a side stream while the step computes")
PERSISTENT_WORKERS = _add(
    "persistent-workers",
    "Set persistent_workers=True: the DataLoader's workers then outlive an epoch",
)
CHECK_STORAGE = _add("check-storage", "Check whether this host reads from slower storage")

# Memory
ACTIVATION_CHECKPOINTING = _add(
    "activation-checkpointing",
    "Wrap blocks in torch.utils.checkpoint: backward then recomputes their activations",
)
SAVE_MEMORY = _add(
    "save-memory",
    "Call stepscope.fix.save_memory(model): it saves less for backward, by recomputing what is "
    "cheap and encoding what compresses exactly",
)
NO_CHECKPOINT = _add(
    "no-checkpoint",
    "Take torch.utils.checkpoint away from some blocks: use it on only as many as memory requires",
)
SMALLER_BATCH = _add(
    "smaller-batch", "Use a smaller batch and accumulate gradients over several passes"
)
SHARDING = _add(
    "sharding", "Shard optimizer state, gradients and parameters with fully_shard (FSDP)"
)
EXPANDABLE_SEGMENTS = _add(
    "expandable-segments",
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: segments grow instead of leaving holes",
)
STEADY_SHAPES = _add(
    "steady-shapes",
    "Use the same shapes in every step: pad to a few lengths, drop the last partial batch",
)
DETACH = _add(
    "detach", "Store loss.item() or loss.detach(), not the loss: it keeps its whole graph alive"
)
SNAPSHOT = _add(
    "snapshot",
    "Call torch.cuda.memory._dump_snapshot() after some steps and run `stepscope explain` on the "
    "file: it names the lines that allocate",
)

TRACEMALLOC = _add(
    "tracemalloc",
    "Compare two snapshots of tracemalloc, 1,000 steps apart: they name the lines that allocate",
)

# Threads and the machine
THREADS = _add("threads", "Set OMP_NUM_THREADS to the number of free cores per rank")
ONE_THREAD = _add("one-thread", "Set OMP_NUM_THREADS=1: no operator here is long enough to share")
PIN_RANKS = _add("pin-ranks", "Give each rank cores of its own with taskset -c")
FEWER_RANKS = _add("fewer-ranks", "Start no more ranks than there are cores")
IDLE_MACHINE = _add(
    "idle-machine", "Stop the other programs, or keep them off these cores (taskset, nice)"
)

CPU_ALLOCATOR = _add(
    "cpu-allocator",
    "Load tcmalloc or jemalloc with LD_PRELOAD: CPU memory is then allocated and freed faster",
)

# Communication
BUCKET_MB = _add(
    "bucket-mb",
    "Change bucket_cap_mb of DDP: smaller buckets start earlier, larger ones need fewer calls",
)
FIRST_BUCKET_MB = _add(
    "first-bucket-mb",
    "Change the size of DDP's first bucket: a smaller one starts earlier in backward",
)
TUNED_BUCKETS = _add(
    "tuned-buckets",
    "Let stepscope try DDP's bucket sizes during the first 58 steps and use the fastest",
)
BUCKET_VIEW = _add(
    "bucket-view", "Pass gradient_as_bucket_view=True to DDP: gradients are not copied into buckets"
)
STATIC_GRAPH = _add(
    "static-graph", "Pass static_graph=True to DDP: it looks for unused parameters only once"
)
COMPRESS_GRADIENTS = _add(
    "compress-gradients",
    "Register DDP's bf16_compress_hook: gradients are exchanged in half the bytes",
)
POWERSGD = _add(
    "powersgd", "Register DDP's powerSGD_hook: gradients are exchanged as low-rank matrices"
)
NO_BUFFER_BROADCAST = _add(
    "no-buffer-broadcast",
    "Pass broadcast_buffers=False to DDP: running statistics stay each rank's own",
)
SYNC_ONCE = _add(
    "sync-once",
    "Run all but the last backward pass of a step under DDP's no_sync(): gradients are then "
    "exchanged once a step",
)
ACCUMULATE = _add(
    "accumulate",
    "Accumulate gradients over N passes under no_sync(): ranks then communicate once in N passes",
)
BANDWIDTH = _add(
    "bandwidth", "Send fewer bytes with DDP's bf16_compress_hook, or use a faster link"
)
FSDP_PREFETCH = _add(
    "fsdp-prefetch",
    "Gather blocks ahead: call set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch",
)
LARGER_BLOCKS = _add("larger-blocks", "Call fully_shard on larger blocks: fewer, longer gathers")
KEEP_GATHERED = _add(
    "keep-gathered",
    "Pass reshard_after_forward=False to fully_shard if memory allows: backward then gathers "
    "nothing again",
)
REDUCE_DTYPE = _add(
    "reduce-dtype", "Gather and reduce in bf16 (MixedPrecisionPolicy): half the bytes"
)
FEWER_SPLITS = _add(
    "fewer-splits",
    "Split layers over fewer ranks, inside one host, and use the other ranks as replicas",
)
SEQUENCE_PARALLEL = _add(
    "sequence-parallel",
    "Use SequenceParallel between the split layers: its reduce-scatter and gather can overlap",
)
LESS_OFTEN = _add("less-often", "Make these calls every N steps, or join them into one")
USE_NCCL = _add("use-nccl", "Start the process group with NCCL instead of gloo")

# Ranks together
WRAP_MODEL = _add(
    "wrap-model",
    "Call init_process_group and wrap the model in DistributedDataParallel or fully_shard, or "
    "let the trainer do it. If one process was meant, start only one",
)
START_AS_JOB = _add(
    "start-as-job",
    "If they should train one model, start them with torchrun and wrap the model in "
    "DistributedDataParallel. Otherwise nothing is wrong",
)
MICRO_BATCHES = _add("micro-batches", "Use more micro-batches")
BALANCE_STAGES = _add("balance-stages", "Move layers away from the slowest pipeline stage")
INTERLEAVE = _add(
    "interleave",
    "Put several stages on each rank (Interleaved1F1B): filling and draining the pipeline takes "
    "that many times less",
)
CHECK_HOST = _add(
    "check-host",
    "On its host, look for other processes, a throttled or smaller device, or a wrong CPU "
    "binding. Try the rank on another host",
)
NO_STRAGGLER = _add("no-straggler", "Bring the slow rank up to the pace of the others")
BALANCE = _add("balance", "Give every rank the same amount of work")
BOUNDED_STALENESS = _add(
    "bounded-staleness",
    "Train through stepscope.fix.server with bounded consistency: workers then run ahead of a "
    "slow step",
)
NO_BARRIER = _add(
    "no-barrier",
    "Train through stepscope.fix.server with eventual consistency: nobody waits, but reads are "
    "as stale as the slowest worker makes them",
)
KEEP_BARRIER = _add(
    "keep-barrier",
    "Train synchronously (all-reduce): it gives as many updates, and all of them are fresh",
)
COMPRESS_PUSHES = _add(
    "compress-pushes", "Send smaller gradients to the server: set its compression to bf16 or top-k"
)
MORE_SHARDS = _add("more-shards", "Spread the parameters over more server shards, on more hosts")
CHECK_NCCL = _add("check-nccl", "Record with `stepscope run --nccl-debug` to see the transports")

# NCCL's environment
UNSET_NCCL_VARIABLES = _add(
    "unset-nccl-variables", "Unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA where they are set"
)
FAST_NETWORK = _add(
    "fast-network",
    "Give the job the fast network: /dev/infiniband, libibverbs and `ulimit -l unlimited` in the "
    "container, or the cloud's NCCL network plugin",
)
FASTER_SOCKETS = _add(
    "faster-sockets",
    "If there are only sockets, set NCCL_SOCKET_IFNAME to the fastest interface, and raise "
    "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD",
)
ONE_MACHINE = _add(
    "one-machine",
    "Unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, and run the ranks of a machine in one "
    "container, or with --ipc=host and all GPUs",
)
P2P = _add("p2p", "Allow GPU-to-GPU access")
SAME_ENVIRONMENT = _add(
    "same-environment",
    "Start every rank with the same NCCL_* variables, drivers and devices. Compare `nvidia-smi "
    "topo -m` on the machines named in the evidence",
)
READ_NCCL_WARNINGS = _add(
    "read-nccl-warnings", "Read the first warning: later ones often follow from it"
)

# Knowing more
CALIBRATE = _add("calibrate", "Run `stepscope calibrate` on the idle machine")
STEPSCOPE_RUN = _add("stepscope-run", "Record the training with `stepscope run -- python train.py`")
LIGHTER_PROFILE = _add("lighter-profile", "Record fewer steps, or leave out shapes and stacks")

# Known to the fix room, offered by no finding yet.
RESERVED = frozenset(
    remedy.id
    for remedy in (
        *(FOREACH_OPTIMIZER, SET_TO_NONE, CUDNN_BENCHMARK, SDPA, PREFETCH_FACTOR, CPU_ALLOCATOR),
        *(FIRST_BUCKET_MB, TUNED_BUCKETS, BUCKET_VIEW, STATIC_GRAPH, COMPRESS_GRADIENTS),
        *(POWERSGD, NO_BUFFER_BROADCAST),
    )
)


# The two spellings of one change: as `whatif --set` predicts it, as `run --with` applies it.
#
# Both verbs take both. What they print is their own spelling.

# What `whatif` says, what `run --with` and `tune --only` say. An id that stands without a value
# means the first value of its fix.
_PAIRS = (
    ("precision=tf32", "tf32"),
    ("precision=bf16", "bf16"),
    ("precision=fp16", "fp16"),
    ("optimizer=fused", "fused-optimizer"),
    ("optimizer=foreach", "foreach-optimizer"),
    ("checkpoint=blocks", "activation-checkpointing"),
    ("scan", "scan-backward"),
    ("loader-workers=2", "loader-workers"),
    ("bucket-mb=5", "bucket-mb"),
    ("save-memory=5%", "save-memory"),
    ("threads=fit", "threads=cores"),
    ("threads=fit", "threads"),
    ("threads=1", "one-thread"),
)
WHATIF_OF = {fix: whatif for whatif, fix in _PAIRS}
FIX_OF = dict(reversed(_PAIRS))
# A finding's own name for a mode of torch.compile; `whatif` knows it from the what-if.
FIX_OF["reduce-overhead"] = "compile=reduce-overhead"

_MOST_NEAR = 3


def did_you_mean(text: str, known: Collection[str]) -> str:
    """Return '; did you mean A or B?', or '' if nothing known is spelled like `text`."""
    parts = set(text.lower().replace("_", "-").replace("=", "-").split("-"))
    alike = [name for name in known if parts & set(name.replace("=", "-").split("-"))]
    near = [*get_close_matches(text, list(known), 2), *alike]
    near = list(dict.fromkeys(near))[:_MOST_NEAR]
    return f"; did you mean {' or '.join(near)}?" if near else ""
