"""Small CPU trainings whose DataLoaders differ: `python loader_scripts.py NAME --workers N`.

Prints the mean step in milliseconds, without the first steps. `loader_promises.py` runs them.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

WARM_UP = 10


def spin(ms):
    """Work in Python alone for about so long on a common machine; returns something used."""
    total = 0
    for value in range(int(ms * 12_000)):
        total += value & 3
    return total


class PythonItems(Dataset):
    def __init__(self, count, features, ms):
        self.count, self.features, self.ms = count, features, ms

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        spin(self.ms)
        return torch.full((self.features,), float(index % 7)), index % 10


class SleepingItems(PythonItems):
    def __getitem__(self, index):
        time.sleep(self.ms / 1000)
        return torch.full((self.features,), float(index % 7)), index % 10


class CompressedImages(Dataset):
    def __init__(self, count, side):
        noise = np.random.default_rng(0).integers(0, 12, (8, 3, side, side), dtype=np.uint8)
        self.files = [zlib.compress(image.tobytes(), 1) for image in noise]
        self.count, self.side = count, side

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        raw = np.frombuffer(zlib.decompress(self.files[index % 8]), np.uint8)
        image = raw.reshape(3, self.side, self.side).astype(np.float32) / 255.0
        return torch.from_numpy(np.ascontiguousarray(image[:, :, ::-1])), index % 10


class Images(Dataset):
    def __init__(self, count, side):
        self.count, self.images = count, torch.randn(64, 3, side, side)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.images[index % 64], index % 10


class Windows(Dataset):
    def __init__(self, count):
        self.series = np.random.default_rng(0).standard_normal((count + 200, 7))
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        window, target = self.series[at : at + 96], self.series[at + 96 : at + 120]
        return window, target, np.ones((96, 4)), np.ones((24, 4))


class Tokens(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        rng = np.random.default_rng(0)
        for _ in range(self.count):
            ids = torch.from_numpy(rng.integers(0, 500, 65))
            yield ids[:-1], ids[1:]


class Records(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = [(index * 31 + at) % 500 for at in range(20 + index % 40)]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "label": index % 2}


def pad(records):
    longest = max(len(record["input_ids"]) for record in records)
    rows = {
        name: torch.tensor(
            [record[name] + [0] * (longest - len(record[name])) for record in records]
        )
        for name in ("input_ids", "attention_mask")
    }
    return {**rows, "labels": torch.tensor([record["label"] for record in records])}


class ManyColumns(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def many_columns(indices):
    rng = np.random.default_rng(indices[0])
    dense = torch.from_numpy(rng.random((len(indices), 13), np.float32))
    sparse = [torch.from_numpy(rng.integers(0, 1000, len(indices))) for _ in range(26)]
    return dense, sparse, torch.ones(len(indices))


def mlp(features, width, outputs=10):
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


class Classify(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(96, 24)

    def forward(self, batch):
        window, target = batch[0].float(), batch[1].float()
        return ((self.net(window.transpose(1, 2)).transpose(1, 2) - target) ** 2).mean()


class Language(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(500, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 500)

    def forward(self, batch):
        if isinstance(batch, dict):
            hidden = self.blocks(self.embed(batch["input_ids"]))
            return nn.functional.cross_entropy(self.head(hidden.mean(1)), batch["labels"])
        logits = self.head(self.blocks(self.embed(batch[0])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Recommend(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16) for _ in range(26))
        self.dense, self.top = mlp(13, 64, 16), mlp(27 * 16, 128, 1)

    def forward(self, batch):
        dense, sparse, target = batch
        rows = [table(index[:, None]) for table, index in zip(self.tables, sparse, strict=True)]
        score = self.top(torch.cat([self.dense(dense), *rows], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(score, target)


def small_images(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 4, 3), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


# Name -> dataset, batch, model, steps, and other arguments of the loader.
SCENARIOS = {
    "cheap": lambda: (
        TensorDataset(torch.randn(64_000, 64), torch.randint(10, (64_000,))), 64,
        Classify(mlp(64, 128)), 1000, {},
    ),
    "windows": lambda: (Windows(32 * 900), 32, Forecast(), 900, {}),
    "python-light": lambda: (PythonItems(16 * 200, 64, 0.7), 16, Classify(mlp(64, 128)), 200, {}),
    "python-heavy": lambda: (
        PythonItems(16 * 120, 256, 0.6), 16, Classify(mlp(256, 1200)), 120, {},
    ),
    "sleep": lambda: (SleepingItems(8 * 120, 256, 2.0), 8, Classify(mlp(256, 900)), 120, {}),
    "decode": lambda: (
        CompressedImages(8 * 120, 128), 8, Classify(small_images(48)), 120, {},
    ),
    "big": lambda: (Images(16 * 100, 224), 16, Classify(small_images(16)), 100, {}),
    "iterable": lambda: (Tokens(16 * 150), 16, Language(64, 2), 150, {}),
    "records": lambda: (Records(32 * 150), 32, Language(64, 2), 150, {"collate_fn": pad}),
    "short-epochs": lambda: (PythonItems(16 * 20, 64, 0.2), 16, Classify(mlp(64, 256)), 400, {}),
    "kept-workers": lambda: (
        PythonItems(16 * 20, 64, 0.2), 16, Classify(mlp(64, 256)), 400,
        {"persistent_workers": True},
    ),
    "columns": lambda: (
        ManyColumns(128 * 200), 128, Recommend(), 200, {"collate_fn": many_columns},
    ),
    "compute": lambda: (PythonItems(64 * 60, 512, 0.03), 64, Classify(mlp(512, 2500)), 60, {}),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=SCENARIOS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--factor", type=float, default=1.0, help="times as many steps")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    dataset, batch, model, steps, options = SCENARIOS[chosen.name]()
    steps = int(steps * chosen.factor)
    if not chosen.workers:
        options.pop("persistent_workers", None)
    loader = DataLoader(dataset, batch, num_workers=chosen.workers, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    done, began = 0, time.perf_counter()
    while done < steps:
        for inputs in loader:
            optimizer.zero_grad()
            loss = model(inputs)
            loss.backward()
            optimizer.step()
            done += 1
            if done == WARM_UP:
                began = time.perf_counter()
            if done == steps:
                break
    took = time.perf_counter() - began
    print(json.dumps({"step_ms": 1000 * took / (steps - WARM_UP)}))


if __name__ == "__main__":
    main()
