"""The diff that tune hands over: `patch -p1` takes it, whatever the file's layout."""

from __future__ import annotations

import ast
import codecs
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.changes import CHANGES
from stepscope.errors import UsageError
from stepscope.fix.declaration import Fix
from stepscope.fix.named_changes import ChosenChange, choose, choose_all
from stepscope.fix.patched_source import patch_source
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import Built, Frame, ScriptFacts, TrainingPass
from stepscope.ui.tune.patch import TunePatch, apply_patch, make_patch

pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="no patch program here")

SCRIPT = """\
import torch
from torch import nn

# Größe
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    optimizer.step()
"""


def facts_of(path: Path, text: str) -> ScriptFacts:
    """As the training process would have noted them."""
    lines = text.splitlines()

    def frames(words: str) -> tuple[Frame, ...]:
        line = next(number for number, line in enumerate(lines, 1) if words in line)
        return (Frame(file=str(path), line=line, function="<module>"),)

    optimizer = Built(
        kind="optimizer",
        type="AdamW",
        options={"fused": None},
        given=("params", "lr"),
        frames=frames("AdamW("),
    )
    forward, backward = frames("model(torch"), frames(".backward()")
    return ScriptFacts(
        built=(optimizer,),
        forward=forward,
        backward=backward,
        passes=(TrainingPass(forwards=(forward,), backward=backward),),
        step=frames("optimizer.step()"),
    )


def patch_of(root: Path, path: Path, text: str, *remedies: str) -> TunePatch:
    return make_patch(facts_of(path, text), choose_all(remedies), root)


