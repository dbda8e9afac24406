"""Elements of a batch, from shapes alone."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stepscope.measure.steps.loaders import count_elements

IMAGES, LABELS = torch.zeros(8, 3, 4, 4), torch.zeros(8)  # 384 and 8 elements
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Any
    name: str


class Lazy:
    """Computes what it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        self.__dict__["asked"] += 1
        raise AttributeError(name)

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated")

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")


@pytest.mark.parametrize(
    ("batch", "elements"),
    [
        (IMAGES, 384),
        ((IMAGES, LABELS), 392),
        ([IMAGES, LABELS, LABELS], 400),
        ((torch.nn.Parameter(LABELS), LABELS), 16),
        ([IMAGES, {"labels": LABELS, "names": ["a"] * 500}], 392),
        (Pair(IMAGES, LABELS), 392),
        (Sample(IMAGES, "a name"), 384),
        ({"input_ids": LABELS, "attention_mask": LABELS, "labels": LABELS}, 8),
        (UserDict({"input_ids": LABELS, "labels": LABELS}), 8),
        (["a", "b"], 0),
        (None, 0),
        ([[[[LABELS]]]], 0),  # too deep
        ([LABELS] * 60, 480),
        ([LABELS] * 65, 0),  # too many to look at in every step
        ([], 0),
    ],
)
def test_elements_of_a_batch(batch: Any, elements: int) -> None:
    assert count_elements(batch) == elements


def test_graphs_of_torch_geometric() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph = data.Data(x=torch.zeros(5, 2), edge_index=torch.zeros(2, 7, dtype=torch.long))
    assert count_elements(graph) == 24


def test_encodings_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": LABELS, "attention_mask": LABELS})
    assert count_elements(encoding) == 8


def test_an_object_that_computes_its_attributes_is_left_alone() -> None:
    lazy = Lazy()
    assert count_elements(lazy) == 0
    assert lazy.__dict__["asked"] == 0
