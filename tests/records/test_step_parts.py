"""One palette for the page, the terminal and notebooks."""

from __future__ import annotations

import colorsys

import pytest
from rich.color import Color

from stepscope.records.run import STALL_CAUSES
from stepscope.text.notebook import card
from stepscope.text.words import STEP_PARTS
from stepscope.ui.html.render import read_page_file, slice_of
from stepscope.ui.terminal.console import COLOURS, FILLS
from stepscope.ui.words import PARTS

_GREY = 0.2  # saturation: below it a colour has no hue to speak of


def hue(colour: str) -> tuple[float, float]:
    """Hue and saturation."""
    red, green, blue = (part / 255 for part in Color.parse(colour).get_truecolor())
    hue_, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    return hue_, saturation


@pytest.mark.parametrize("name", STEP_PARTS)
def test_a_part_has_one_colour_and_one_name_everywhere(name: str) -> None:
    part = STEP_PARTS[name]
    light = read_page_file("report.css").split(':root[data-theme="dark"]')[0]
    shown = slice_of(name)
    assert f"  --c-{shown.color}: {part.colour};" in light
    assert shown.label == part.label == PARTS[name][0]
    html = card("title", (), parts=((name, 0.5),))
    assert f"background:{part.colour}" in html
    assert f"{part.label} 50%" in html
    assert COLOURS[name] == part.ansi
    (page, vivid), (terminal, _) = hue(part.colour), hue(part.ansi)
    apart = abs(page - terminal)
    assert vivid < _GREY or min(apart, 1 - apart) < 0.1


def test_every_part_has_a_character_of_its_own() -> None:
    assert set(PARTS) == set(STEP_PARTS) == set(FILLS)
    assert len(set(FILLS.values())) == len(FILLS)
    assert [part for part in FILLS if part.startswith("stall_")] == [
        f"stall_{c}" for c in STALL_CAUSES
    ]