def patched_by_program(root: Path, patch: TunePatch, program: Sequence[str]) -> None:
    assert patch.diff is not None
    done = subprocess.run(program, cwd=root, input=patch.diff.encode(), capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for change in patch.changes:
        assert (root / change.path).read_bytes() == change.after


LAYOUTS = {
    "plain": SCRIPT.encode(),
    "windows": SCRIPT.replace("\n", "\r\n").encode(),
    "tabs": SCRIPT.replace("    ", "\t").encode(),
    "no newline at the end": SCRIPT.rstrip("\n").encode(),
    "byte order mark": codecs.BOM_UTF8 + SCRIPT.encode(),
    "windows, mark, no end": codecs.BOM_UTF8 + SCRIPT.replace("\n", "\r\n").encode()[:-2],
    "a form feed and other separators": ("x = '\x0c \u2028 \x1c'\n" + SCRIPT).encode(),
}


@pytest.mark.parametrize("program", [["patch", "-p1"], ["git", "apply", "-p1"]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_patch_program_makes_the_edits(tmp_path: Path, layout: str, program: list[str]) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(LAYOUTS[layout])
    text = SCRIPT if "form feed" not in layout else f"\n{SCRIPT}"
    patch = patch_of(tmp_path, path, text, "bf16", "fused-optimizer")
    assert not patch.by_hand
    assert patch.files == ("train.py",)
    patched_by_program(tmp_path, patch, program)
    tree = ast.unparse(ast.parse(path.read_bytes()))
    assert "AdamW(model.parameters(), lr=0.001, fused=True)" in tree
    assert (
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "        loss = model(torch.randn(2, 4)).sum()\n"
        "    loss.backward()\n"
    ) in tree


def test_several_files_and_names_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    path, other = tmp_path / "a folder/my train.py", tmp_path / "building ä.py"
    path.write_text(SCRIPT)
    other.write_text(SCRIPT)
    facts = facts_of(path, SCRIPT)
    facts = replace(facts, built=facts_of(other, SCRIPT).built)
    patch = make_patch(facts, choose_all(["bf16", "fused-optimizer"]), tmp_path)
    assert patch.files == ("a folder/my train.py", "building ä.py")
    patched_by_program(tmp_path, patch, ["patch", "-p1"])
    assert "fused" in other.read_text()
    assert "fused" not in path.read_text()


def test_paths_begin_at_the_work_tree(tmp_path: Path) -> None:
    inner = tmp_path / "project/src"
    inner.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "project"], cwd=tmp_path, check=True)
    path = inner / "train.py"
    path.write_text(SCRIPT)
    for cwd in (inner, tmp_path / "project", tmp_path):
        patch = patch_of(cwd, path, SCRIPT, "fused-optimizer")
        wanted = tmp_path if cwd == tmp_path else tmp_path / "project"
        assert patch.root == wanted
        assert patch.files == (str(path.relative_to(wanted)),)


def test_a_script_elsewhere_has_its_own_folder(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    path = tmp_path / "there/train.py"
    path.write_text(SCRIPT)
    patch = patch_of(tmp_path / "here", path, SCRIPT, "fused-optimizer")
    assert patch.root == tmp_path / "there"
    assert patch.files == ("train.py",)


def test_files_outside_and_libraries_are_left_to_the_user(tmp_path: Path) -> None:
    here, library = tmp_path / "here", tmp_path / "here/venv/site-packages"
    library.mkdir(parents=True)
    for path in (here / "train.py", tmp_path / "outside.py", library / "inside.py"):
        path.write_text(SCRIPT)
    (here / "link.py").symlink_to(tmp_path / "outside.py")
    for place in ("../outside.py", "venv/site-packages/inside.py", "link.py"):
        built = facts_of(here / place, SCRIPT).built
        facts = replace(facts_of(here / "train.py", SCRIPT), built=built)
        patch = make_patch(facts, [choose("fused-optimizer")], here)
        assert patch.diff is None
        assert patch.by_hand == (
            f"give AdamW fused=True (it is built at {built[0].frames[0].words})",
        )


def test_statements_on_one_line_are_left_to_the_user(tmp_path: Path) -> None:
    text = SCRIPT.replace(".sum()\n    loss", ".sum(); loss")
    path = tmp_path / "train.py"
    path.write_text(text)
    patch = patch_of(tmp_path, path, text, "bf16")
    assert patch.diff is None
    (words,) = patch.by_hand
    assert words.startswith("put the forward pass and the loss under")
    assert f"{path}:10" in words


def _fix(patch: Proposal | None = None, *, wrap: str = "", name: str = "tf32") -> ChosenChange:
    """A made-up remedy: the given edits, or the loss under a header."""

    def propose(script: Script, value: str) -> Proposal:
        if patch is not None:
            return patch
        frame = script.facts.backward[0]
        source = script.source(frame.file)
        assert source is not None
        statement = source.statement_at(frame.line)
        assert statement is not None
        return Proposal(edits=source.wrap(statement, statement, wrap))

    fix = Fix(fits=lambda _facts, _value: None, patch=propose)
    return ChosenChange(CHANGES[name], fix)


def test_blocks_nest_and_places_move_along(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    chosen = [_fix(wrap="with a:"), choose("tf32"), _fix(wrap="with b:"), choose("bf16")]
    patch = make_patch(facts_of(path, SCRIPT), chosen, tmp_path)
    assert not patch.by_hand
    patched_by_program(tmp_path, patch, ["patch", "-p1"])
    assert path.read_text().endswith(
        """\
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 4)).sum()
    with a:
        with b:
            loss.backward()
    optimizer.step()
"""
    )


def test_calls_are_found_by_their_end_after_other_edits(tmp_path: Path) -> None:
    text = SCRIPT.replace("optimizer = ", "first, optimizer = AdamW(a), ")
    path = tmp_path / "train.py"
    path.write_text(text)
    facts = facts_of(path, text)
    (built,) = facts.built
    line = text.splitlines()[built.frames[0].line - 1]
    frame = replace(built.frames[0], ends=(built.frames[0].line, len(line)))
    facts = replace(facts, built=(replace(built, frames=(frame,)),))
    patch = make_patch(facts, [choose("tf32"), choose("fused-optimizer")], tmp_path)
    assert patch.diff is not None
    assert "= AdamW(a), torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)" in patch.diff


def test_edits_that_would_not_parse_or_overlap_become_words(tmp_path: Path) -> None:
    from stepscope.fix.python_source import Edit

    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    file = str(path)
    broken = _fix(Proposal(edits=(Edit(file, 0, 0, b"def ("),)))
    overlap = _fix(Proposal(edits=(Edit(file, 0, 6, b"x"), Edit(file, 3, 9, b"y"))), name="bf16")
    patch = make_patch(
        facts_of(path, SCRIPT), [broken, overlap, choose("fused-optimizer")], tmp_path
    )
    assert patch.diff is not None
    assert patch.diff.count("\n+") == 2  # the header and one line
    assert [words.split(";")[0].split(":")[0] for words in patch.by_hand] == [
        'Call torch.set_float32_matmul_precision("high")',
        "Run forward and loss under bf16 autocast",
    ]
    assert all(f"{path}:11" in words for words in patch.by_hand)


def test_words_name_the_lines_of_the_users_own_file() -> None:
    facts = facts_of(Path("/x/train.py"), SCRIPT)
    hidden = SCRIPT.replace("lr=1e-3", "**options")
    patched = patch_source(
        facts, [choose("tf32"), choose("fused-optimizer")], lambda _file: hidden.encode()
    )
    assert patched.by_hand == ("give AdamW fused=True (it is built at /x/train.py:6)",)
    assert set(patched.after) == {"/x/train.py"}


def test_nothing_to_change_is_no_diff(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = SCRIPT.replace("lr=1e-3", "fused=True")
    path.write_text(text)
    assert patch_of(tmp_path, path, text, "fused-optimizer").diff is None
    assert patch_of(tmp_path, path, text).diff is None


# --apply


@pytest.fixture
def work_tree(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.py").chmod(0o755)
    (tmp_path / "notes.txt").write_text("not committed")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "train.py")
    _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    return tmp_path


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def test_apply_changes_committed_files(work_tree: Path) -> None:
    path = work_tree / "train.py"
    patch = patch_of(work_tree, path, SCRIPT, "fused-optimizer")
    assert apply_patch(patch) == (path,)
    assert path.read_bytes() == patch.changes[0].after
    assert path.stat().st_mode & 0o777 == 0o755
    names = {entry.name for entry in work_tree.iterdir()}
    assert names == {".git", "train.py", "notes.txt"}


def test_apply_refuses_what_git_cannot_bring_back(work_tree: Path) -> None:
    path = work_tree / "train.py"
    text = SCRIPT + "# more\n"
    path.write_text(text)
    patch = patch_of(work_tree, path, text, "fused-optimizer")
    with pytest.raises(UsageError, match="not committed"):
        apply_patch(patch)
    _git(work_tree, "add", "train.py")
    with pytest.raises(UsageError, match="not committed"):
        apply_patch(patch)
    _git(work_tree, "rm", "-q", "--cached", "train.py")
    with pytest.raises(UsageError, match=r"git does not track train\.py"):
        apply_patch(patch)
    assert path.read_text() == text


def test_apply_refuses_a_file_that_changed_meanwhile(work_tree: Path) -> None:
    path = work_tree / "train.py"
    patch = patch_of(work_tree, path, SCRIPT, "fused-optimizer")
    path.write_text(SCRIPT + "# more\n")
    _git(work_tree, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "two")
    with pytest.raises(UsageError, match="changed while tune ran"):
        apply_patch(patch)


def test_apply_needs_a_work_tree(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    patch = patch_of(tmp_path, path, SCRIPT, "fused-optimizer")
    with pytest.raises(UsageError, match="only in a git work tree"):
        apply_patch(patch)
    assert path.read_text() == SCRIPT


def test_apply_of_nothing_needs_nothing(tmp_path: Path) -> None:
    assert apply_patch(TunePatch(root=tmp_path)) == ()
