"""DistributedDataParallel is watched while a run is captured, and left as it was afterwards."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest

from stepscope.measure import patches
from stepscope.measure.cluster import parallel_layout


class Replica:
    def __init__(self) -> None:
        self.is_built = True


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(DistributedDataParallel=Replica)
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", module)
    monkeypatch.setattr(parallel_layout, "_replicas", {})


def test_the_constructor_is_restored() -> None:
    original = Replica.__init__
    for _ in range(2):  # each captured cell of a notebook
        with patches.attaching() as layer:
            parallel_layout.watch_replicas()
            parallel_layout.watch_replicas()
        assert Replica.__init__ is not original
        assert Replica().is_built
        patches.detach(layer)
        assert Replica.__init__ is original


def test_replicas_that_are_gone_are_forgotten() -> None:
    with patches.attaching() as layer:
        parallel_layout.watch_replicas()
    kept = [Replica() for _ in range(3)]
    for _ in range(50):
        Replica()
    gc.collect()
    assert [reference() for reference in parallel_layout._replicas.values()] == kept
    patches.detach(layer)
    kept.append(Replica())
    parallel_layout.search_replicas()
    assert [reference() for reference in parallel_layout._replicas.values()] == kept
