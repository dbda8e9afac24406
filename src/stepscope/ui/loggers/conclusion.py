"""What `explain --json` says, as values and a text for a dashboard."""

from __future__ import annotations

from typing import Any

from stepscope.records.addresses import finding_page
from stepscope.records.figures import percent
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.ui.loggers.metric_log import PREFIX, RunConclusion
from stepscope.ui.words import one_line

_MOST_FINDINGS = 10
_MARKUP = lazy_pattern(r"[\\`*_\[\]<>|#&]")


def conclude(explained: dict[str, Any]) -> RunConclusion:
    """Figures that are not known are left out."""
    verdict = one_line(explained["verdict"])
    return RunConclusion(_values(explained), verdict, _text(explained))


def _values(explained: dict[str, Any]) -> dict[str, float]:
    budget = explained["budget"]
    values: dict[str, float | None] = {"run/step_ms": budget["step_ms"]}
    for part in budget["parts"]:
        values[f"budget/{part['id']}_ms"] = part["ms"]
        values[f"budget/{part['id']}_share"] = part["share"]
    for finding in explained["findings"]:
        values[f"finding/{finding['id']}"] = finding["share"]
    rank: dict[str, Any] = next(iter(explained["ranks"]), {})
    values["run/mfu"] = (rank.get("efficiency") or {}).get("mfu")
    values["run/peak_bytes"] = (rank.get("memory") or {}).get("peak_bytes")
    return {f"{PREFIX}/{name}": float(v) for name, v in values.items() if v is not None}


def _text(explained: dict[str, Any]) -> str:
    """The verdict is the first line."""
    lines = [_plain(explained["verdict"]), ""]
    for name in ("why", "next"):
        if explained.get(name):
            lines += [f"**{name}** {_plain(explained[name])}", ""]
    for finding in explained["findings"][:_MOST_FINDINGS]:
        share = f"{percent(finding['share'])} " if finding["share"] else ""
        page = f" ([{finding['id']}]({finding_page(finding['id'])}))"
        lines.append(f"- {share}{_plain(finding['summary'])}{page}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Names from a trace are text: no markup, no line breaks."""
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", " ".join(text.split()))
