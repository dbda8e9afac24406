"""Print values of a JSON answer by their paths: `... --json | python pick.py budget.parts`."""

import json
import sys
from typing import Any


def pick(answer: Any, path: str) -> Any:
    """Follow a dotted path; a number counts into a list."""
    for name in path.split("."):
        answer = answer[int(name)] if isinstance(answer, list) else answer[name]
    return answer


def main() -> None:
    answer = json.load(sys.stdin)
    for path in sys.argv[1:]:
        value = pick(answer, path)
        if isinstance(value, list):
            print(f"{path}:", *(f"  {json.dumps(row)}" for row in value), sep="\n")
        else:
            print(f"{path}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
