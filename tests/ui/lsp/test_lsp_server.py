"""A real client and a real server process, with profiles that are made up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from editor_client import MADE, REAL, Editor, editor
from pygls.exceptions import JsonRpcException

from own_loop import run_in_own_loop

SCRIPT = """import torch

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in DataLoader(data, batch_size=64):
        y = model(x)  # 3.5 ms
        y.sum().backward()  # 5.5 ms
"""


def write(folder: Path, text: str = SCRIPT) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path.resolve()


def test_one_server_through_an_hour_of_editing(tmp_path: Path) -> None:
    """One process, three scripts: each part begins with a file of its own."""

    async def drive() -> None:
        async with editor(MADE, tmp_path) as one:
            for part in (shows_and_patches, survives_five_hundred_edits, newest_save_wins):
                folder = tmp_path / part.__name__
                folder.mkdir()
                await part(one, folder)

    run_in_own_loop(drive())


async def shows_and_patches(one: Editor, folder: Path) -> None:
    path = write(folder)
    uri = one.open(path)
    assert await one.hints(uri) == {}
    assert (await one.lenses(uri))[0] == "stepscope: profile this script"
    assert (await one.panel(uri)).state == "none"
    for no_file in (None, 7, "untitled:1"):
        with pytest.raises(JsonRpcException, match="is no file on this machine") as refused:
            await one.panel(no_file)  # type: ignore[arg-type]
        assert "Traceback" not in f"{refused.value}{refused.value.data}"

    await one.command("profile", uri)
    hints = await one.until_hint(uri, "3.50 ms")
    assert hints == {
        5: "3.50 ms · 35% · keeps 2.00 MB · 2 calls",
        6: "5.50 ms · 55% · keeps 2.00 MB · 2 calls",
    }
    lenses = await one.lenses(uri)
    assert lenses[2].startswith("9.00 ms · 90% of the step")
    assert 4 not in lenses  # the loop is all of its function
    hover = await one.hover(uri, 5)
    for words in (
        "forward",
        "backward",
        "`aten::mm`",
        "`gemm`",
        "[8, 8]",
        "precision=bf16",
    ):
        assert words in hover
    assert "| `aten::mm` | 2 | 3.50 ms | `[[8, 8], [8, 8]]` |" in hover

    # A comment above: the same program, one line further down.
    one.edit(uri, "# a comment\n" + SCRIPT)
    assert set(await one.hints(uri)) == {6, 7}
    assert all("was" not in words for words in (await one.hints(uri)).values())

    # Another program: nothing of it was measured, until the estimate comes.
    one.edit(uri, SCRIPT.replace("sum()", "mean()"))
    assert all(words.startswith("was ") for words in (await one.hints(uri)).values())
    estimated = await one.until_hint(uri, "~")
    assert estimated[5].startswith("~3.50 ms · ~35%")
    assert (await one.panel(uri)).state == "estimated"

    # A syntax error while typing keeps the last values, as what was.
    one.edit(uri, SCRIPT.replace("for x in", "for x in ("))
    assert (await one.hints(uri))[5].startswith("was 3.50 ms")
    one.edit(uri, SCRIPT)
    assert (await one.hints(uri))[5].startswith("3.50 ms")

    # The finding at its line, its remedy applied, taken back, and undone.
    await one.until(lambda: one.diagnostics[uri].diagnostics)
    (mark,) = one.diagnostics[uri].diagnostics
    assert (mark.range.start.line, mark.code) == (3, "many-small-kernels")
    (fix,) = await one.actions(uri, 3)
    assert "fused-optimizer: same training up to rounding" in fix.title
    assert "1.25 ms" in fix.title
    one.apply(fix.edit)
    assert "lr=1e-3, fused=True)" in one.texts[uri]
    (back,) = await one.actions(uri, 3)
    assert back.title.startswith("Undo fused-optimizer")
    one.apply(back.edit)
    assert one.texts[uri] == SCRIPT
    one.take_back(uri)
    assert "fused=True" in one.texts[uri]
    one.take_back(uri)
    assert one.texts[uri] == SCRIPT

    # The number in the code follows the dragged bar.
    assert await one.command("setBatch", uri, {"samplesPerSecond": 667})
    assert "batch_size=128)" in one.texts[uri]
    assert await one.command("setBatch", uri, {"peakBytes": 32_000_000})
    assert "batch_size=32)" in one.texts[uri]
    assert (await one.panel(uri)).batch.value == 32
    one.edit(uri, SCRIPT)

    # Saved: measured anew, without asking.
    await one.command("profileOnSave", uri, True)
    one.edit(uri, SCRIPT.replace("3.5 ms", "7.25 ms"))
    one.save(uri, path)
    assert (await one.until_hint(uri, "7.25 ms"))[5].startswith("7.25 ms")
    report = await one.command("openReport", uri)
    assert Path(report).read_text() == "<html>"
    panel = await one.panel(uri)
    assert (panel.state, panel.error, panel.batch.line) == ("measured", None, 4)
    assert panel.time[0].name == "train"
    first = panel.time[0].children[0]
    assert (first.name, first.line) == ("6  y = model(x) # 7.25 ms", 5)
    assert {block.name for block in panel.memory} == {"parameters", "activations"}


async def survives_five_hundred_edits(one: Editor, folder: Path) -> None:
    """Sent at once; no answer may show an old value as the new text's."""
    uri = one.open(write(folder))
    await one.command("profile", uri)
    await one.until_hint(uri, "3.50 ms")
    answers = []
    for number in range(500):
        text = SCRIPT.replace("3.5 ms", f"{number + 10}.0 ms")
        one.edit(uri, text.replace("model(x)", f"model(x, {number})"))
        if number % 5 == 0:
            answers.append((number, asyncio.ensure_future(one.hints(uri))))
            await asyncio.sleep(0)  # lets it be sent before the next edit
    for number, answer in answers:
        words = (await answer).get(5, "was ")
        assert words.startswith(("was ", f"~{number + 10}")), (number, words)
    assert (await one.until_hint(uri, "~509 ms"))[5]


