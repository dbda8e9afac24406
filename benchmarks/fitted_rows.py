"""Put new values into the rows of src/stepscope/predict/data, where predictions read them."""

from __future__ import annotations

import json

from stepscope.predict.fitted import DATA


def write_values(values: dict[str, object]) -> None:
    """Replace the values of these rows, which must exist; what a row says about them stays."""
    for file in sorted({name.partition(".")[0] for name in values}):
        path = DATA / f"{file}.json"
        rows = {row["name"]: row for row in json.loads(path.read_text())}
        for name, value in values.items():
            if name.startswith(f"{file}."):
                rows[name]["value"] = value
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows.values())
        path.write_text(f"[\n{lines}\n]\n")
