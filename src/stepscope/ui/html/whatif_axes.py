"""A control of the pane "What if" and its positions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A position of a control; an empty setting leaves the step as it is."""

    label: str
    setting: str

    @property
    def tick(self) -> str:
        """The label, short enough to stand under an axis."""
        words = self.label.removesuffix(" (now)").removesuffix(" MiB")
        return "traced" if words == "as traced" else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A control: a choice, a switch (two options, the first is now) or a slider."""

    id: str
    label: str
    hint: str
    kind: str
    options: tuple[Option, ...]
    why: str = ""  # the reason where it cannot be moved

    @property
    def now(self) -> int:
        """The option that changes nothing."""
        return next(i for i, option in enumerate(self.options) if not option.setting)
