"""Draw the pictures of the README and the docs from runs that are kept in the repository.

`python docs/pictures.py` draws them all. docs/images/pictures.json keeps a digest of what each one
shows, so that tests/docs/test_pictures.py can tell when a picture no longer shows what stepscope
prints. The runs were made on one NVIDIA H200 by docs/examples/record.sh.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
RUN = DOCS.parent / "tests/golden/h200-gpt"
STORY = IMAGES / "story"  # what `run` and `tune` printed, with colours
COLUMNS = 96
THEME = TerminalTheme(
    (17, 24, 39),
    (229, 231, 235),
    [
        (55, 65, 81),
        (248, 113, 113),
        (74, 222, 128),
        (250, 204, 21),
        (96, 165, 250),
        (192, 132, 252),
        (34, 211, 238),
        (229, 231, 235),
    ],
    [(148, 163, 184)] + [(229, 231, 235)] * 7,  # dim text
)
ROWS = 38
MARGIN = 20
REPORT_HEIGHT = 2650  # down to what a change would do
SCENE_S = {"run": 6.0, "report": 7.0, "tune": 7.0}  # together 20 seconds
FADE_S = 0.25


def main() -> None:
    digests = {}
    for name, draw in PICTURES.items():
        shown = draw.shown()
        (IMAGES / name).write_bytes(draw.draw())
        digests[name] = digest(shown)
        print(name)  # noqa: T201
    (IMAGES / "pictures.json").write_text(json.dumps(digests, indent=2) + "\n")


def digest(shown: str) -> str:
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


class Picture:
    """A file under docs/images: the text that it shows, and how it is drawn."""

    def __init__(self, shown: Callable[[], str], draw: Callable[[], bytes]) -> None:
        self.shown, self.draw = shown, draw


def explain(colours: bool) -> str:
    """Return the first screen for the kept run, as the command prints it."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    environment |= {"FORCE_COLOR": "1"} if colours else {"NO_COLOR": "1"}
    command = [sys.executable, "-m", "stepscope", "explain", RUN.name, "--no-cache"]
    done = subprocess.run(
        command, cwd=RUN.parent, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def report() -> str:
    """Return the report of the kept run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        command = [sys.executable, "-m", "stepscope", "explain", RUN.name, "--no-cache"]
        subprocess.run(
            [*command, "--html", str(file)], cwd=RUN.parent, capture_output=True, check=True
        )
        return file.read_text()


def words_of_report() -> str:
    """Return the report's text, without scripts, styles, drawings and numbers of the build."""
    page = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", " ", report())
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    return " ".join(re.sub(r"stepscope \d+\.\d+\.\d+", "stepscope", text).split())


def screenshot(height: int = 880) -> bytes:
    """Return the report's first pixels as Chromium shows them, 1,200 wide."""
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "report.html", Path(folder) / "report.png"
        page.write_text(report())
        chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        chromium += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=4000"]
        chromium += [f"--window-size=1200,{height}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(chromium, capture_output=True, check=True)
        return picture.read_bytes()


def story(name: str) -> str:
    """Return what a command of the story printed."""
    return (STORY / f"{name}.ansi").read_text()


def plain(ansi: str) -> str:
    return Text.from_ansi(ansi).plain


def terminal(ansi: str, name: str, height: int | None = None) -> tuple[str, str, int, int]:
    """Draw terminal output: SVG elements, their styles, width and height."""
    lines = Text.from_ansi(ansi.rstrip()).split(allow_blank=True)
    console = Console(record=True, width=COLUMNS, file=StringIO(), color_system="truecolor")
    for line in lines[: height or len(lines)]:
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    for _ in range((height or 0) - len(lines)):
        console.print()
    parts = console.export_svg(
        theme=THEME,
        unique_id=name,
        code_format="{styles}\x00{lines}\x00{backgrounds}\x00{matrix}\x00{width}\x00{height}",
    ).split("\x00")
    styles, clips, backgrounds, matrix = parts[:4]
    drawn = f"<defs>{clips}</defs>{backgrounds}<g class='text'>{matrix}</g>"
    return drawn, styles, int(float(parts[4])) + 2 * MARGIN, int(float(parts[5])) + 2 * MARGIN


STYLE = ".text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:20px}"


def frame(inside: str, styles: str, width: int, height: int, title: str) -> bytes:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(title)}"><style>{STYLE}{styles}</style>'
        f'<rect width="100%" height="100%" rx="12" fill="#111827"/>{inside}</svg>\n'
    ).encode()


