"""Keywords added to constructor calls in the user's source, as many remedies need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from stepscope.fix.proposal import Script
    from stepscope.records.script_facts import Built


def set_arguments(
    script: Script,
    kind: str,
    arguments: Mapping[str, str],
    *,
    only: Collection[str] | None = None,
    positions: Mapping[str, int] | None = None,
    where: Callable[[Built], bool] | None = None,
    in_libraries: Mapping[str, str] | None = None,
) -> Proposal:
    """Give arguments (name -> source text) to every object of a kind where it is built.

    `only` names the types that take them; `positions` says where an argument stands if it is given
    without its name; `where` chooses among what was built. `in_libraries` (package -> sentence)
    says what to do if that package builds them, not the user's own code.
    """
    wanted = [
        built
        for built in script.facts.of_kind(kind)
        if built.trains and (only is None or built.type in only) and (where is None or where(built))
    ]
    proposal = Proposal()
    for built in _nearest_to_user(wanted, in_libraries or {}):
        if in_libraries and built.library in in_libraries:
            proposal += Proposal(by_hand=(in_libraries[built.library],))
            continue
        proposal += _set_where_built(script, built, arguments, positions or {})
    return proposal


def _nearest_to_user(wanted: list[Built], known: Collection[str]) -> list[Built]:
    """Libraries build objects again from those they were given: what the user's own code built
    comes first, then what a library builds that has an option for it."""
    direct = [built for built in wanted if built.direct]
    return direct or [built for built in wanted if built.library in known] or wanted


def _set_where_built(
    script: Script, built: Built, arguments: Mapping[str, str], positions: Mapping[str, int]
) -> Proposal:
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    for frame in built.frames[:1] if built.direct else ():
        source = script.source(frame.file)
        call = source.call_at(frame.line, built.type, frame.ends) if source else None
        if source is None or call is None:
            continue
        edits = source.set_keywords(call, arguments, positions)
        if edits is not None:
            return Proposal(edits=edits)
    where = f" (it is built at {built.frames[0].words})" if built.frames else ""
    return Proposal(by_hand=(f"give {built.type} {words}{where}",))
