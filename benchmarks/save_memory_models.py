"""The trainings and the ways of save_memory_table.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench import catalogue
from stepscope.bench.workload import TrainingPlace
from stepscope.fix import save_memory
from stepscope.fix.model_structure import find_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.saved import MemorySaver

    Step = Callable[[int], torch.Tensor]

WARM_UP = 4  # passes before the recorded one
# The suite's workloads with batches that keep an H200 busy: one that waits for its host would
# show what following a plan costs the host, and nothing else.
WORKLOADS: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 128},
    "vgg16": {"batch": 64},
    "inception-v3": {"batch": 128},
    "densenet121": {"batch": 128},
    "seq2seq": {"batch": 1024},
    "gpt2": {"batch": 16, "length": 1024},
    "bert-large": {"batch": 64},
    "diffusion-unet": {"batch": 256},
}


class Seq2SeqLSTM(nn.Module):
    """Encoder and decoder LSTMs with additive attention: for every target word each source word
    gets a normalised sum of two vectors, T x T x N values that grow out of 2 x T x N."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.source = nn.Embedding(words, width)
        self.target = nn.Embedding(words, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.keys, self.query = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(0.2)
        self.output = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, (hidden, cell) = self.encoder(self.source(source))
        keys, words = self.keys(memory), self.target(target)
        state = (hidden[0], cell[0])
        outputs = []
        for place in range(words.shape[1]):
            energies = torch.tanh(self.norm(self.query(state[0])[:, None] + keys))
            weights = torch.softmax(self.score(energies).squeeze(-1), -1)
            context = torch.bmm(weights[:, None], memory).squeeze(1)
            state = self.cell(self.dropout(torch.cat([words[:, place], context], -1)), state)
            outputs.append(state[0])
        return self.output(torch.stack(outputs, 1))


SEQ2SEQ = {"words": 8000, "width": 512, "length": 50}
TINY_SEQ2SEQ = {"words": 64, "width": 32, "length": 10}


def sentence_step(model: Any, optimizer: torch.optim.Optimizer, shape: dict[str, int]) -> Step:
    """Trains on made-up sentences: the target is the source in reverse."""
    device = next(model.parameters()).device
    draw = torch.Generator(device).manual_seed(0)
    size = (shape["batch"], shape["length"])
    source = torch.randint(shape["words"], size, generator=draw, device=device)
    target = source.flip(1)
    shifted = functional.pad(target[:, :-1], (1, 0))

    def step(number: int) -> torch.Tensor:
        del number
        loss = functional.cross_entropy(model(source, shifted).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def as_it_is(model: nn.Module) -> None:
    del model


@dataclass(slots=True)
class Changed:
    """What a way did to the model."""

    change: Callable[[nn.Module], Any]
    model: Any = None
    saver: MemorySaver | None = None

    def apply(self, model: nn.Module) -> Any:
        changed = self.change(model)
        self.model = model if changed is None or not isinstance(changed, nn.Module) else changed
        if changed is not None and not isinstance(changed, nn.Module):
            self.saver = changed
        return self.model


@dataclass(frozen=True, slots=True)
class ChangedPlace(TrainingPlace):
    """A place that changes every model that is put there."""

    changed: Changed = field(default_factory=lambda: Changed(as_it_is))

    def put(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        return self.changed.apply(model)


def build(name: str, changed: Changed, device: torch.device, *, tiny: bool) -> Step:
    """The step of one training, with its model changed."""
    torch.manual_seed(0)
    if name == "seq2seq":
        batch = 8 if tiny else WORKLOADS[name]["batch"]
        shape = {**(TINY_SEQ2SEQ if tiny else SEQ2SEQ), "batch": batch}
        return build_seq2seq(shape, changed, device)
    workload = catalogue.load(name)
    changes = {} if tiny else WORKLOADS[name]
    config = workload.config("tiny" if tiny else "small", {**changes, "batches": 1})
    place = ChangedPlace(device, changed=changed)
    return workload.build(config, place)


def build_seq2seq(shape: dict[str, int], changed: Changed, device: torch.device) -> Step:
    model = Seq2SeqLSTM(shape["words"], shape["width"]).to(device)
    trained = changed.apply(model)
    return sentence_step(trained, torch.optim.Adam(model.parameters(), lr=1e-3), shape)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks; else the parts of the largest list of modules; else its children."""
    found = find_blocks(model)
    if found is not None:
        return list(found.modules)
    lists = [m for m in model.modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
    largest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=model)
    return [child for child in largest.children() if any(True for _ in child.parameters())]


def checkpoint_blocks(model: nn.Module, **options: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    blocks = blocks_of(model)
    if not blocks:
        raise ValueError("the model has no blocks")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _products() -> list[Any]:
    aten = torch.ops.aten
    names = (
        "mm", "bmm", "addmm", "convolution", "_cudnn_rnn", "_thnn_fused_lstm_cell",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    )  # fmt: skip
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


def checkpoint_selectively(model: nn.Module) -> None:
    """Torch's selective activation checkpointing: results of products are saved."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    products = _products()
    checkpoint_blocks(
        model, context_fn=functools.partial(create_selective_checkpoint_contexts, products)
    )


def compile_with(budget: float | None) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        import torch._functorch.config as config

        config.activation_memory_budget = 1.0 if budget is None else budget
        torch._dynamo.reset()
        return torch.compile(model)

    return change


def ours(**target: Any) -> Callable[[nn.Module], MemorySaver]:
    return lambda model: save_memory(model, warmup=WARM_UP, **target)


# The most telling ones first: a run that is cut has them all.
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": as_it_is,
    "ours 5%": ours(max_slowdown=0.05),
    "ours 15%": ours(max_slowdown=0.15),
    "ours 5%, heavy": ours(max_slowdown=0.05, heavy=True),
    "ours 15%, heavy": ours(max_slowdown=0.15, heavy=True),
    "block checkpointing": checkpoint_blocks,
    "selective checkpointing": checkpoint_selectively,
    "ours, least": ours(),
    "compile": compile_with(None),
    "compile, budget 0.5": compile_with(0.5),
    "compile, budget 0.7": compile_with(0.7),
}
COMPILED = tuple(way for way in WAYS if way.startswith("compile"))
