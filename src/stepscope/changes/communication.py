"""What ranks exchange, over which links, and how they wait for each other."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf
from stepscope.changes.memory import describe_factor
from stepscope.text.words import plural


def _shares_batch(value: str) -> bool:
    return value.endswith(":strong")


def _label_workers(value: str) -> str:
    count = value.partition(":")[0]
    shared = " (sharing the batch)" if _shares_batch(value) else ""
    return f"{count} {plural(int(count) if count.isdecimal() else 0, 'worker')}{shared}"


CHANGES = (
    Change(
        "sync-once",
        "Run all but the last backward pass of a step under DDP's no_sync(): gradients are "
        "then exchanged once a step",
        application=Application(
            Code("fix.remedies.sync_once:SYNC_ONCE"),
            Effect.ROUNDING,
            values=(),
            family="ddp-passes",  # a static graph and no_sync() exclude each other
        ),
    ),
    Change(
        "bucket-view",
        "Pass gradient_as_bucket_view=True to DDP: gradients are not copied into buckets",
        application=Application(
            Code("fix.remedies.ddp:BUCKET_VIEW"),
            Effect.ROUNDING,  # DDP divides by the number of ranks instead of multiplying by 1/ranks
        ),
    ),
    Change(
        "static-graph",
        "Pass static_graph=True to DDP: it looks for unused parameters only once",
        application=Application(
            Code("fix.remedies.ddp:STATIC_GRAPH"),
            Effect.ROUNDING,  # sums of more than two ranks may be made in another order
            family="ddp-passes",  # a static graph and no_sync() exclude each other
        ),
    ),
    Change(
        "bucket-mb",
        "Change bucket_cap_mb of DDP: smaller buckets start earlier, larger ones need fewer calls",
        prediction=WhatIf(
            Code("predict.whatifs.ranks:predict_bucket_mb"),
            help="DDP's bucket_cap_mb: exchange gradients in buckets of N MiB (bucket-mb=25)",
            label="DDP buckets of {} MiB",
            stage=ApplyStage.BUCKETS,
            keeps_peak=True,
        ),
        application=Application(
            Code("fix.remedies.ddp:BUCKET_MB"),
            Effect.ROUNDING,  # sums of more than two ranks are made in another order
            values=("5", "10", "50", "100", "1"),
            family="ddp-buckets",
        ),
        setting="bucket-mb=5",
        predicted_as=("bucket-mb=5", "bucket-mb=100"),
    ),
    Change(
        "first-bucket-mb",
        "Change the size of DDP's first bucket: a smaller one starts earlier in backward",
        application=Application(
            Code("fix.remedies.ddp:FIRST_BUCKET_MB"),
            Effect.ROUNDING,
            values=("0.25", "4"),
            family="ddp-buckets",
        ),
    ),
    Change(
        "tuned-buckets",
        "Let stepscope try DDP's bucket sizes during the first 58 steps and use the fastest",
        application=Application(Code("fix.ddp.remedy:FIX"), Effect.ROUNDING, family="ddp-buckets"),
    ),
    Change(
        "compress-gradients",
        "Register DDP's bf16_compress_hook: gradients are exchanged in half the bytes",
        application=Application(
            Code("fix.remedies.ddp:COMPRESS_GRADIENTS"), Effect.ROUNDING, family="ddp-hook"
        ),
        predicted_as=("bandwidth=2",),  # bf16 gradients are half the bytes of fp32 ones
    ),
    Change(
        "no-buffer-broadcast",
        "Pass broadcast_buffers=False to DDP: running statistics stay each rank's own",
        application=Application(Code("fix.remedies.ddp:NO_BUFFER_BROADCAST"), Effect.TRAINING),
    ),
    Change(
        "powersgd",
        "Register DDP's powerSGD_hook: gradients are exchanged as low-rank matrices",
        application=Application(
            Code("fix.remedies.ddp:POWERSGD"),
            Effect.TRAINING,
            values=("1", "4"),
            family="ddp-hook",
        ),
    ),
    Change(
        "workers",
        prediction=WhatIf(
            Code("predict.whatifs.ranks:predict_workers"),
            help="N data-parallel workers, each with its own batch (workers=8; 8:strong divides "
            "one batch)",
            label=_label_workers,
            stage=ApplyStage.WORKERS,
            keeps_peak=True,
            shares_batch=_shares_batch,
        ),
    ),
    Change(
        "hosts",
        prediction=WhatIf(
            Code("predict.whatifs.ranks:predict_hosts"),
            help="N hosts, each with its ranks and batches (hosts=8; hosts=8:10GB/s:20us states "
            "the link)",
            label=Code("predict.whatifs.ranks:label_hosts"),
            stage=ApplyStage.WORKERS,
            keeps_peak=True,
        ),
    ),
    Change(
        "zero",
        prediction=WhatIf(
            Code("predict.whatifs.ranks:predict_zero"),
            help="shard optimizer state (1), also gradients (2), also parameters (3) over the "
            "workers",
            label="ZeRO stage {}",
            stage=ApplyStage.SHARD,
        ),
    ),
    Change(
        "bandwidth",
        "Send fewer bytes with DDP's bf16_compress_hook, or use a faster link",
        prediction=WhatIf(
            Code("predict.whatifs.ranks:predict_bandwidth"),
            help="links with N times the bandwidth (bandwidth=2)",
            label=lambda value: f"{describe_factor(value)} the bandwidth",
            stage=ApplyStage.LINKS,
            usual=("2",),
            for_several_ranks=True,
            is_goal=True,
            keeps_peak=True,
        ),
        predicted_as=("bandwidth=2",),
        ways=("compress-gradients",),
    ),
    Change(
        "latency",
        prediction=WhatIf(
            Code("predict.whatifs.ranks:predict_latency"),
            help="collectives with N times the latency (latency=0.5)",
            label=lambda value: f"{describe_factor(value)} the latency",
            stage=ApplyStage.LINKS,
            keeps_peak=True,
        ),
    ),
    Change(
        "no-straggler",
        "Bring the slow rank up to the pace of the others",
        prediction=WhatIf(
            Code("predict.whatifs.slow_ranks:predict_no_straggler"),
            help="the slowest rank takes as long as the median rank",
            label="no slow rank",
            stage=ApplyStage.BALANCE,
            takes_value=False,
            usual=("",),
            for_several_ranks=True,
            is_goal=True,
            keeps_peak=True,
            needs_ceilings=False,
        ),
        predicted_as=("no-straggler",),
    ),
    Change(
        "consistency",
        prediction=WhatIf(
            Code("predict.whatifs.slow_ranks:predict_consistency"),
            help="train through a parameter server (strong, bounded:3, eventual or weak:4)",
            label=lambda value: f"a parameter server with {value} consistency",
            stage=ApplyStage.BALANCE,
            for_several_ranks=True,
            keeps_peak=True,
            needs_ceilings=False,
        ),
    ),
    Change(
        "fsdp-prefetch",
        "Gather blocks ahead: call set_modules_to_forward_prefetch and "
        "set_modules_to_backward_prefetch",
    ),
    Change("larger-blocks", "Call fully_shard on larger blocks: fewer, longer gathers"),
    Change(
        "keep-gathered",
        "Pass reshard_after_forward=False to fully_shard if memory allows: backward then "
        "gathers nothing again",
    ),
    Change("reduce-dtype", "Gather and reduce in bf16 (MixedPrecisionPolicy): half the bytes"),
    Change(
        "fewer-splits",
        "Split layers over fewer ranks, inside one host, and use the other ranks as replicas",
    ),
    Change(
        "sequence-parallel",
        "Use SequenceParallel between the split layers: its reduce-scatter and gather can overlap",
    ),
    Change("less-often", "Make these calls every N steps, or join them into one"),
    Change("use-nccl", "Start the process group with NCCL instead of gloo"),
    Change(
        "wrap-model",
        "Call init_process_group and wrap the model in DistributedDataParallel or "
        "fully_shard, or let the trainer do it. If one process was meant, start only one",
    ),
    Change(
        "start-as-job",
        "If they should train one model, start them with torchrun and wrap the model in "
        "DistributedDataParallel. Otherwise nothing is wrong",
    ),
    Change("micro-batches", "Use more micro-batches"),
    Change("balance-stages", "Move layers away from the slowest pipeline stage"),
    Change(
        "interleave",
        "Put several stages on each rank (Interleaved1F1B): filling and draining the pipeline"
        " takes that many times less",
    ),
    Change(
        "check-host",
        "On its host, look for other processes, a throttled or smaller device, or a wrong CPU"
        " binding. Try the rank on another host",
    ),
    Change("balance", "Give every rank the same amount of work"),
    Change(
        "bounded-staleness",
        "Train through stepscope.fix.server with bounded consistency: workers then run ahead "
        "of a slow step",
        predicted_as=("consistency=bounded:3",),
    ),
    Change(
        "no-barrier",
        "Train through stepscope.fix.server with eventual consistency: nobody waits, but "
        "reads are as stale as the slowest worker makes them",
        predicted_as=("consistency=eventual",),
    ),
    Change(
        "keep-barrier",
        "Train synchronously (all-reduce): it gives as many updates, and all of them are fresh",
    ),
    Change(
        "compress-pushes",
        "Send smaller gradients to the server: set its compression to bf16 or top-k",
    ),
    Change("more-shards", "Spread the parameters over more server shards, on more hosts"),
    Change("check-nccl", "Record with `stepscope run --nccl-debug` to see the transports"),
    Change(
        "unset-nccl-variables", "Unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA where they are set"
    ),
    Change(
        "fast-network",
        "Give the job the fast network: /dev/infiniband, libibverbs and `ulimit -l unlimited`"
        " in the container, or the cloud's NCCL network plugin",
    ),
    Change(
        "faster-sockets",
        "If there are only sockets, set NCCL_SOCKET_IFNAME to the fastest interface, and "
        "raise NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD",
    ),
    Change(
        "one-machine",
        "Unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, and run the ranks of a machine in one "
        "container, or with --ipc=host and all GPUs",
    ),
    Change("p2p", "Allow GPU-to-GPU access"),
    Change(
        "same-environment",
        "Start every rank with the same NCCL_* variables, drivers and devices. Compare "
        "`nvidia-smi topo -m` on the machines named in the evidence",
    ),
    Change("read-nccl-warnings", "Read the first warning: later ones often follow from it"),
)
