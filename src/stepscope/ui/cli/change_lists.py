"""Lists of changes: those that stepscope applies, for `tune --list` and `run --with list`."""

from __future__ import annotations

import click


def print_applied_changes(*, as_json: bool) -> None:
    """Print each change with its values and what it does to the numbers."""
    from stepscope.fix.remedies import FIXES
    from stepscope.records.remedies import REMEDIES
    from stepscope.ui.tune.plan import EFFECT_WORDS

    if as_json:
        from stepscope.ui.json_text import write_json

        listed = [
            {
                "id": name,
                "what": REMEDIES[name].action,
                "effect": str(fix.effect),
                "values": [value for value in fix.values if value],
            }
            for name, fix in FIXES.items()
        ]
        write_json({"schema": 1, "changes": listed})
        return
    width = max(map(len, FIXES))
    for name, fix in FIXES.items():
        click.echo(f"{name:<{width}}  {REMEDIES[name].action}")
        values = ", ".join(f"{name}={value}" for value in fix.values if value)
        more = [f"it {EFFECT_WORDS[fix.effect]}", *([f"values: {values}"] if values else [])]
        click.echo(f"{'':<{width}}  {'; '.join(more)}")
