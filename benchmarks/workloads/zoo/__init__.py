"""Small models of many kinds, to record and to predict: name -> a training step on a device.

`build(name, device, batch)` gives the modules whose parameters are trained, one optimizer group for
each, and functions that run forward once for the batch they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from workloads.zoo import convolutions, more, sequences, tables, transformers

if TYPE_CHECKING:
    from collections.abc import Callable

    from workloads.zoo.workload import Workload


class Model(NamedTuple):
    make: Callable[[str, int], Workload]
    batch: int


MODELS = {
    "bert": Model(transformers.bert, 16),
    "nano": Model(transformers.nano, 16),
    "moe": Model(transformers.moe, 8),
    "llama": Model(transformers.llama, 8),
    "t5": Model(transformers.t5, 16),
    "mixer": Model(transformers.mixer, 64),
    "swin": Model(transformers.swin, 32),
    "resnet": Model(convolutions.resnet, 32),
    "mobile": Model(convolutions.mobile, 32),
    "unet": Model(convolutions.unet, 8),
    "dcgan": Model(convolutions.dcgan, 64),
    "convnext": Model(convolutions.convnext, 32),
    "densenet": Model(convolutions.densenet, 32),
    "diffusion": Model(convolutions.diffusion, 16),
    "vae": Model(convolutions.vae, 64),
    "lstm": Model(sequences.lstm, 32),
    "seq2seq": Model(sequences.seq2seq, 64),
    "wavenet": Model(sequences.wavenet, 8),
    "conformer": Model(sequences.conformer, 16),
    "dlrm": Model(tables.dlrm, 2048),
    "graph": Model(tables.graph, 4),
    "points": Model(tables.points, 32),
    "efficient": Model(more.efficient, 64),
    "volumes": Model(more.volumes, 8),
    "detector": Model(more.detector, 16),
    "linear": Model(more.linear, 8),
    "reader": Model(more.reader, 64),
    "rows": Model(more.rows, 4096),
}


def build(name: str, device: str, batch: int | None = None) -> Workload:
    torch.manual_seed(0)
    model = MODELS[name]
    return model.make(device, batch or model.batch)
