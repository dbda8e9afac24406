"""Training scripts of different make, for tests of remedies. TRAINING in injected.py is the plain
one."""

from __future__ import annotations

_MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.second(F.gelu(self.first(x))))


class Net(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


torch.manual_seed(0)
"""

# A class that keeps its model; accumulates two passes, the loss comes from a method.
TRAINER = (
    _MODEL
    + """\
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compute_loss(self, model, inputs):
        x, y = inputs
        return F.cross_entropy(model(x), y)

    def training_step(self, model, inputs):
        model.train()
        loss = self.compute_loss(model, inputs)
        loss = loss / 2
        loss.backward()
        return loss.detach()

    def fit(self, data):
        for number, inputs in enumerate(data):
            self.training_step(self.model, inputs)
            if number % 2:
                self.optimizer.step()
                self.optimizer.zero_grad()


def main():
    trainer = Trainer(Net())
    trainer.fit(batches(20))


if __name__ == "__main__":
    main()
"""
)

# Lightning-like: one method makes the loss, another one calls backward.
HOOKS = (
    _MODEL
    + """\
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def fit(module, optimizer):
    for batch in batches(10):
        loss = module.training_step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


module = Module()
fit(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
"""
)

# Two models, two optimizers, two backward passes a step.
ADVERSARIAL = """\
import torch
from torch import nn

torch.manual_seed(0)
make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (make, judge)]
for step in range(8):
    real, noise = torch.randn(8, 8), torch.randn(8, 4)
    fake = make(noise)
    judged = judge(real).mean() - judge(fake.detach()).mean()
    judged.backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    made = judge(fake).mean()
    made.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
"""

# Evaluates between steps, with and without gradients.
EVALUATES = """\
import torch
from torch import nn


def evaluate(model):
    model.eval()
    with torch.no_grad():
        print("evaluates", model(torch.ones(2, 16)).dtype)
    print("with gradients", model(torch.ones(2, 16)).dtype)
    print("products", (torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    model.train()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    out = model(torch.randn(8, 16))
    if step == 6:
        print("trains", out.dtype)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 6:
        evaluate(model)
"""

# Has no optimizer's step between its updates, which it makes by hand; a penalty needs the graph.
BY_HAND = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = list(model.parameters())
x, y = torch.randn(64, 16, requires_grad=True), torch.randn(64, 1)
for step in range(6):
    for update in range(5):
        out = model(x)
        slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        loss = (out - y).square().mean() + 0.01 * slope.square().mean()
        trains = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight -= 0.05 * gradient
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    optimizer.step()
    after = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    print(trains, after, f"{loss.item():.2f}")
"""

# Adapts its weights inside of forward and trains by what they have become.
ADAPTS = """\
import torch
from torch import nn


class Adapting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1, bias=False)

    def forward(self, x, y):
        for update in range(3):
            out = self.net(x)
            gradient = torch.autograd.grad((out - y).square().mean(), self.net.weight)[0]
            with torch.no_grad():
                self.net.weight -= 0.05 * gradient
        return self.net(x)


torch.manual_seed(0)
model = Adapting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(64, 16), torch.randn(64, 1)
for step in range(6):
    out = model(x, y)
    loss = (out - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    print(out.dtype, after, f"{loss.item():.2f}")
"""

# Clips gradients and schedules the learning rate; train() is called once per epoch.
CLIPS = (
    _MODEL
    + """\
from torch.nn.utils import clip_grad_norm_


def train(model, optimizer, scheduler):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for epoch in range(4):
    train(model, optimizer, scheduler)
"""
)

CONVOLUTIONS = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
    nn.Linear(8 * 8 * 8, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    images = torch.randn(4, 3, 12, 12)
    loss = nn.functional.cross_entropy(model(images - 0.5), torch.randint(4, (4,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Two ranks, started by torchrun.
DDP = (
    _MODEL
    + """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches(10):
    loss = F.cross_entropy(model(x + dist.get_rank()), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
)