def draw_terminal() -> bytes:
    command = "\x1b[2m$\x1b[0m stepscope run -- python train.py\n"
    drawn, styles, width, height = terminal(command + explain(colours=True), "screen")
    inside = f'<g transform="translate({MARGIN},{MARGIN})">{drawn}</g>'
    return frame(inside, styles, width, height, "stepscope run: verdict, why, next")


def scenes() -> dict[str, str]:
    """Return what each scene of the recording shows."""
    return {
        "run": f"\x1b[2m$\x1b[0m stepscope run -- python train.py\n{story('run')}",
        "report": words_of_report(),
        "tune": "\x1b[2m$\x1b[0m stepscope tune --skip fp16 --budget 4m -- python train.py\n"
        + verdict_and_patch(story("tune")),
    }


def verdict_and_patch(printed: str) -> str:
    """Leave out what stands between the table and the patch: it does not fit into a scene."""
    paragraphs = printed.split("\n\n")
    (patch,) = (text for text in paragraphs if plain(text).startswith("the change\n"))
    return "\n\n".join([*paragraphs[:2], "\x1b[90m...\x1b[0m", patch])


def scrolling_report(width: int, height: int) -> tuple[str, str]:
    """Draw the report, and scroll through it while its scene is shown: SVG elements, styles."""
    data = base64.b64encode(screenshot(REPORT_HEIGHT)).decode()
    long = REPORT_HEIGHT * width / 1200
    total, (before, lasts, _) = sum(SCENE_S.values()), SCENE_S.values()
    begin, end = (100 * (before + part * lasts) / total for part in (0.3, 0.8))
    drawn = (
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{width}" height="{height}"><g class="scroll">'
        f'<image href="data:image/png;base64,{data}" width="{width}" height="{long:.0f}"/>'
        "</g></svg>"
    )
    moved = f"transform:translateY({height - long:.0f}px)"
    return drawn, (
        f"@keyframes scroll{{0%,{begin:.2f}%{{transform:none}}{end:.2f}%,100%{{{moved}}}}}"
        f".scroll{{animation:scroll {total:g}s infinite}}"
    )


def draw_recording() -> bytes:
    """Draw run, report and tune one after the other: an SVG that moves by CSS alone."""
    shown, began, total = scenes(), 0.0, sum(SCENE_S.values())
    texts = {name: terminal(shown[name], name, height=ROWS) for name in ("run", "tune")}
    width, height = texts["run"][2], texts["run"][3]
    inside, styles = "", ""
    for name, lasts in SCENE_S.items():
        if name == "report":
            drawn, style = scrolling_report(width - 2 * MARGIN, height - 2 * MARGIN)
            styles += style
        else:
            drawn, style, *_ = texts[name]
            drawn, styles = (
                f'<g transform="translate({MARGIN},{MARGIN})">{drawn}</g>',
                styles + style,
            )
        inside += f'<g class="scene {name}">{drawn}</g>'
        at = [
            100 * time / total
            for time in (began, began + FADE_S, began + lasts - FADE_S, began + lasts)
        ]
        styles += (
            f"@keyframes {name}{{0%,{at[0]:.2f}%{{opacity:0}}{at[1]:.2f}%,{at[2]:.2f}%{{opacity:1}}"
            f"{at[3]:.2f}%,100%{{opacity:0}}}}"
            f".{name}{{opacity:0;animation:{name} {total:g}s infinite}}"
        )
        began += lasts
    return frame(inside, styles, width, height, "stepscope: run, report, tune")


PICTURES = {
    "terminal.svg": Picture(lambda: explain(colours=False), draw_terminal),
    "report.png": Picture(words_of_report, screenshot),
    "recording.svg": Picture(lambda: "\n".join(map(plain, scenes().values())), draw_recording),
}

if __name__ == "__main__":
    main()
