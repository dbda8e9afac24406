"""Addresses of the project's pages. Nothing is ever fetched from them: they are links to click."""

SITE = "https://stepscope.github.io/stepscope"


def finding_page(finding: str) -> str:
    """Return the page about a finding, by its id."""
    return f"{SITE}/findings/{finding}/"
