"""Rules by the name of the torch function they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
DRAWING = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "feature_dropout",
    "alpha_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_", "rand_like",
    "randn_like", "randint_like", "multi_head_attention_forward", "scaled_dot_product_attention",
    "fractional_max_pool2d", "fractional_max_pool3d",
}  # fmt: skip

_WRITING = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__",
}  # fmt: skip


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """`rule(func, *args, **kwargs)` gets what was called; NotImplemented leaves it to vmap."""

    def register(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        return rule

    return register


def draws(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the function draws random numbers, of which each model has its own."""
    return name in DRAWING or bool(arguments.get("dropout_p"))


def writes(name: str) -> bool:
    """Whether the function changes its first argument."""
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def count_of(*values: Any) -> int:
    return next(value.count for value in values if isinstance(value, Stacked))


def front_of(value: Any, count: int) -> torch.Tensor:
    """[models, *shape], also of a tensor that all models share."""
    if isinstance(value, Stacked):
        return value.front()
    shared: torch.Tensor = value
    return shared.unsqueeze(0).expand(count, *shared.shape)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def rest_of(args: tuple[Any, ...], kwargs: dict[str, Any], **usual: Any) -> tuple[Any, ...]:
    """Return the values of a torch function's other parameters, named in order with defaults."""
    given = {**usual, **dict(zip(usual, args, strict=False)), **kwargs}
    if len(given) > len(usual) or len(args) > len(usual):
        raise TypeError(f"a rule does not know all of {sorted(kwargs)}")
    return tuple(given.values())
