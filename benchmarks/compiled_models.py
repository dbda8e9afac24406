"""Models for compiled and graphed steps: each takes its batch and returns its loss.

    python benchmarks/compiled_models.py MODEL [--tiny] [--steps 14]    trains one, compiled

Weights and data are random: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parent.parent / "src"))

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[torch.Tensor, ...]


class CompiledCase(NamedTuple):
    """A model whose call returns the loss, and one batch of it."""

    model: nn.Module
    batch: Batch


class LossOf(nn.Module):
    """Classes by the last input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        *inputs, labels = batch
        output = self.model(*inputs)
        logits = output.logits if hasattr(output, "logits") else output
        return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class NoiseLoss(LossOf):
    """The last input is the noise to predict."""

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        *inputs, noise = batch
        return functional.mse_loss(self.model(*inputs).float(), noise)


class WordLSTM(nn.Module):
    """The next word: an embedding, two LSTM layers written out step by step, and a product."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = [self._zeros(ids) for _ in self.cells]
        outputs = []
        for x in self.words(ids).unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, states[number])
                x = states[number][0]
            outputs.append(x)
        logits: torch.Tensor = self.head(torch.stack(outputs, 1))
        return logits

    def _zeros(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = torch.zeros(len(ids), self.head.in_features, device=ids.device)
        return zeros, zeros


def _words(model: nn.Module, words: int, batch: int, length: int) -> CompiledCase:
    ids = torch.randint(0, words, (batch, length))
    return CompiledCase(LossOf(model), (ids, ids.roll(-1, 1)))


def gpt2(*, tiny: bool) -> CompiledCase:
    from transformers import GPT2Config, GPT2LMHeadModel

    words, batch, length = (1000, 4, 64) if tiny else (50257, 8, 1024)
    small = {"n_layer": 2, "n_embd": 128, "n_head": 4} if tiny else {}
    config = GPT2Config(vocab_size=words, n_positions=length, use_cache=False, **small)
    return _words(GPT2LMHeadModel(config), words, batch, length)


def llama(*, tiny: bool) -> CompiledCase:
    from transformers import LlamaConfig, LlamaForCausalLM

    words, batch, length = (1000, 2, 64) if tiny else (32000, 4, 1024)
    width, layers, heads = (128, 2, 4) if tiny else (1536, 12, 16)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=2752 * width // 1024,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        use_cache=False,
    )
    return _words(LlamaForCausalLM(config), words, batch, length)


def bert(*, tiny: bool) -> CompiledCase:
    from transformers import BertConfig, BertForMaskedLM

    words, batch, length = (1000, 4, 32) if tiny else (30522, 32, 128)
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=words, **(small | {"intermediate_size": 256} if tiny else {}))
    return _words(BertForMaskedLM(config), words, batch, length)


def vit(*, tiny: bool) -> CompiledCase:
    from transformers import ViTConfig, ViTForImageClassification

    edge, batch, classes = (32, 4, 10) if tiny else (224, 64, 1000)
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"intermediate_size": 256, "patch_size": 8}
    config = ViTConfig(image_size=edge, num_labels=classes, **(small if tiny else {}))
    images = torch.randn(batch, 3, edge, edge)
    labels = torch.randint(0, classes, (batch,))
    return CompiledCase(LossOf(ViTForImageClassification(config)), (images, labels))


def resnet50(*, tiny: bool) -> CompiledCase:
    from stepscope.bench.workloads.image_classifiers import RESNET50_WORKLOAD, ResNet

    config = RESNET50_WORKLOAD.config("tiny" if tiny else "small")
    images = torch.randn(config.batch, 3, config.image, config.image)
    labels = torch.randint(0, config.classes, (config.batch,))
    return CompiledCase(LossOf(ResNet(config)), (images, labels))


def unet(*, tiny: bool) -> CompiledCase:
    from stepscope.bench.workloads.image_generators import DIFFUSION_UNET_WORKLOAD, DiffusionUNet

    config = DIFFUSION_UNET_WORKLOAD.config("tiny" if tiny else "small")
    images = torch.randn(config.batch, 3, config.image, config.image)
    times = torch.randint(0, 1000, (config.batch,))
    return CompiledCase(NoiseLoss(DiffusionUNet(config)), (images, times, torch.randn_like(images)))


def lstm(*, tiny: bool) -> CompiledCase:
    words, batch, length, width = (200, 4, 6, 64) if tiny else (10000, 64, 32, 650)
    return _words(WordLSTM(words, width), words, batch, length)


def mlp(*, tiny: bool) -> CompiledCase:
    """Few kernels: versions of torch that compile each one by itself are done in seconds."""
    width, batch = (64, 16) if tiny else (4096, 8192)
    layers = nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)
    )
    labels = torch.randint(0, width, (batch,))
    return CompiledCase(LossOf(layers), (torch.randn(batch, width), labels))


MODELS: dict[str, Callable[..., CompiledCase]] = {
    "resnet50": resnet50,
    "gpt2": gpt2,
    "llama": llama,
    "unet": unet,
    "bert": bert,
    "vit": vit,
    "lstm": lstm,
    "mlp": mlp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, batch = MODELS[options.model](tiny=options.tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compiled = torch.compile(model)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    main()
