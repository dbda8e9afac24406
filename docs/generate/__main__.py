"""Fill the generated parts of the docs: `python docs/generate`, or `--check` to only compare.

A page marks such a part itself; all else on it is written by hand:

    <!-- generated: NAME ARGUMENT -->
    ...
    <!-- end of generated -->

NAME is a key of BLOCKS. Its function gets ARGUMENT, which may be empty, and returns markdown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from changes_tables import changes_table
from cli_tables import verb_index, verb_tables
from devices_tables import peaks_table, sources_table
from fields_tables import fields_tables
from python_tables import signatures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCS = Path(__file__).parent.parent
BLOCKS: dict[str, Callable[[str], str]] = {
    "fields": fields_tables,
    "changes": changes_table,
    "peaks": peaks_table,
    "peak-sources": sources_table,
    "signatures": signatures,
    "verb": verb_tables,
    "verbs": verb_index,
}
_BLOCK = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) ?(?P<argument>[^\n]*?) -->\n)"
    r".*?(<!-- end of generated -->)",
    re.DOTALL,
)


def fill(page: str) -> str:
    """Return the page with its generated parts made from the code."""
    return _BLOCK.sub(
        lambda block: block[1] + BLOCKS[block["name"]](block["argument"]).strip() + "\n" + block[4],
        page,
    )


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Yield each page whose generated parts differ from the code, and what it should say."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        fresh = fill(page)
        if fresh != page:
            yield path, fresh


def main(arguments: list[str]) -> int:
    only_check = arguments == ["--check"]
    if arguments and not only_check:
        sys.stderr.write("usage: python docs/generate [--check]\n")
        return 2
    stale = list(stale_pages())
    for path, fresh in stale:
        sys.stdout.write(f"{'stale' if only_check else 'written'}: {path.relative_to(DOCS)}\n")
        if not only_check:
            path.write_text(fresh)
    return int(only_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
