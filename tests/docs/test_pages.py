"""The docs as a whole: every page can be reached, every link leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS = 56_500  # outside records
README_WORDS = range(450, 551)
# Pages as they lay before the docs had parts.
OLD_PAGES = re.findall(
    r"[\w-]+",
    """
    ab accuracy bench-regressions bench-results bench-scaling bench calibrate collectives
    compare demo devices doctor editor-vscode editor efficiency explain extending-whatifs
    extending-workloads formats fuse gather gpus health hosts-clocks hosts-scale hosts-slurm
    hosts json library lines live loggers lsp memory notebooks numbers probe pytest python
    record remedies run save-memory scale-out scan serve strategies sweep together-ddp
    together-server together top tune-statistics tune whatif
    """,
)


@cache
def site() -> dict[str, Any]:
    """Return mkdocs.yml; its own tags are of no interest here."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def without_code(page: Path) -> str:
    text = re.sub(r"(?ms)^( *)(`{3,4}).*?^ *\2 *$", "", page.read_text())
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as both GitHub and the site make them."""
    text = re.sub(r"(?ms)^( *)(`{3,4}).*?^ *\2 *$", "", page.read_text())
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.M)
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in headings:
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\- ]", "", words).strip()))
    return found


def files_in(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [file for entry in entries for file in files_in(entry)]


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *pages()]:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, heading = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            if not there.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif heading and there.suffix == ".md" and heading not in anchors(there):
                broken.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    assert not broken, "\n".join(broken)


def test_pages_link_only_to_what_the_site_has() -> None:
    outside = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", without_code(page))
        if "://" not in target and not (page.parent / target).resolve().is_relative_to(DOCS)
    ]
    assert not outside, "\n".join(outside)


def test_every_page_is_in_the_navigation() -> None:
    listed = files_in(site()["nav"])
    assert len(listed) == len(set(listed))
    assert {str(page.relative_to(DOCS)) for page in pages()} == set(listed)


def test_every_old_address_leads_on() -> None:
    (redirects,) = (
        plugin["redirects"]["redirect_maps"]
        for plugin in site()["plugins"]
        if isinstance(plugin, dict) and "redirects" in plugin
    )
    assert {f"{page}.md" for page in OLD_PAGES} == set(redirects)
    for target in redirects.values():
        assert (DOCS / target.partition("#")[0]).exists(), target


def test_a_reader_can_read_all_of_it() -> None:
    words = sum(len(page.read_text().split()) for page in pages() if "records" not in page.parts)
    assert words <= MOST_WORDS


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) in README_WORDS


@pytest.mark.parametrize(
    "page", sorted((DOCS / "records").glob("*.md")), ids=lambda page: page.stem
)
def test_a_record_begins_with_its_summary(page: Path) -> None:
    if page.stem != "README":
        assert re.match(r"# .+\n+\*\*[^*]+\*\*", page.read_text())
