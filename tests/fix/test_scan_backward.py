"""scan-backward: every nn.RNN of a model goes back by a scan, with the same parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from injected import assert_patch_trains_the_same, run_injected

from stepscope.fix.scan.remedy import FIX
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.RNN(3, 8, num_layers=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.recurrent(x)[1][-1])


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    x, y = torch.randn(150, 4, 3), torch.randint(4, (4,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_injected_and_as_a_patch(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, SCRIPT, "scan-backward")
    assert "stepscope.fix.scan.scan_backward(model)\n" in source
    plain = run_injected(tmp_path, SCRIPT, steps=6)
    scanned = run_injected(tmp_path, SCRIPT, "scan-backward", steps=6)
    assert scanned.did == {"scan-backward": ["Net: backward through 1 nn.RNN by a scan"]}
    assert values(scanned.losses) == pytest.approx(values(plain.losses), rel=1e-4)


@pytest.mark.slow
def test_parametrized_weights_are_scanned_too(tmp_path: Path) -> None:
    made = "nn.RNN(3, 8, num_layers=2)"
    script = SCRIPT.replace(made, f'nn.utils.parametrizations.orthogonal({made}, "weight_hh_l1")')
    plain = run_injected(tmp_path, script, steps=6)
    scanned = run_injected(tmp_path, script, "scan-backward", steps=6)
    assert scanned.did == {"scan-backward": ["Net: backward through 1 nn.RNN by a scan"]}
    assert values(scanned.losses) == pytest.approx(values(plain.losses), rel=1e-4)


@pytest.mark.slow
def test_a_gru_is_scanned_too(tmp_path: Path) -> None:
    script = SCRIPT.replace("nn.RNN(", "nn.GRU(")
    plain = run_injected(tmp_path, script, steps=6)
    scanned = run_injected(tmp_path, script, "scan-backward", steps=6)
    assert scanned.did == {"scan-backward": ["Net: backward through 1 nn.GRU by a scan"]}
    assert values(scanned.losses) == pytest.approx(values(plain.losses), rel=1e-4)


def values(losses: list[tuple[int, str]]) -> list[float]:
    return [float.fromhex(text) for _, text in losses]


def gpu_facts(*recurrent: tuple[str, int]) -> ScriptFacts:
    modules = {kind: 1 for kind, _ in recurrent}
    return ScriptFacts(device="cuda", modules=modules, roots=("Net",), recurrent=recurrent)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ScriptFacts(modules={"RNN": 1, "Linear": 2}, roots=("Net",)), None),
        (ScriptFacts(modules={"LSTMCell": 1}, roots=("Net",)), "no module is an nn.RNN, nn.GRU or"),
        (ScriptFacts(modules={"RNN": 1}, roots=("RNN",)), "calls an nn.RNN itself"),
        (ScriptFacts(modules={"GRU": 1}, roots=("GRU",)), "Build a stepscope.fix.scan.ScanGRU"),
        (ScriptFacts(modules={"RNN": 1}, roots=("Net",), compiled=True), "before torch.compile"),
        (gpu_facts(("LSTM", 64)), "cuDNN is faster than a scan"),
        (gpu_facts(("RNN", 129), ("LSTM", 33)), "cuDNN is faster than a scan"),
        (gpu_facts(("LSTM", 64), ("GRU", 64)), None),
        (gpu_facts(("LSTM", 32)), None),
    ],
)
def test_where_it_fits(facts: ScriptFacts, why: str | None) -> None:
    answer = FIX.fits(facts, "")
    assert answer is None if why is None else why in (answer or "")
