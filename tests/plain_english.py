"""Find hard English in what a user reads: messages in the code, pages of the docs.

`python tests/plain_english.py PATH...` prints the complaints; test_plain_english.py holds the
product to none.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/start/glossary.md"
MOST_WORDS = 30  # the limit; style asks for 22
FEWEST_WORDS = 4  # shorter strings are names, keys and units
HABITS = (
    "is had",
    "be had",
    "had again",
    "is told",
    "are told",
    "be told",
    "is said",
    "are said",
    "made again",
    "so many",
    "the how",
    "dear",
    "dearer",
    "comes of it",
    "what is kept",
    "surely",
    "how-manieth",
    "of those of",
)
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\betc)[.!?](?=[\s)\"']|$)|\n\s*\n")
_WORD = re.compile(r"\S*\w\S*")
_NAMES = re.compile(r"[\w\s]+")  # a list of names
_CODE = re.compile(r"[{};]\s*$|=>|\bfunction\b|</|/>|\bSELECT\b|^\s*(?:import|from) \w|^[a-z_.]+\(")


class Complaint(NamedTuple):
    place: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}: {self.text}"


def complaints(path: Path) -> Iterator[Complaint]:
    """Yield what is hard to read in one Python file or one page."""
    avoided = HABITS if path.resolve() == GLOSSARY else (*HABITS, *words_to_avoid())
    pattern = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, avoided)) + r")(?![\w-])", re.I)
    for line, text in READERS[path.suffix](path):
        place = f"{path}:{line}"
        for match in pattern.finditer(text):
            yield Complaint(place, f"says {match[0]!r}", shorten(text))
        for sentence in [] if _NAMES.fullmatch(text) else sentences(text):
            count = len(_WORD.findall(sentence))
            if count > MOST_WORDS:
                yield Complaint(place, f"{count} words in a sentence", shorten(sentence))


def words_to_avoid() -> list[str]:
    """Return the last column of the glossary's tables."""
    rows = [line.split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    avoided = [row[3] for row in rows if row[1].strip() not in ("word", "---")]
    return [word.strip() for words in avoided for word in words.split(",") if word.strip()]


def sentences(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(text) if part.strip()]


def shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 160 else flat[:157] + "..."


def strings_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Yield messages: strings of several words that are neither docstrings nor code, and the help
    texts of commands."""
    tree = ast.parse(path.read_text())
    docstrings = set()
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "split":
            inner.add(id(node.value))  # a list of names
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in ast.walk(node)} - {id(node)}
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and not is_command(node)
            ):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in inner:
            continue
        text = text_of(node)
        if text and len(_WORD.findall(text)) >= FEWEST_WORDS and not _CODE.search(text):
            yield node.lineno, text


def is_command(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        "command" in ast.unparse(decorator) or "group" in ast.unparse(decorator)
        for decorator in node.decorator_list
    )


def text_of(node: ast.AST) -> str:
    """Return a string's text; what an f-string fills in counts as one word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "N" for part in node.values
        )
    return ""


def passages_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items and table cells without code."""
    text = path.read_text()
    text = re.sub(r"(?ms)^( *)(`{3,4}).*?^ *\2 *$", lambda code: "\n" * code[0].count("\n"), text)
    text = re.sub(r"(?s)<!--.*?-->", lambda note: "\n" * note[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "`code`", text)
    start, lines = 1, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begins = not line.strip() or re.match(r"\s*(?:[-*#|>]|\d+\.)", line)
        if begins and lines:
            yield start, " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from ((number, cell) for cell in line.strip("|").split("|") if cell.strip())
        elif line.strip():
            start = start if lines else number
            lines.append(line.strip())
        if line.startswith("#") and lines:
            yield start, " ".join(lines)
            lines = []


def texts_of_template(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the words between the tags of a report's template; what is filled in counts as one."""
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>|{#.*?#}", _blank, path.read_text())
    text = re.sub(r"{{.*?}}", "N", re.sub(r"(?s){%.*?%}", _blank, text))
    yield from _long_enough(text, r"(?s)(?:title|aria-label|placeholder)=\"([^\"]+)\"|>([^<]+)<")


def strings_of_script(path: Path) -> Iterator[tuple[int, str]]:
    """Yield messages in a page's script; what a template literal fills in counts as one word."""
    text = re.sub(r"(?s)/\*.*?\*/|^\s*//[^\n]*", _blank, path.read_text(), flags=re.M)
    text = re.sub(r"\$\{[^{}]*\}", "N", text)
    yield from _long_enough(text, r"\"([^\"\n]*)\"|'([^'\n]*)'|`([^`]*)`")


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _long_enough(text: str, pattern: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(pattern, text):
        words = " ".join((found[found.lastindex or 0] or "").split())
        if len(_WORD.findall(words)) >= FEWEST_WORDS and not _CODE.search(words):
            yield text.count("\n", 0, found.start()) + 1, words


READERS = {
    ".py": strings_of_code,
    ".md": passages_of_page,
    ".j2": texts_of_template,
    ".js": strings_of_script,
    ".ts": strings_of_script,
}


def product_files() -> list[Path]:
    """Return what a user reads: messages of the code, the report and the editor, and all pages but
    the records."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    code = [f"src/stepscope/**/*.{kind}" for kind in ("py", "j2", "js")]
    return [
        *sorted(file for at in [*code, "editors/vscode/src/**/*.ts"] for file in ROOT.glob(at)),
        *sorted(page for page in pages if "records" not in page.parts),
    ]


def main(arguments: list[str]) -> int:
    paths = [
        file
        for argument in map(Path, arguments)
        for file in ([argument] if argument.is_file() else sorted(argument.rglob("*")))
        if file.suffix in READERS
    ]
    found = [complaint for path in paths or product_files() for complaint in complaints(path)]
    for complaint in found:
        print(complaint)  # noqa: T201
    print(f"{len(found)} complaints", file=sys.stderr)  # noqa: T201
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
