"""Traces that tests read: our own tiny ones, and real ones next to the repository."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parent.parent
GOLDEN = REPO / "tests" / "golden"
SHARED = REPO.parent / "shared"
# The files are listed by name, so that a missing one shows as a skipped test. The variants differ
# from another one only by batch or precision.
VARIANTS = ("gpt2s_b16_fp32", "gpt2s_b4_fp32", "gpt2s_b8_tf32", "vitb16_b64_fp32")
SHARED_TRACES = [
    *(
        f"h200/{name}"
        for name in (
            "gpt2s_b16_fp32",
            "gpt2s_b1_bf16_loop_sync",
            "gpt2s_b4_fp32",
            "gpt2s_b8_bf16",
            "gpt2s_b8_bf16_ckpt",
            "gpt2s_b8_bf16_compile",
            "gpt2s_b8_bf16_ddp1",
            "gpt2s_b8_bf16_fused",
            "gpt2s_b8_bf16_graph",
            "gpt2s_b8_bf16_stack",
            "gpt2s_b8_fp32",
            "gpt2s_b8_tf32",
            "mlp_b32_fp32_fused",
            "mlp_b32_fp32_graph",
            "mlp_b32_fp32_loop",
            "vitb16_b64_bf16",
            "vitb16_b64_fp32",
        )
    ),
    *(
        f"third_party/{name}"
        for name in (
            "a100_alexnet",
            "a100_event_sync",
            "a100_event_sync_multi_stream",
            "a100_legacy_control",
            "a100_nccl_rank0of2",
            "cpu_only_gloo_rank34",
            "h100_bert_small",
            "mi300x_bert_small",
            "mi300x_resnet_checkpoint_rank0of8",
            "pair_rank0of128",
            "pair_rank1of128",
        )
    ),
]
