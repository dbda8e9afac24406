"""A script that is only tried changes no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = (
    "import sys; sys.path.append({root!r}); from stepscope.measure.fake_step import main; main()"
)
TRAIN = """
import os, shutil, torch
from pathlib import Path
{before}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    loss = model(torch.randn(2, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {inside}
"""


def fake(folder: Path, text: str) -> dict[str, object]:
    script = folder / "train.py"
    script.write_text(text)
    answer = folder.parent / "answer.json"
    request = {"script": str(script), "text": text, "arguments": [], "answer": str(answer)}
    environment = {"TMPDIR": str(folder.parent / "elsewhere"), "PATH": "/usr/bin:/bin"}
    (folder.parent / "elsewhere").mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=str(SOURCE))],
        input=json.dumps(request).encode(),
        check=True,
        cwd=folder,
        env=environment,
        timeout=300,
    )
    answered: dict[str, object] = json.loads(answer.read_text())
    return answered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "data.txt").write_text("precious")
    return place


@pytest.mark.slow
def test_writing_goes_nowhere(folder: Path) -> None:
    text = TRAIN.format(
        before="os.makedirs('logs/deep', exist_ok=True)\nlog = open('log.txt', 'w')",
        inside="log.write('x'); torch.save(model, 'model.pt'); Path('data.txt').write_text('')",
    )
    answer = fake(folder, text)
    assert answer["failed"] is None
    assert answer["calls"]
    assert sorted(path.name for path in folder.iterdir()) == ["data.txt", "train.py"]
    assert (folder / "data.txt").read_text() == "precious"


@pytest.mark.slow
def test_removing_is_refused_and_said_with_its_line(folder: Path) -> None:
    answer = fake(folder, TRAIN.format(before="shutil.rmtree('.')", inside="pass"))
    assert "an estimate changes no file" in str(answer["failed"])
    assert "train.py, line 4" in str(answer["failed"])
    assert (folder / "data.txt").exists()
