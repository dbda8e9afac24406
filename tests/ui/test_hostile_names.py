"""Names from outside are text: in the terminal, in the page, in JSON, in messages."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))

from promises import promise

from hostile_names import FORMULA, HOSTILE, MARK, PLACES, TERMINAL
from stepscope.records.prediction import Workload
from stepscope.ui.cli.verbs import main
from stepscope.ui.json_text import json_text
from stepscope.verify.track_record import append

# The addresses that a report names: links to click.
PERFETTO = "https://ui.perfetto.dev"
FINDING_PAGE = re.compile(r"https://stepscope\.github\.io/stepscope/findings/[a-z0-9-]+/")


class Said:
    """What a verb printed, and how it ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        gc.enable()  # a verb of a process of its own turns it off
        said = Said(ended.value.code, *capsys.readouterr())
        assert said.code in (0, 2, 3, 4), said.err
        return said

    return run


def check_plain(*texts: str) -> None:
    """Nothing that a terminal obeys, and no line that a name begins."""
    for text in texts:
        assert {char for char in text if char != "\n" and not char.isprintable()} == set()
        for line in text.splitlines():
            assert not line.lstrip().startswith(MARK), text


@pytest.mark.parametrize("place", PLACES)
def test_a_terminal_prints_names_and_obeys_none(place: str, tmp_path: Path, run_verb: Any) -> None:
    path = PLACES[place](tmp_path)
    for verb, *options in (
        ("explain",),
        ("explain", "--full"),
        ("whatif", "--set", "scale=gemm:0.5"),
        ("whatif",),
        ("compare", path),
        ("record",),
    ):
        said = run_verb(verb, *([] if verb == "record" else [path]), *options)
        check_plain(said.out, said.err)
        assert "defect" not in said.err


@pytest.mark.parametrize("place", PLACES)
def test_json_is_valid_harmless_and_has_the_name_as_it_is(
    place: str, tmp_path: Path, run_verb: Any
) -> None:
    said = run_verb("explain", PLACES[place](tmp_path), "--json")
    assert said.out[:-1].isprintable()
    assert json.loads(said.out)["schema"] == 1
    if place in ("kernels", "frames"):
        assert any(HOSTILE in text for text in _strings(json.loads(said.out)))


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [text for each in inner for text in _strings(each)]
    return [value] if isinstance(value, str) else []


class Elements(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]


def check_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = Elements(text)
    assert found.handlers == []
    assert not {"img", "iframe", "object", "embed", "base"} & set(found.tags)
    outside = {link for link in found.links if not link.startswith(("#", "data:"))} - {PERFETTO}
    assert all(FINDING_PAGE.fullmatch(link) for link in outside)
    assert "onerror=alert(1)><a" not in text
    assert text.count("</script>") == found.tags["script"]


@pytest.mark.parametrize("place", PLACES)
def test_a_page_shows_names_and_is_made_of_none(place: str, tmp_path: Path, run_verb: Any) -> None:
    path = PLACES[place](tmp_path)
    run_verb("explain", path, "--html", tmp_path / "report.html")
    check_page(tmp_path / "report.html")
    said = run_verb("compare", path, path, "--html", tmp_path / "comparison.html")
    if said.code == 0:
        check_page(tmp_path / "comparison.html")


def test_messages_about_what_is_not_there_are_text(tmp_path: Path, run_verb: Any) -> None:
    missing = tmp_path / f"{MARK}\n{MARK}\x1b[31m"
    fine = PLACES["kernels"](tmp_path)
    for arguments in (
        ("explain", missing),
        ("compare", missing, missing),
        ("whatif", fine, "--set", HOSTILE),
        ("whatif", fine, "--set", f"scale={HOSTILE}:2"),
        ("explain", fine, f"--{TERMINAL}"),
        (TERMINAL,),
        ("record", "forget", HOSTILE),
    ):
        said = run_verb(*arguments)
        assert said.code != 0
        for text in (said.out, said.err):
            assert {char for char in text if char != "\n" and not char.isprintable()} == set()


def test_a_record_that_somebody_else_wrote_is_text(run_verb: Any) -> None:
    workload = Workload(script=HOSTILE, world_size=1)
    append(promise(f"remove={HOSTILE}", id="aa", path=HOSTILE, workload=workload))
    said = run_verb("record")
    check_plain(said.out)
    said = run_verb("record", "forget", "aa")
    check_plain(said.out)


def test_a_path_that_is_no_utf8_has_marks_in_its_place(tmp_path: Path, run_verb: Any) -> None:
    odd = Path(str(PLACES["kernels"](tmp_path)).replace("trace.json", "t\udcff.json"))
    (tmp_path / "trace.json").rename(odd)
    for options in ((), ("--full",), ("--json",), ("--html", tmp_path / "report.html")):
        said = run_verb("explain", odd, *options)
        assert said.code == 0
        said.out.encode()
    check_page(tmp_path / "report.html")


def test_json_text_escapes_what_a_terminal_obeys() -> None:
    value = {"a": f"{TERMINAL}{FORMULA}é\U0001f600\U000e0001", "b": [1.5, None]}
    text = json_text(value)
    assert text.isprintable()
    assert "é\U0001f600" in text
    assert json.loads(text) == value
    assert json.loads(json_text({"path\udcff": ["\udcfe"]})) == {"path?": ["?"]}
