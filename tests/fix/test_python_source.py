"""Edits of many shapes of source: the result parses, says what was meant, and keeps the rest."""

from __future__ import annotations

import ast
import codecs
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import stepscope
from stepscope.fix.proposal import edited, with_indentation
from stepscope.fix.python_source import Edit, NoPlaceError, PythonSource

FILE = "train.py"

SHAPES = {
    "nested functions": """
def outer(model):
    def inner(x, *, scale=make(1)):
        y = model(x)

        # between statements
        return y * scale
    return inner
    # after the last statement
""",
    "classes and decorators": '''
class Trainer(Base):
    """A docstring
    over lines."""

    size: int = field(default=3)

    @property
    @cached(lambda self: key(self), size=4)
    def model(self):
        return self._model

    async def fit(self):
        async with session() as s, other(): await s.go()
        async for batch in s:
            await self.step(batch)
''',
    "calls over lines": """
optimizer = torch.optim.AdamW(
    model.parameters(),  # all of them
    lr=1e-3,
    # nothing else
)
loader = DataLoader(
    data,
    batch_size=4  # small
)
other = DataLoader(data,
                   batch_size=4)
third = DataLoader(
    (data),
)
fourth = DataLoader((data), (4))
fifth = DataLoader( )
sixth = DataLoader(  # nothing yet
)
chain = (
    build(a)
    .to(b)
    .cuda()
)
generator = total(x * y for x in a)
starred = f(*args)
hidden = f(a, **options)
""",
    "one line": """
for x in y: step(x)
if a: b(); c()
elif d: e()
else: f()
a = 1; b = f(2)
c = 3;
while True: break
class A: x = f()
with g(): h()
try: i()
except E: j()
finally: k()
""",
    "strings over lines": '''
def train():
    text = """first
  second
third {0}
""".format(model(1))
    other = f"""a {text} b
c {model(
    2)} d
"""
    joined = ("a"
              "b" 'c')
    slashed = "one \\
two"
    return text
''',
    "continuation": """
def train(a, b):
    total = a + \\
        b
    assert f(total), \\
  "a message"
    with open(a) as x, \\
            open(b) as y:
        pass
    return total
""",
    "match and walrus": """
match command:
    case [1, *rest] if (n := len(rest)) > 2:
        run(n)
    case Point(x=0, y=_) | None:
        pass
    case _: stop()
values = [y := f(x), y**2]
g = lambda a, b=f(1), *c, **d: (yield_(a), b)
type_ = x if f(y) else z
""",
    "other letters": """
# Größe und Ähnliches: é
größe = rufe("ä", wert=1)
x = "日本"; y = f("日本", größe)
def лосс(модель): return модель("ü")
for é in [1]:
    ö = f("ä")  # ñ
""",
    "dedented comments": """
def f():
    a = g()
# a comment at the edge
        # and one too deep
    b = h(
  1,
2)

    c = 3
""",
    "two spaces": """
def f(x):
  for y in x:
    g(y)
  return x
""",
    "tabs": """
def f(x):
\tfor y in x:
\t\tg(y,
\t\t\t1)
\t\t# a comment
\t\th(y)
\treturn x
class A:
    def spaces(self):
        return f(self)
""",
    "trailing blanks": "def f():  \n    \n    a = g() \n\t\n    return a   \n\n",
    "form feed": "import a\n\f\ndef f():\n    return g(a)\n",
}


def variants(text: str) -> Iterator[tuple[str, bytes]]:
    plain = text.encode()
    yield "plain", plain
    yield "windows", plain.replace(b"\n", b"\r\n")
    yield "no newline at the end", plain.rstrip(b"\n")
    yield "byte order mark", codecs.BOM_UTF8 + plain.lstrip(b"\n")


CASES = [
    pytest.param(text, id=f"{shape}, {variant}")
    for shape, source in SHAPES.items()
    for variant, text in variants(source)
]


def parsed(text: bytes) -> PythonSource:
    source = PythonSource.parse(FILE, text)
    assert source is not None
    return source


