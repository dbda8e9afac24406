"""18 steps in 3 epochs that also evaluate, save, collect garbage and compile, by their own clock.

Prints, in JSON, how many nanoseconds each of these took, by the number of the step that had begun;
the meters of its steps as in PyTorch's ImageNet example; and the losses.
"""

from safetensors.torch import save_file  # isort: skip  (it imports torch)
import gc
import io
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(6):
            time.sleep(0.01)
            yield torch.full((4 + number, 8), 0.1 * number)


torch.manual_seed(0)
torch.set_num_threads(1)
frozen, model = nn.Linear(8, 8), nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stream = DataLoader(Stream(), batch_size=None, num_workers=1, persistent_workers=True)
others = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=4)
validation = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4)
large = torch.ones(5_000_000)
spent = defaultdict(dict)
meters, losses = [], []
step = 0


def timed(name, work):
    began = time.perf_counter_ns()
    work()
    spent[name][step] = time.perf_counter_ns() - began


def evaluate():
    model.eval()
    with torch.no_grad():
        for (x,) in validation:
            model(x)
            time.sleep(0.02)
    model.train()


@torch.no_grad()
def evaluate_quietly():
    for (x,) in validation:
        model(x)
        time.sleep(0.02)


def collect():
    heap = [[number] for number in range(100_000)]
    gc.collect()
    heap.clear()


@torch.compile(backend="eager")
def compiled(x):
    return x.sin() + 1


def compile_twice():
    compiled(torch.ones(3))
    compiled(torch.ones(3, dtype=torch.float64))


def compile_after_reset():
    torch._dynamo.reset()
    compiled(torch.ones(3))


RARELY = {
    2: ("evaluation", evaluate_quietly),
    3: ("checkpoint", lambda: torch.save(large, io.BytesIO())),
    4: ("checkpoint", lambda: save_file({"x": large}, Path(sys.argv[1]))),
    8: ("gc", collect),
    9: ("compile", compile_twice),
    10: ("compile", compile_after_reset),
    16: ("evaluation", evaluate),
}
for _epoch in range(3):
    end = time.perf_counter_ns()
    for x, (y,) in zip(stream, others, strict=True):
        frozen.eval()
        optimizer.zero_grad()
        loss = model(frozen(x)).square().sum() + model(y).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        step += 1
        if step in RARELY:
            timed(*RARELY[step])
        meters.append(time.perf_counter_ns() - end)
        end = time.perf_counter_ns()
    timed("between", lambda: (evaluate(), time.sleep(0.03)))
print(json.dumps({"spent": spent, "meters": meters, "losses": losses}))
