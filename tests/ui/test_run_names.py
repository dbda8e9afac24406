"""What a run is called: its folder's name says which training it was."""

from __future__ import annotations

import pytest

from stepscope.measure.folder import script_slug
from stepscope.ui.jobs.run_folder import script_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python|träin me.py", "träin-me"),
        ("python|-m|pkgx.train|40", "pkgx.train"),
        ("python|-m|torch.distributed.run|-m|pkgx.train", "pkgx.train"),
        ("python|-m|torch.distributed.run|train.py|-m|4", "train"),
        ("python|-|30", "stdin"),
        ("python|-c|print(1)", "python"),
        ("./a.out|30", "a.out"),
        ("../..", "run"),
    ],
)
def test_a_run_is_called_like_its_script_module_or_program(command: str, name: str) -> None:
    assert script_slug(script_of(command.split("|"))) == name
