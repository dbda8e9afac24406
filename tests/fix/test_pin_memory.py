"""pin-memory: what is copied without waiting, and the edits for it. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from injected import run_injected

from stepscope.fix.named_changes import load_change
from stepscope.fix.proposal import Script, edited
from stepscope.fix.remedies.loader import copy_marked_without_waiting, mark_pinned
from stepscope.records.script_facts import Built, Frame, ScriptFacts

FILE = "/home/u/train.py"


def test_it_needs_a_gpu_and_a_loader() -> None:
    fix = load_change("pin-memory").fix
    built = Built(kind="loader", type="DataLoader", options={}, given=(), frames=())
    assert fix.fits(ScriptFacts(device="cuda", built=(built,)), "") is None
    assert "CUDA" in str(fix.fits(ScriptFacts(device="cpu", built=(built,)), ""))
    assert "DataLoader" in str(fix.fits(ScriptFacts(device="cuda"), ""))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Any) -> None:
    from test_loader_remedies import LOADED

    run = run_injected(tmp_path, LOADED, "pin-memory")
    assert run.refused == {"pin-memory": "there is no CUDA device"}
    assert not run.did["pin-memory"]


class Batch:
    """Has the two methods that are replaced, and remembers how they were called."""

    def __init__(self, *, pinned: bool) -> None:
        if pinned:
            self._stepscope_pinned = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.fixture(scope="module")
def batch_type() -> Any:
    owner = type("Owner", (Batch,), {"to": Batch.to, "cuda": Batch.cuda})
    copy_marked_without_waiting(owner, lambda _name: None, lambda function: function)
    return owner


@pytest.mark.parametrize("target", ["cuda", "cuda:1", torch.device("cuda", 0), 0])
def test_pinned_batches_are_copied_without_waiting(batch_type: Any, target: Any) -> None:
    pinned, own = batch_type(pinned=True), batch_type(pinned=False)
    assert pinned.to(target)[1] == {"non_blocking": True}
    assert pinned.to(device=target)[1] == {"device": target, "non_blocking": True}
    assert pinned.cuda()[1] == {"non_blocking": True}
    assert own.to(target)[1] == own.cuda()[1] == {}


@pytest.mark.parametrize("target", ["cpu", torch.float16, torch.device("cpu"), torch.zeros(1)])
def test_what_stays_on_the_host_is_waited_for(batch_type: Any, target: Any) -> None:
    assert batch_type(pinned=True).to(target)[1] == {}


def test_a_script_that_says_how_it_copies_is_obeyed(batch_type: Any) -> None:
    pinned = batch_type(pinned=True)
    assert pinned.to("cuda", non_blocking=False)[1] == {"non_blocking": False}
    assert pinned.to("cuda", torch.float32, False)[1] == {}


def test_everything_in_a_batch_is_marked() -> None:
    module = SimpleNamespace()

    def pin_memory(data: Any, device: Any = None) -> Any:
        if isinstance(data, dict):
            return {name: module.pin_memory(value, device) for name, value in data.items()}
        return data.clone() if isinstance(data, torch.Tensor) else data

    module.pin_memory = pin_memory
    mark_pinned(module)
    batch = module.pin_memory({"x": torch.zeros(2), "id": 3}, None)
    assert batch["x"]._stepscope_pinned is True
    assert batch["id"] == 3


def patched(loop: str) -> tuple[str, tuple[str, ...]]:
    head = "import torch\nloader = DataLoader(rows, 8)\n"
    text = (head + loop).encode()
    line = next(n for n, row in enumerate(text.decode().splitlines(), 1) if "model(" in row)
    frame = Frame(file=FILE, line=2, function="<module>")
    built = Built(
        kind="loader", type="DataLoader", options={"pin_memory": False}, given=(), frames=(frame,)
    )
    facts = ScriptFacts(
        device="cuda",
        built=(built,),
        forward=(Frame(file=FILE, line=line, function="<module>"),),
    )
    read = {FILE: text}.get
    proposal = load_change("pin-memory").fix.patch(Script(facts, read), "")
    return edited(proposal.edits, read)[FILE].decode(), proposal.by_hand


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (
            "for x, y in loader:\n    x, y = x.to(device), y.cuda()\n    loss = model(x)\n",
            "x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)",
        ),
        (
            "for i, batch in enumerate(loader):\n"
            "    batch = {k: v.to(device) for k, v in batch.items()}\n    model(**batch)\n",
            "v.to(device, non_blocking=True) for k, v",
        ),
        (
            'for batch in loader:\n    model(batch["x"].to("cuda"))\n',
            'batch["x"].to("cuda", non_blocking=True)',
        ),
        (
            "while True:\n    x = next(it)\n    x = x.to(0)\n    model(x)\n",
            "x.to(0, non_blocking=True)",
        ),
    ],
)
def test_copies_of_the_batch_are_edited(loop: str, expected: str) -> None:
    text, by_hand = patched(loop)
    assert expected in text
    assert "DataLoader(rows, 8, pin_memory=True)" in text
    assert by_hand == ()


@pytest.mark.parametrize(
    "loop",
    [
        'for x in loader:\n    y = model(x)\n    print(x.to("cpu"))\n',
        "for x in loader:\n    mask = mask.to(device)\n    model(x)\n",
        "for x in loader:\n    x = x.to(device, non_blocking=flag)\n    model(x)\n",
    ],
)
def test_other_copies_are_left_and_it_is_said(loop: str) -> None:
    text, by_hand = patched(loop)
    assert text.endswith(loop)
    assert "non_blocking=True" in by_hand[0]
