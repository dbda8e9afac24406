"""BERT large: bert-medium's training with the published large model."""

from __future__ import annotations

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.bert_medium import MEDIUM, TINY, build

LARGE = {**MEDIUM, "width": 1024, "heads": 16, "layers": 24, "lr": 1e-4}
WORKLOAD = TrainingWorkload(
    name="bert-large",
    task="language model",
    source="Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2018 (340 M)",
    samples="sentence pairs",
    sizes={
        "tiny": {**LARGE, **TINY, "heads": 8, "layers": 3, "lr": 2e-3},
        "small": {**LARGE, "batch": 16},
        "paper": LARGE,
    },
    targets={
        "tiny": Target(loss=3.5, steps=60),
        "small": Target(loss=10.0, steps=60),
        "paper": Target(loss=10.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention"}),
)
