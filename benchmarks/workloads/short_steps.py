"""Trainings of short steps, each a function that runs one: `build(name, device)`.

Ordinary training code: it knows nothing of capture.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], Any]

ON_GPU = ("mlp", "graph-transformer", "gru", "gpt2", "graphed", "compiled")
ON_CPU = ("tiny", "loader", "ddp", "gan")


def build(name: str, device: str) -> Step:
    """Return what runs one step."""
    torch.manual_seed(0)
    builders = {
        "mlp": mlp,
        "graph-transformer": graph_transformer,
        "gru": gru,
        "gpt2": gpt2,
        "graphed": graphed,
        "compiled": compiled,
        "tiny": tiny,
        "loader": loader,
        "ddp": ddp,
        "gan": gan,
    }
    return builders[name](device)


def layers(width: int, depth: int, out: int) -> nn.Sequential:
    inner = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, out))


def batches(*shape: int, device: str, classes: int) -> Iterator[tuple[Any, Any]]:
    made = [
        (torch.randn(*shape, device=device), torch.randint(classes, shape[:1], device=device))
        for _ in range(16)
    ]
    return itertools.cycle(made)


def mlp(device: str) -> Step:
    """Eight layers with AdamW: the host decides."""
    model = layers(1024, 8, 10).to(device)
    return _trained(model, batches(64, 1024, device=device, classes=10))


def _trained(model: Any, data: Iterator[tuple[Any, Any]]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Any:
        inputs, wanted = next(data)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        return loss

    return step


def graph_transformer(device: str) -> Step:
    """Four layers of attention along the edges of a graph."""
    from torch_geometric.nn import TransformerConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(TransformerConv(64, 16, heads=4) for _ in range(4))
            self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
            self.out = nn.Linear(64, 7)

        def forward(self, x: Any) -> Any:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = norm(x + torch.relu(layer(x, edges)))
            return self.out(x)

    edges = torch.randint(2000, (2, 16_000), device=device)
    return _trained(Net().to(device), batches(2000, 64, device=device, classes=7))


def gru(device: str) -> Step:
    """A classifier of texts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20_000, 128)
            self.gru = nn.GRU(128, 256, batch_first=True)
            self.out = nn.Linear(256, 4)

        def forward(self, ids: Any) -> Any:
            return self.out(self.gru(self.words(ids))[1][-1])

    texts = torch.randint(20_000, (16, 32, 64), device=device)
    labels = torch.randint(4, (16, 32), device=device)
    return _trained(Net().to(device), itertools.cycle(list(zip(texts, labels, strict=True))))


def gpt2(device: str) -> Step:
    """GPT-2 small in bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(50_000, (8, 256), device=device)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def graphed(device: str) -> Step:
    """The whole step is one CUDA graph."""
    model = layers(1024, 6, 10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    data = batches(256, 1024, device=device, classes=10)
    inputs, wanted = next(data)
    held = inputs.clone(), wanted.clone()

    def train() -> Any:
        loss = functional.cross_entropy(model(held[0]), held[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()

    def step() -> Any:
        inputs, wanted = next(data)
        held[0].copy_(inputs)
        held[1].copy_(wanted)
        graph.replay()
        return loss

    return step


def compiled(device: str) -> Step:
    """torch.compile, eager optimizer."""
    model = torch.compile(layers(512, 8, 10).to(device))
    return _trained(model, batches(64, 512, device=device, classes=10))


def tiny(_device: str) -> Step:
    """Some 0.2 ms on a CPU."""
    return _trained(layers(16, 2, 4), batches(8, 16, device="cpu", classes=4))


def loader(_device: str) -> Step:
    """The same, from a DataLoader of 200 batches."""
    rows = torch.utils.data.TensorDataset(torch.randn(1600, 16), torch.randint(4, (1600,)))
    source = torch.utils.data.DataLoader(rows, batch_size=8)
    return _trained(layers(16, 2, 4), itertools.chain.from_iterable(itertools.repeat(source)))


def ddp(_device: str) -> Step:
    """The same on every rank of a gloo job."""
    model = nn.parallel.DistributedDataParallel(layers(16, 2, 4))
    return _trained(model, batches(8, 16, device="cpu", classes=4))


def gan(_device: str) -> Step:
    """Two optimizers, of which each steps once."""
    one, two = layers(16, 2, 16), layers(16, 2, 1)
    first = torch.optim.SGD(one.parameters(), lr=1e-3)
    second = torch.optim.SGD(two.parameters(), lr=1e-3)
    noise = torch.randn(8, 16)

    def step() -> Any:
        second.zero_grad()
        two(one(noise).detach()).mean().backward()
        second.step()
        first.zero_grad()
        loss = -two(one(noise)).mean()
        loss.backward()
        first.step()
        return loss

    return step


def in_thread(work: Callable[[], None]) -> None:
    """Train in a thread that is not the main one."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