def make(source: PythonSource, edits: tuple[Edit, ...]) -> ast.Module:
    """Make edits, check that taking their text out gives the original, and parse the result."""
    after = edited(edits, lambda _file: source.text).get(FILE, source.text)
    kept, place, moved = [], 0, 0
    made = with_indentation(FILE, source.text, edits)
    for edit in sorted(made, key=lambda edit: edit.start):
        begin = edit.start + moved
        kept += [after[place:begin], source.text[edit.start : edit.end]]
        place = begin + len(edit.text)
        moved += len(edit.text) - (edit.end - edit.start)
    assert b"".join([*kept, after[place:]]) == source.text
    assert after.count(b"\r\n") in (0, after.count(b"\n")), "line ends are mixed"
    result = PythonSource.parse(FILE, after)
    assert result is not None, after.decode()
    return result.tree


def blocks_of(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def unwrapped(tree: ast.Module) -> ast.Module:
    for block in blocks_of(tree):
        for number, node in enumerate(block):
            if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "wrapper()":
                block[number : number + 1] = node.body
                return tree
    raise AssertionError("nothing is wrapped")


def without_marks(tree: ast.Module) -> ast.Module:
    for block in blocks_of(tree):
        block[:] = [node for node in block if ast.unparse(node) != "MARK"]
    return tree


def check_every_wrap(text: bytes) -> int:
    source, made = parsed(text), 0
    before = ast.dump(source.tree)
    for block in list(blocks_of(source.tree)):
        for first in range(len(block)):
            for last in range(first, len(block)):
                try:
                    edits = source.wrap(block[first], block[last], "with wrapper():")
                except NoPlaceError:
                    continue
                assert ast.dump(unwrapped(make(source, edits))) == before
                made += 1
    return made


def check_every_insertion(text: bytes) -> int:
    source, made = parsed(text), 0
    before = ast.dump(source.tree)
    for block in list(blocks_of(source.tree)):
        for number, statement in enumerate(block):
            for insert, shift in ((source.insert_before, 0), (source.insert_after, 1)):
                try:
                    edits = (insert(statement, "MARK"),)
                except NoPlaceError:
                    continue
                tree = make(source, edits)
                same = next(
                    other
                    for other in blocks_of(tree)
                    if len(other) > number + shift and ast.unparse(other[number + shift]) == "MARK"
                )
                assert len(same) == len(block) + 1
                if not (number == 0 and shift == 0 and ast.get_docstring(source.tree)):
                    assert ast.dump(without_marks(tree)) == before
                made += 1
    return made


def check_every_keyword(text: bytes) -> int:
    source, made = parsed(text), 0
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    for number, call in enumerate(calls):
        edits = source.set_keywords(call, {"new_one": "77", "new_two": "88"}, {})
        if edits is None:
            assert any(mark in source.segment(call) for mark in ("**", " for ", "model("))
            continue
        changed = [n for n in ast.walk(make(source, edits)) if isinstance(n, ast.Call)]
        given = changed[number].keywords
        assert [(k.arg, ast.unparse(k.value)) for k in given[-2:]] == [
            ("new_one", "77"),
            ("new_two", "88"),
        ]
        del given[-2:]
        assert list(map(ast.dump, changed)) == list(map(ast.dump, calls))
        made += 1
    return made


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("check", [check_every_wrap, check_every_insertion, check_every_keyword])
def test_every_place_of_every_shape(check: Callable[[bytes], int], text: bytes) -> None:
    check(text)


def test_most_places_are_found() -> None:
    """The properties above would hold for an editor that refuses everything."""
    plain = {shape: text.encode() for shape, text in SHAPES.items()}
    assert check_every_wrap(plain["nested functions"]) == 7
    assert check_every_wrap(plain["tabs"]) == 11
    assert check_every_insertion(plain["dedented comments"]) == 8
    assert check_every_keyword(plain["calls over lines"]) == 12
    assert check_every_keyword(plain["strings over lines"]) == 2


def some_edits(source: PythonSource, numbers: random.Random) -> list[Edit]:
    """A few wraps, inserted lines and keywords at random places."""
    blocks = list(blocks_of(source.tree))
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    edits: list[Edit] = []
    for _ in range(numbers.randint(2, 6)):
        block = numbers.choice(blocks)
        first = numbers.randrange(len(block))
        last = numbers.randrange(first, len(block))
        try:
            match numbers.randrange(4):
                case 0 | 1:
                    edits += source.wrap(block[first], block[last], "with wrapper():")
                case 2:
                    edits.append(source.insert_before(block[first], "MARK"))
                case _:
                    edits += source.set_keywords(numbers.choice(calls), {"new": "1"}, {}) or ()
        except NoPlaceError:
            continue
    return list(dict.fromkeys(edits))


@pytest.mark.parametrize("text", CASES)
def test_edits_of_all_kinds_add_up(text: bytes) -> None:
    numbers, source = random.Random(0), parsed(text)
    before = ast.dump(source.tree)
    for _ in range(15):
        try:
            tree = make(source, tuple(some_edits(source, numbers)))
        except ValueError:  # two wraps that cross
            continue
        without_marks(tree)
        while "wrapper" in ast.dump(tree):
            unwrapped(tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            call.keywords[:] = [keyword for keyword in call.keywords if keyword.arg != "new"]
        assert ast.dump(tree) == before


def test_own_source() -> None:
    """Real files, a few places each."""
    numbers = random.Random(0)
    files = sorted(Path(stepscope.__file__).parent.rglob("*.py"))
    for file in numbers.sample(files, 40):
        source = parsed(file.read_bytes())
        before = ast.dump(source.tree)
        blocks = list(blocks_of(source.tree))
        for block in numbers.sample(blocks, min(3, len(blocks))):
            first = numbers.randrange(len(block))
            last = numbers.randrange(first, len(block))
            try:
                edits = source.wrap(block[first], block[last], "with wrapper():")
            except NoPlaceError:  # an `elif`, or `def f(): ...`
                continue
            assert ast.dump(unwrapped(make(source, edits))) == before, file


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a(); b()\n", 1),
        ("for x in y: step()\n", 1),
        ("if a:\n    b()\nelif c:\n    d()\n", 3),
        ("a(); \\\nb()\n", 2),
    ],
)
def test_statements_that_share_a_line_are_left_alone(text: str, line: int) -> None:
    source = parsed(text.encode())
    statement = source.statement_at(line)
    if text.startswith("if"):
        branch = source.tree.body[0]
        assert isinstance(branch, ast.If)
        statement = branch.orelse[0]
    assert statement is not None
    with pytest.raises(NoPlaceError, match=rf"train\.py:{line}:"):
        source.wrap(statement, statement, "with wrapper():")
    with pytest.raises(NoPlaceError):
        source.insert_before(statement, "MARK")


