"""Every remedy that stepscope knows, by id: one closed set for findings, what-ifs, docs and fixes.

A finding offers a remedy with `offer`. What-ifs and fixes name the same ids. A test checks that
each remedy is offered by a finding or reserved for the fix room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stepscope.records.explanation import Remedy


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
COMPILE = _add("compile", "use torch.compile: it fuses operators and launches fewer kernels")
REDUCE_OVERHEAD = _add(
    "reduce-overhead",
    'give torch.compile mode="reduce-overhead": each of its graphs becomes one launch',
)
CUDA_GRAPHS = _add("cuda-graphs", "capture the step as a CUDA graph and replay it: one launch")
FUSED_OPTIMIZER = _add("fused-optimizer", "create the optimizer with fused=True")
FOREACH_OPTIMIZER = _add(
    "foreach-optimizer", "create the optimizer with foreach=True: one call for all parameters"
)
SET_TO_NONE = _add(
    "set-to-none", "call zero_grad(set_to_none=True): gradients are written, not added to zeros"
)
BATCH = _add("batch", "use a larger batch: each operator has more to do per call")
FUSE = _add(
    "fuse", "train several of these models as one array: stepscope.fix.fuse, stepscope sweep"
)
NO_SYNC = _add(
    "no-sync", "keep values on the device and read them every N steps; copy with non_blocking=True"
)

OWN_PYTHON = _add(
    "own-python",
    "spend less time outside the model: vectorise loops over samples, keep lists out of the step",
)

LOOK_AT_LINE = _add("look-at-line", "look at the line that takes longer than before")

# Pauses of the training thread
GC_FREEZE = _add(
    "gc-freeze",
    "call gc.freeze() once model and data are built: collections then skip those objects",
)
GC_BY_HAND = _add(
    "gc-by-hand",
    "call gc.disable(), and gc.collect() every N steps, on all ranks at the same step",
)
MARK_DYNAMIC = _add(
    "mark-dynamic",
    "mark the dimension that changes (torch._dynamo.mark_dynamic) or use "
    "torch.compile(dynamic=True): one graph then fits all sizes",
)
STEADY_VALUES = _add(
    "steady-values",
    "pass the value that changes as a tensor, or keep it out of the compiled function: "
    "a plain Python value is part of the graph",
)
KEEP_COMPILE_CACHE = _add(
    "keep-compile-cache",
    "set TORCHINDUCTOR_CACHE_DIR to a folder that outlives the job: later runs compile less",
)
COMPILE_BLOCKS = _add(
    "compile-blocks",
    "compile the block that repeats, not the whole model: one compilation serves all of them",
)
NO_BREAKS = _add(
    "no-breaks",
    "rewrite the line so that torch.compile can trace it, or move it out of the compiled function",
)
FUSE_NEIGHBOURS = _add(
    "fuse-neighbours",
    "make neighbouring operators fusible: the same shapes, reductions over the same dimension, "
    "no in-place update or view in between; or try mode='max-autotune'",
)
GRAPHABLE = _add(
    "graphable",
    "remove what keeps the graph from being replayed: inputs that are written to, work on the CPU",
)
ON_STALL = _add(
    "on-stall",
    "record with `stepscope run --on-stall`: the profiler then opens at the next such stall",
)
LATE_WINDOW = _add(
    "late-window",
    "record windows over the whole run (`stepscope run --every N`) and compare a late one with "
    "an early one",
)
WAIT_ELSEWHERE = _add(
    "wait-elsewhere",
    "find what the training thread waits for (a queue, a lock, a socket, time.sleep), and let "
    "another thread or DataLoader workers wait for it ahead of time",
)

# Work beside the steps
EVALUATE_LESS = _add(
    "evaluate-less",
    "evaluate less often, on fewer batches or with larger ones, under torch.inference_mode()",
)
MORE_ENVIRONMENTS = _add(
    "more-environments",
    "step several environments at once, so that one forward pass acts for all of them, under "
    "torch.inference_mode()",
)
GENERATE_LESS = _add(
    "generate-less",
    "generate less often, fewer samples or larger batches of them, under torch.inference_mode()",
)
INFERENCE_MODE = _add(
    "inference-mode",
    "run passes without gradients under torch.inference_mode(), on larger batches or less often",
)
ASYNC_CHECKPOINT = _add(
    "async-checkpoint",
    "save with torch.distributed.checkpoint.async_save: training goes on while files are written",
)
FAST_START = _add(
    "fast-start",
    "import less, prepare data once and keep it, create the model on its device",
)

# Recurrences
TRUNCATE_BACKWARD = _add(
    "truncate-backward",
    "look how far back the gradient reaches (stepscope.fix.scan.gradient_horizon); where few steps "
    "matter, detach the state between stretches of twice as many",
)
SCAN_BACKWARD = _add(
    "scan-backward",
    "call stepscope.fix.scan.scan_backward(model): the backward pass of nn.RNN, nn.GRU and "
    "nn.LSTM by chunks that run at the same time",
)

# Precision and kernels
BF16 = _add("bf16", "run forward and loss under bf16 autocast")
FP16 = _add(
    "fp16",
    'run forward and loss under torch.autocast("cuda", dtype=torch.float16), with a GradScaler',
)
TF32 = _add(
    "tf32", 'call torch.set_float32_matmul_precision("high"): tensors stay fp32, products use tf32'
)
CUDNN_BENCHMARK = _add(
    "cudnn-benchmark", "set torch.backends.cudnn.benchmark = True: cuDNN tries its algorithms"
)
SDPA = _add(
    "sdpa", "replace hand-written attention by torch.nn.functional.scaled_dot_product_attention"
)
CHANNELS_LAST = _add("channels-last", "convert model and inputs to torch.channels_last")
VECTORS = _add("vectors", "unset ATEN_CPU_CAPABILITY: torch then uses the widest vectors")
ONEDNN = _add("onednn", "set torch.backends.mkldnn.enabled = True")
FLUSH_DENORMAL = _add(
    "flush-denormal",
    "call torch.set_flush_denormal(True) before training: denormal values become 0",
)

# Data
NO_DATA_WAIT = _add("no-data-wait", "more DataLoader workers may help, and a longer prefetch")
CHEAPER_BATCH = _add(
    "cheaper-batch", "make a batch cheaper to load: decode less, keep what is prepared"
)
LOADER_WORKERS = _add("loader-workers", "set num_workers of the DataLoader")
PIN_MEMORY = _add("pin-memory", "set pin_memory=True and copy with non_blocking=True")
PREFETCH_FACTOR = _add(
    "prefetch-factor", "let every worker of the DataLoader load more batches ahead"
)
PREFETCH = _add("prefetch", "copy the next batch on a side stream while the step computes")
PERSISTENT_WORKERS = _add(
    "persistent-workers",
    "set persistent_workers=True: the DataLoader's workers then outlive an epoch",
)
CHECK_STORAGE = _add("check-storage", "check whether this host reads from slower storage")

# Memory
ACTIVATION_CHECKPOINTING = _add(
    "activation-checkpointing", "recompute activations in backward instead of keeping them"
)
SAVE_MEMORY = _add(
    "save-memory", "keep less for backward: recompute what is cheap, encode what compresses exactly"
)
NO_CHECKPOINT = _add("no-checkpoint", "checkpoint fewer blocks: only as many as memory requires")
SMALLER_BATCH = _add(
    "smaller-batch", "use a smaller batch and accumulate gradients over several passes"
)
SHARDING = _add("sharding", "shard optimizer state, gradients and parameters (FSDP)")
EXPANDABLE_SEGMENTS = _add(
    "expandable-segments",
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: segments grow instead of leaving holes",
)
STEADY_SHAPES = _add(
    "steady-shapes",
    "use the same shapes in every step: pad to a few lengths, drop the last partial batch",
)
DETACH = _add(
    "detach", "keep loss.item() or loss.detach(), not the loss: it keeps its whole graph alive"
)
SNAPSHOT = _add(
    "snapshot",
    "call torch.cuda.memory._dump_snapshot() after some steps and run `stepscope explain` on "
    "the file: it names the lines that allocate",
)

TRACEMALLOC = _add(
    "tracemalloc",
    "compare two snapshots of tracemalloc, 1,000 steps apart: they name the lines that allocate",
)

# Threads and the machine
THREADS = _add("threads", "set OMP_NUM_THREADS to the number of free cores per rank")
ONE_THREAD = _add("one-thread", "set OMP_NUM_THREADS=1: no operator here is long enough to share")
PIN_RANKS = _add("pin-ranks", "give each rank cores of its own (taskset -c)")
FEWER_RANKS = _add("fewer-ranks", "start no more ranks than there are cores")
IDLE_MACHINE = _add(
    "idle-machine",
    "stop the other programs, or keep them off these cores (taskset, nice); until then every "
    "measured time is too long",
)

CPU_ALLOCATOR = _add(
    "cpu-allocator", "load tcmalloc or jemalloc (LD_PRELOAD): the host allocates and frees faster"
)

# Communication
BUCKET_MB = _add(
    "bucket-mb",
    "change bucket_cap_mb of DDP: smaller buckets start earlier, larger ones need fewer calls",
)
FIRST_BUCKET_MB = _add(
    "first-bucket-mb",
    "change the size of DDP's first bucket: a smaller one starts earlier in backward",
)
TUNED_BUCKETS = _add(
    "tuned-buckets",
    "let stepscope try DDP's bucket sizes during the first 58 steps and keep the fastest",
)
BUCKET_VIEW = _add(
    "bucket-view", "give DDP gradient_as_bucket_view=True: gradients are not copied into buckets"
)
STATIC_GRAPH = _add(
    "static-graph", "give DDP static_graph=True: it looks for unused parameters only once"
)
COMPRESS_GRADIENTS = _add(
    "compress-gradients",
    "register DDP's bf16_compress_hook: gradients are exchanged in half the bytes",
)
POWERSGD = _add(
    "powersgd", "register DDP's powerSGD_hook: gradients are exchanged as low-rank products"
)
NO_BUFFER_BROADCAST = _add(
    "no-buffer-broadcast",
    "give DDP broadcast_buffers=False: running statistics stay each rank's own",
)
SYNC_ONCE = _add(
    "sync-once",
    "put all but the last backward pass of a step under DDP's no_sync(): gradients are exchanged "
    "once a step",
)
ACCUMULATE = _add(
    "accumulate", "accumulate gradients and communicate only every N-th step (no_sync)"
)
BANDWIDTH = _add("bandwidth", "send fewer bytes (bf16 communication hook) or use a faster link")
FSDP_PREFETCH = _add(
    "fsdp-prefetch",
    "gather blocks ahead: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
)
LARGER_BLOCKS = _add("larger-blocks", "call fully_shard on larger blocks: fewer, longer gathers")
KEEP_GATHERED = _add(
    "keep-gathered",
    "set reshard_after_forward=False if memory allows: backward then gathers nothing again",
)
REDUCE_DTYPE = _add(
    "reduce-dtype", "gather and reduce in bf16 (MixedPrecisionPolicy): half the bytes"
)
FEWER_SPLITS = _add(
    "fewer-splits",
    "split layers over fewer ranks, inside one host, and use the other ranks as replicas",
)
SEQUENCE_PARALLEL = _add(
    "sequence-parallel",
    "use SequenceParallel between the split layers: its reduce-scatter and gather can overlap",
)
LESS_OFTEN = _add("less-often", "make these calls every N-th step, or join them into one")
USE_NCCL = _add("use-nccl", "start the process group with NCCL instead of gloo")

# Ranks together
WRAP_MODEL = _add(
    "wrap-model",
    "call init_process_group and wrap the model (DistributedDataParallel, fully_shard), or "
    "let the trainer do it; if one process was meant, start only one",
)
START_AS_JOB = _add(
    "start-as-job",
    "if they should train one model, start them with torchrun and wrap the model in "
    "DistributedDataParallel; otherwise nothing is wrong",
)
MICRO_BATCHES = _add("micro-batches", "use more micro-batches")
BALANCE_STAGES = _add("balance-stages", "move layers away from the slowest pipeline stage")
INTERLEAVE = _add(
    "interleave",
    "put several stages on each rank (Interleaved1F1B): filling and draining the pipeline "
    "takes that many times less",
)
CHECK_HOST = _add(
    "check-host",
    "on its host, look for other processes, a throttled or smaller device, or a wrong CPU "
    "binding; try the rank on another host",
)
NO_STRAGGLER = _add("no-straggler", "bring the slow rank up to the pace of the others")
BALANCE = _add("balance", "give every rank the same amount of work")
BOUNDED_STALENESS = _add(
    "bounded-staleness",
    "train through stepscope.fix.server with bounded consistency: workers run ahead of a slow step",
)
NO_BARRIER = _add(
    "no-barrier",
    "train through stepscope.fix.server with eventual consistency: nobody waits, and reads are "
    "as stale as the slowest worker makes them",
)
KEEP_BARRIER = _add(
    "keep-barrier",
    "train synchronously (all-reduce): it gives as many updates, and every one of them is fresh",
)
COMPRESS_PUSHES = _add(
    "compress-pushes", "send smaller gradients to the server: its compression bf16 or top-k"
)
MORE_SHARDS = _add("more-shards", "spread the parameters over more server shards, on more hosts")
CHECK_NCCL = _add("check-nccl", "record with `stepscope run --nccl-debug` to see the transports")

# NCCL's environment
UNSET_NCCL_VARIABLES = _add(
    "unset-nccl-variables", "unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA where they are set"
)
FAST_NETWORK = _add(
    "fast-network",
    "give the job the fast network: /dev/infiniband, libibverbs and `ulimit -l unlimited` in "
    "the container, or the cloud's NCCL network plugin",
)
FASTER_SOCKETS = _add(
    "faster-sockets",
    "if there are only sockets: set NCCL_SOCKET_IFNAME to the fastest interface, and raise "
    "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD",
)
ONE_MACHINE = _add(
    "one-machine",
    "let the ranks on one machine reach each other: unset NCCL_P2P_DISABLE and "
    "NCCL_SHM_DISABLE; run them in one container, or with --ipc=host and all GPUs",
)
P2P = _add("p2p", "allow GPU-to-GPU access")
SAME_ENVIRONMENT = _add(
    "same-environment",
    "start every rank with the same NCCL_* variables, drivers and devices; compare "
    "`nvidia-smi topo -m` on the machines named in the evidence",
)
READ_NCCL_WARNINGS = _add("read-nccl-warnings", "read the first warning: later ones follow from it")

# Knowing more
CALIBRATE = _add("calibrate", "run `stepscope calibrate` on the idle machine")
STEPSCOPE_RUN = _add("stepscope-run", "record the training with `stepscope run`")
LIGHTER_PROFILE = _add("lighter-profile", "profile fewer steps, or without shapes and stacks")

# Known to the fix room, offered by no finding yet.
RESERVED = frozenset(
    remedy.id
    for remedy in (
        FOREACH_OPTIMIZER,
        SET_TO_NONE,
        CUDNN_BENCHMARK,
        SDPA,
        PREFETCH_FACTOR,
        CPU_ALLOCATOR,
        FIRST_BUCKET_MB,
        TUNED_BUCKETS,
        BUCKET_VIEW,
        STATIC_GRAPH,
        COMPRESS_GRADIENTS,
        POWERSGD,
        NO_BUFFER_BROADCAST,
    )
)
