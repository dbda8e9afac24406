"""Changes are one list: each says what it is, its parts exist, and nothing offers another one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

import stepscope
from stepscope import changes
from stepscope.changes import APPLIED, CHANGES, PREDICTED, WHATIF_OF
from stepscope.changes.change import Application, Change, Code, Effect
from stepscope.fix import remedies
from stepscope.fix.declaration import Fix
from stepscope.predict import whatifs
from stepscope.predict.whatifs import parse_setting, predicted_ids, settings_for_remedy

SOURCE = Path(stepscope.__file__).parent
OFFER = re.compile(r"\b(?:remedies|changes)\.([A-Z][A-Z0-9_]+)\b")
# What loads in the training process when changes are read; what predicts them does not.
LOADED = """
import sys
from stepscope.fix.named_changes import choose_all
choose_all(["bf16", "loader-workers=2"])
for name in ("torch", "numpy", "msgspec", "stepscope.predict", "stepscope.step", "stepscope.trace"):
    assert name not in sys.modules, name
assert {"stepscope.fix.remedies.precision", "stepscope.fix.remedies.loader"} <= sys.modules.keys()
assert "stepscope.fix.remedies.ddp" not in sys.modules
"""


def offered() -> set[str]:
    texts = [file.read_text() for file in (SOURCE / "explain").rglob("*.py")]
    return {getattr(changes, name).id for text in texts for name in OFFER.findall(text)}


def test_findings_take_their_remedies_from_the_list() -> None:
    """`Remedy(...)` is called in one place only: Change.offer."""
    makers = [
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if re.search(r"(?<!class )\bRemedy\(", file.read_text())
    ]
    assert makers == ["changes/change.py"]


def test_what_nobody_can_apply_is_offered_by_a_finding() -> None:
    said = {name for name, change in CHANGES.items() if change.action}
    assert offered() <= said
    assert said - offered() <= APPLIED.keys()  # `tune` tries those, whatever the findings


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_says_what_it_is_and_how_it_is_made(change: Change) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", change.id)
    assert getattr(changes, change.id.replace("-", "_").upper()) is change
    assert change.action or change.prediction
    assert not change.action or change.action[0].isupper()
    assert not change.action.endswith(".")
    if change.prediction is not None:
        assert change.prediction.help
        assert change.describe("")
        assert isinstance(change.prediction.part, Code)
        assert change.prediction.part.startswith("predict.")
        assert callable(change.prediction.part.load())
    if change.application is not None:
        fix = change.application.part.load()
        assert change.application.part.startswith("fix.")
        assert isinstance(fix, Fix)
        assert change.application.patch_only == (fix.apply is None and fix.environment is None)
        assert (fix.values_of is not None) == (change.application.values == ())
        assert all(fix.accepts is None or fix.accepts(v) for v in change.application.values if v)
        may_be = change.application.may_be
        assert may_be is None or may_be.level < change.application.effect.level


def test_every_file_of_a_part_is_named() -> None:
    for room, parts in (
        (whatifs, [prediction.part for prediction in PREDICTED.values()]),
        (remedies, [application.part for application in APPLIED.values()]),
    ):
        short = room.__name__.removeprefix("stepscope.")
        named = {part.partition(":")[0] for part in parts if isinstance(part, Code)}
        files = {f"{short}.{file.name}" for file in iter_modules(room.__path__)}
        assert files - named <= {f"{short}.accumulation_loop"}  # sync-once searches with it


def test_what_predicts_a_change_is_on_the_list() -> None:
    assert predicted_ids() <= CHANGES.keys()
    for name in (*predicted_ids(), *WHATIF_OF):
        settings = settings_for_remedy(name)
        assert settings
        assert tuple(parse_setting(str(setting)) for setting in settings) == settings


def test_the_ways_to_a_goal_can_be_applied() -> None:
    ways = {way for change in CHANGES.values() for way in change.ways}
    assert ways
    assert ways <= APPLIED.keys()


def test_a_finding_may_say_the_action_in_its_own_words() -> None:
    assert changes.COMPILE.offer().summary == changes.COMPILE.action
    fitted = changes.COMPILE.offer("torch.compile fuses small kernels")
    assert (fitted.id, fitted.summary) == ("compile", "torch.compile fuses small kernels")


def test_a_name_that_nothing_has_is_no_change() -> None:
    with pytest.raises(AttributeError, match="NONSENSE"):
        _ = changes.NONSENSE


def test_an_id_is_taken_once() -> None:
    application = Application(Code("fix.remedies.precision:BF16"), Effect.ROUNDING)
    with pytest.raises(ValueError, match="'bf16' already"):
        changes.register(Change("bf16", application=application))


def test_the_training_process_loads_only_what_applies_its_changes() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
