"""`stepscope lsp` on real trainings: profiled, edited, patched, saved, killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from editor_client import REAL, editor

from own_loop import run_in_own_loop

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"


def costly_lines(text: str) -> set[int]:
    """Lines (from 0) that certainly cost something."""
    return {number for number, line in enumerate(text.split("\n")) if line.endswith("# costs")}


def copy(name: str, folder: Path) -> Path:
    return Path(shutil.copy(SCRIPTS / name, folder / name)).resolve()


@pytest.mark.parametrize("name", ["perceptron.py", "convolutions.py", "encoder.py"])
def test_hints_stand_on_the_right_lines_and_follow_an_edit(tmp_path: Path, name: str) -> None:
    async def drive() -> None:
        path = copy(name, tmp_path)
        async with editor(REAL, tmp_path, {"estimate": False}) as one:
            uri = one.open(path)
            await one.command("profile", uri)
            hints = await one.until_hint(uri, " ms")
            text = one.texts[uri]
            assert costly_lines(text) <= set(hints)
            code = {n for n, line in enumerate(text.split("\n")) if line.strip() and line != ""}
            assert set(hints) <= code
            assert max(params.step or 0 for params in one.live) > 0
            panel = await one.panel(uri)
            assert panel.state == "measured"
            assert panel.lowMs <= panel.stepMs <= panel.highMs
            assert sum(block.share for block in panel.time) == pytest.approx(1, abs=0.01)

            one.edit(uri, "# one line more\n" + text)
            assert await one.hints(uri) == {line + 1: words for line, words in hints.items()}
            one.edit(uri, text.replace("zero_grad()", "zero_grad(set_to_none=False)"))
            assert all(words.startswith("was ") for words in (await one.hints(uri)).values())

        # Another editor shows the same run at once.
        async with editor(REAL, tmp_path) as other:
            uri = other.open(path)
            assert await other.until_hint(uri, " ms") == hints

    run_in_own_loop(drive())


def test_a_patch_is_applied_taken_back_and_saved(tmp_path: Path) -> None:
    async def drive() -> None:
        path = copy("perceptron.py", tmp_path)
        async with editor(REAL, tmp_path, {"arguments": {"*.py": ["--width", "512"]}}) as one:
            uri = one.open(path)
            await one.command("profile", uri)
            await one.until_hint(uri, " ms")
            await one.until(lambda: not one.live[-1].running)
            before = one.texts[uri]
            place = before.split("\n").index(
                "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
            actions = {action.title: action for action in await one.actions(uri, place)}
            (title,) = [title for title in actions if "(fused-optimizer:" in title]
            one.apply(actions[title].edit)
            assert "AdamW(model.parameters(), lr=1e-3, fused=True)" in one.texts[uri]
            backs = [a for a in await one.actions(uri, place) if a.title.startswith("Take back")]
            assert len(backs) == 1
            one.apply(backs[0].edit)
            assert one.texts[uri] == before

            await one.command("profileOnSave", uri, True)
            one.edit(uri, before.replace("torch.relu", "torch.sigmoid"))
            one.save(uri, path)
            await one.until(lambda: one.live[-1].running)
            await one.until(lambda: not one.live[-1].running)
            panel = await one.panel(uri)
            assert (panel.state, panel.error) == ("measured", None)

            assert panel.batch.value == 64
            result = await one.command("setBatch", uri, {"batch": 96})
            assert result == {"batch": 96, "applied": True}
            assert "default=96" in one.texts[uri]

    run_in_own_loop(drive())


def test_an_edit_is_estimated_until_it_is_measured(tmp_path: Path) -> None:
    async def drive() -> None:
        path = copy("convolutions.py", tmp_path)
        async with editor(REAL, tmp_path) as one:
            uri = one.open(path)
            await one.command("profile", uri)
            await one.until_hint(uri, " ms")
            await one.until(lambda: not one.live[-1].running)
            one.edit(uri, one.texts[uri].replace("Conv2d(3, 16, 3)", "Conv2d(3, 16, 5)"))
            assert all(words.startswith("was ") for words in (await one.hints(uri)).values())
            estimated = await one.until_hint(uri, "~")
            assert costly_lines(one.texts[uri]) <= set(estimated)
            assert (await one.panel(uri)).state == "estimated"
            one.save(uri, path)
            await one.command("profile", uri)
            await one.until(lambda: one.live[-1].running)
            await one.until(lambda: not one.live[-1].running)
            assert "~" not in "".join((await one.hints(uri)).values())

    run_in_own_loop(drive())


def test_a_script_that_hangs_is_killed_after_its_limit(tmp_path: Path) -> None:
    async def drive() -> None:
        path = tmp_path.resolve() / "hangs.py"
        path.write_text("print('to stdout', flush=True)\nimport time\ntime.sleep(1000)\n")
        async with editor(REAL, tmp_path, {"limitSeconds": 2}) as one:
            uri = one.open(path)
            await one.command("profile", uri)
            await one.until(lambda: any("was stopped after 2.00 s" in m for m in one.messages))
            assert (await one.panel(uri)).runningSince is None
            assert list((tmp_path / "stepscope-runs").iterdir()) == []

    run_in_own_loop(drive())
