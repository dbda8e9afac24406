"""The batch size that stands in a file beside the script is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.records.source_lines import LineCosts
from stepscope.ui.editor.batch_size import batch_elsewhere

MEASURED = 32


def costs(batch: int | None = MEASURED) -> LineCosts:
    return LineCosts(kind="measured", step_ms=10.0, other_ms=0.0, lines=(), batch=batch)


def place(folder: Path, text: str, files: dict[str, str], batch: int | None = MEASURED):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    found = batch_elsewhere(folder / "train.py", text, costs(batch))
    return found and (str(Path(found.file).relative_to(folder)), found.line, found.name)


@pytest.mark.parametrize(
    ("file", "content", "line", "name"),
    [
        ("run.json", '{"width": 32, "batch_size": 32}', 1, "batch_size"),
        ("hyper.yaml", "# bs: 32\ntrain:\n  batch-size: 32  # ours\n", 3, "batch-size"),
        ("train.toml", "[eval]\nbatch_size = 32\n\n[train]\nbatch_size = 32\n", 5, "batch_size"),
        ("old.ini", "[training]\nBATCH=32\n", 2, "BATCH"),
    ],
)  # fmt: skip
def test_settings_of_every_kind(tmp_path, file, content, line, name):
    text = f"cfg = load({file!r})\n"
    assert place(tmp_path, text, {file: content}) == (file, line, name)
    assert place(tmp_path, "cfg = load(argv[1])\n", {}) == (file, line, name)


def test_a_module_of_the_script(tmp_path):
    files = {"options/speech.py": "WIDTH = 32\n\nBATCH_SIZE = 32\n", "options/__init__.py": ""}
    for text in ("from options import speech\n", "import options.speech as o\n"):
        assert place(tmp_path, text, files) == ("options/speech.py", 3, "BATCH_SIZE =")


def test_a_file_that_the_script_names_comes_first(tmp_path):
    files = {"a.json": '{"batch_size": 32}', "conf/b.json": '{"batch_size": 32}'}
    assert place(tmp_path, 'open("conf/b.json")', files) == ("conf/b.json", 1, "batch_size")


def test_only_a_number_that_fits_the_measured_batch(tmp_path):
    files = {"a.json": '{"batch_size": 48}', "b.json": '{"batch_size": 8}'}
    assert place(tmp_path, "", files) == ("b.json", 1, "batch_size")  # 4 of them are 32
    assert place(tmp_path, "", files, batch=7) is None
    assert place(tmp_path, "", files, batch=None) is None


def test_broken_files_are_passed_over(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00batch")
    (tmp_path / "b.json").mkdir()
    (tmp_path / "c.json").symlink_to("/dev/zero")
    (tmp_path / "d.json").write_text('{"batch_size": 3200000000000000000000000}')
    assert place(tmp_path, "def broken(:\n", {}) is None
    assert place(tmp_path, "", {"e.toml": "batch_size = 3_2\n"}) == ("e.toml", 1, "batch_size")