def test_a_keyword_takes_the_layout_of_the_call() -> None:
    source = parsed(SHAPES["calls over lines"].encode())
    calls = {source.called(n) + str(n.lineno): n for n in ast.walk(source.tree) if _is_call(n)}

    def with_keyword(name: str) -> str:
        edit = source.set_keyword(calls[name], "x", "1")
        assert edit is not None
        return edited([edit], lambda _file: source.text)[FILE].decode()

    assert "    lr=1e-3,\n    x=1,\n    # nothing else\n)" in with_keyword("AdamW2")
    assert "    batch_size=4, x=1  # small\n)" in with_keyword("DataLoader7")
    assert "batch_size=4, x=1)" in with_keyword("DataLoader11")
    assert "    (data), x=1,\n)" in with_keyword("DataLoader13")
    assert "fourth = DataLoader((data), (4), x=1)" in with_keyword("DataLoader16")
    assert "fifth = DataLoader( x=1)" in with_keyword("DataLoader17")


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call)


@pytest.mark.parametrize(
    "head",
    [
        "import torch.optim as optim\n",
        "from torch.optim import AdamW as Optimizer\n",
        "import torch; torch.manual_seed(0)\n",
        '"""A docstring."""\nfrom __future__ import annotations\n',
        "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n\n",
        "",
        "try:\n    import a\nexcept ImportError:\n    a = None\nimport b\n",
        "import a\nif a:\n    import c\nasync def f():\n    pass\nimport late\n",
    ],
)
def test_an_import_comes_before_code_and_once(head: str) -> None:
    text = f"{head}x = 1\ny = 2\n".encode()
    source = parsed(text)
    edits = (*source.ensure_import("contextlib"), source.insert_after_imports("contextlib.x = 1"))
    tree = make(source, edits)
    names = [ast.unparse(node) for node in tree.body]
    assert names.index("import contextlib") < names.index("contextlib.x = 1") < names.index("y = 2")
    assert ast.get_docstring(tree) == ast.get_docstring(source.tree)
    compile(tree, FILE, "exec")  # imports of __future__ are still first
    again = edited(edits, lambda _file: text)[FILE]
    assert parsed(again).ensure_import("contextlib") == ()