async def newest_save_wins(one: Editor, folder: Path) -> None:
    """And a stop ends a profile."""
    one.live.clear()
    one.bars.clear()
    path = write(folder, SCRIPT + "# hangs\n")
    uri = one.open(path)
    await one.command("profileOnSave", uri, True)
    one.save(uri, path)
    await one.until(lambda: any(params.running for params in one.live))
    await one.until(lambda: any(kinds[:1] == ["begin"] for kinds in one.bars.values()))
    one.edit(uri, SCRIPT)
    one.save(uri, path)
    await one.until_hint(uri, "3.50 ms")
    await one.until(lambda: not one.live[-1].running)
    await one.until(lambda: any(kinds[-1:] == ["end"] for kinds in one.bars.values()))

    one.edit(uri, SCRIPT + "x = 1  # hangs\n")
    one.save(uri, path)
    await one.until(lambda: one.live[-1].running)
    assert await one.command("stop", uri) is True
    await one.until(lambda: not one.live[-1].running)
    assert (await one.panel(uri)).error == "the profile was stopped"

    one.edit(uri, SCRIPT + "x = 2  # fails\n")
    one.save(uri, path)
    await one.until(lambda: any("no training step\noops" in m for m in one.messages))
    (kept,) = (folder / "stepscope-runs").iterdir()  # the run that was measured
    assert (kept / "script.txt").read_text() == SCRIPT


def test_the_verb_answers_without_a_run_and_leaves(tmp_path: Path) -> None:
    async def drive() -> None:
        path = write(tmp_path, "def broken(:\n")
        async with editor(REAL, tmp_path, {"limitSeconds": "long"}) as one:
            uri = one.open(path)
            assert await one.hints(uri) == {}
            assert await one.hover(uri, 0) == ""
            assert await one.actions(uri, 0) == []
            assert await one.command("setBatch", uri, {"batch": 8}) is None
            await one.until(lambda: any("was not measured yet" in m for m in one.messages))
            assert any("stepscope.limitSeconds is 'long'" in m for m in one.messages)

    run_in_own_loop(drive())
