"""stepscope.fix.apply: remedies from a script of the user's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import stepscope

assert "torch" not in sys.modules, "importing stepscope loads torch"
told = stepscope.fix.apply("fused-optimizer", "set-to-none")
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(json.dumps({"told": told, "fused": optimizer.defaults["fused"]}))
"""


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_what_is_built_afterwards_is_changed(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["fused"] is True
    assert [each["id"] for each in answer["told"]] == ["fused-optimizer", "set-to-none"]
    assert [each["refused"] for each in answer["told"]] == [None, None]


@pytest.mark.slow
def test_an_id_that_nothing_has_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, 'import stepscope\nstepscope.fix.apply("no-such-remedy")\n')
    assert done.returncode != 0
    assert "UsageError" in done.stderr
    assert "no-such-remedy" in done.stderr