def test_a_submodule_imports_its_package() -> None:
    assert parsed(b"import torch.nn\n").imports("torch")
    assert not parsed(b"import torch.nn as nn\n").imports("torch")
    assert not parsed(b"import torchvision\n").imports("torch")
    assert not parsed(b"import torch\n").imports("torch.nn")


@pytest.mark.parametrize(
    ("text", "line", "name", "found"),
    [
        ("import torch.optim as optim\no = optim.AdamW(p)\n", 2, "AdamW", "optim.AdamW(p)"),
        (
            "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m.to(d))\n",
            2,
            "DistributedDataParallel",
            "DDP(m.to(d))",
        ),
        ("o = kind(p)\n", 1, "AdamW", "kind(p)"),
        ("o = kind(m.parameters())\n", 1, "AdamW", None),
        ("a, b = DataLoader(x), DataLoader(y)\n", 1, "DataLoader", None),
        ("o = AdamW(\n    p,\n    lr=1,\n)\n", 1, "AdamW", "AdamW(\n    p,\n    lr=1,\n)"),
    ],
)
def test_a_call_is_found_by_line_and_name(
    text: str, line: int, name: str, found: str | None
) -> None:
    source = parsed(text.encode())
    call = source.call_at(line, name)
    assert (None if call is None else source.segment(call)) == found


def test_a_call_is_found_by_its_end() -> None:
    source = parsed(b"a, b = DataLoader(x), DataLoader(y)\nsuper().__init__(a)\n")
    first = source.call_at(1, "DataLoader", (1, 20))
    above = source.call_at(2, "MyLoader", (2, 19))
    assert first is not None
    assert above is not None
    assert source.segment(first) == "DataLoader(x)"
    assert source.segment(above) == "super().__init__(a)"
    assert source.call_at(1, "DataLoader", (1, 19)) is None


@pytest.mark.parametrize(
    "text",
    [
        b"def f(:\n",
        b"# -*- coding: latin-1 -*-\nx = '\xe4'\n",
        b"x = 1\ry = 2\r",
        b"x = '\xff'\n",
        b"x = 1\x00\n",
        b"(" * 5000 + b")" * 5000,
    ],
)
def test_source_that_cannot_be_edited_is_none(text: bytes) -> None:
    assert PythonSource.parse(FILE, text) is None


def test_the_innermost_statement_of_a_line() -> None:
    source = parsed(b"for x in y: step(x)\n@deco(\n    1)\ndef f(): return g()\n")
    lines = {line: source.statement_at(line) for line in (1, 2, 4)}
    kinds = {line: type(node).__name__ for line, node in lines.items()}
    assert kinds == {1: "Expr", 2: "FunctionDef", 4: "Return"}


def test_neighbours_keep_their_order() -> None:
    """Insertions of several edits at one place follow each other as they were asked for."""
    source = parsed(b"import a\nx = 1\n")
    edits = (*source.ensure_import("b"), *source.ensure_import("c"))
    names = [ast.unparse(node) for node in make(source, edits).body]
    assert all(one < two for one, two in pairwise(names[:3]))
