"""A script that is only tried: its operators are counted, and it changes no file."""

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
    request = folder.parent / "request.json"
    content = {
        "script": str(script),
        "texts": {str(script): text},
        "arguments": [],
        "cwd": str(folder),
        "limit_s": 300,
        "answer": str(answer),
        "errors": str(folder.parent / "errors.txt"),
    }
    request.write_text(json.dumps(content))
    environment = {"TMPDIR": str(folder.parent / "elsewhere"), "PATH": "/usr/bin:/bin"}
    (folder.parent / "elsewhere").mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=str(SOURCE))],
        input=f"{request}\n".encode(),
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
    assert "an estimate must not change files" in str(answer["failed"])
    assert "train.py, line 4" in str(answer["failed"])
    assert (folder / "data.txt").exists()


WILD = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return {"x": torch.full((8,), float(place)), "y": place % 4}

def main():
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers)
    model = model.to("cpu").double().float()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    seen = 0
    for batch in DataLoader(Numbers(), batch_size=16, shuffle=True, num_workers=2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch["x"])
        loss = torch.nn.functional.cross_entropy(out.float(), batch["y"])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen += loss.item() + out.argmax(1).cpu().numpy().sum() + sum(batch["y"].tolist())
        if torch.isnan(loss):
            raise ValueError

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_what_scripts_read_is_made_up(folder: Path) -> None:
    """Workers, scalers, autocast, arrays and lists: the operators are those of a real step."""
    answer = fake(folder, WILD)
    assert answer["failed"] is None
    calls = answer["calls"]
    assert isinstance(calls, list)
    lines = WILD.splitlines()
    phases = {(lines[one["line"] - 1].strip(), one["phase"]) for one in calls}
    assert ('out = model(batch["x"])', "forward") in phases
    assert ('out = model(batch["x"])', "backward") in phases
    assert ("scaler.step(optimizer)", "optimizer") in phases
    products = [one for one in calls if one["name"] == "aten::addmm"]
    assert [16, 8] in products[0]["shapes"]
    assert "c10::BFloat16" in products[0]["dtypes"]


@pytest.mark.slow
def test_a_closure_is_no_part_of_the_optimizer(folder: Path) -> None:
    text = TRAIN.format(before="", inside="pass").replace(
        "    loss = model(torch.randn(2, 4)).sum()\n    optimizer.zero_grad()\n"
        "    loss.backward()\n    optimizer.step()\n",
        "    def closure():\n        optimizer.zero_grad()\n"
        "        loss = model(torch.randn(2, 4)).sum()\n        loss.backward()\n"
        "        return loss\n    optimizer.step(closure)\n",
    )
    answer = fake(folder, text)
    assert answer["failed"] is None
    assert isinstance(answer["calls"], list)
    of = {(one["name"], one["phase"]) for one in answer["calls"]}
    assert ("aten::addmm", "forward") in of
    assert ("aten::mm", "backward") in of
    assert not any(name == "aten::addmm" and phase == "optimizer" for name, phase in of)


@pytest.mark.slow
def test_a_dataset_may_read_tensors_that_the_script_made(folder: Path) -> None:
    text = """
import torch
class Data(torch.utils.data.Dataset):
    rows = torch.randint(0, 9, (64, 4))
    def __len__(self): return 64
    def __getitem__(self, i): return self.rows[i].float(), int(self.rows[i, 0] % 2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x, y) in enumerate(torch.utils.data.DataLoader(Data(), 8)):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    if number % 2:
        optimizer.step()
"""
    answer = fake(folder, text)
    assert answer["failed"] is None
    once = {"count": 2, "phase": "forward", "name": "aten::addmm"}  # two passes a step
    assert any(once.items() <= call.items() for call in answer["calls"])  # type: ignore[attr-defined]
    kept = sum(size for _, _, size in answer["kept"])  # type: ignore[attr-defined]
    assert kept < 2 * 8 * 2 * 4 + 8  # of one pass: a second one frees it
