"""How each torch function is computed for all models at once: by a rule, by vmap, or one by one."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stepscope.fix.fuse.ledger import note
from stepscope.fix.fuse.model_streams import drawing_as
from stepscope.fix.fuse.rules.registry import RULES, draws
from stepscope.fix.fuse.stacked import NotFusableError, Stacked, all_common

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FILES = (
    "elementwise", "shapes", "reductions", "products", "convolutions", "norms", "pools",
    "embeddings", "dropout", "attention", "losses",
)  # fmt: skip
# What vmap would compute with one random stream for all models, or not at all.
_ONE_BY_ONE = {
    "lstm", "gru", "rnn_tanh", "rnn_relu", "embedding_bag", "ctc_loss", "alpha_dropout",
    "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli", "multinomial", "normal",
    "fractional_max_pool2d", "fractional_max_pool3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
}  # fmt: skip

for _file in _FILES:
    import_module(f"{__name__}.{_file}")


def compute(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Once, where all models would compute the same; else the first of three ways that can."""
    if all_common(args, kwargs) and not draws(name, kwargs):
        note(name, "once")
        return _compute_once(func, args, kwargs)
    rule = RULES.get(name)
    if rule is not None:
        result = rule(func, *args, **kwargs)
        if result is not NotImplemented:
            note(name, "fused")
            return result
    if name not in _ONE_BY_ONE:
        try:
            result = _by_vmap(func, args, kwargs)
        except NotFusableError:
            raise
        except Exception:
            pass
        else:
            note(name, "vmap")
            return result
    note(name, "one by one")
    return one_by_one(func, args, kwargs, name in _ONE_BY_ONE or draws(name, kwargs))


def _compute_once(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    flat, shape = tree_flatten((tuple(args), kwargs))
    count = next(value.count for value in flat if isinstance(value, Stacked))
    values = [value.common if isinstance(value, Stacked) else value for value in flat]
    inner_args, inner_kwargs = tree_unflatten(values, shape)
    result = func(*inner_args, **inner_kwargs)
    if result is not None and any(result is value for value in values):  # in place
        return next(one for one, value in zip(flat, values, strict=True) if value is result)
    return tree_map(
        lambda value: Stacked.share(value, count) if isinstance(value, torch.Tensor) else value,
        result,
    )


def _by_vmap(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    flat, shape = tree_flatten((tuple(args), kwargs))
    places = [place for place, value in enumerate(flat) if isinstance(value, Stacked)]
    count = flat[places[0]].count

    def call(*stacked: torch.Tensor) -> Any:
        values = list(flat)
        for place, value in zip(places, stacked, strict=True):
            values[place] = value
        inner_args, inner_kwargs = tree_unflatten(values, shape)
        return func(*inner_args, **inner_kwargs)

    result = torch.vmap(call)(*(flat[place].front() for place in places))
    return tree_map(lambda value: _wrapped(value, count), result)


def one_by_one(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    own_numbers: bool = True,
) -> Any:
    """Each model's own call; their results are stacked. `own_numbers`: it may draw some."""
    flat, shape = tree_flatten((tuple(args), kwargs))
    count = next(value.count for value in flat if isinstance(value, Stacked))
    results = []
    for model in range(count):
        values = [value.of(model) if isinstance(value, Stacked) else value for value in flat]
        inner_args, inner_kwargs = tree_unflatten(values, shape)
        with drawing_as(model) if own_numbers else nullcontext():
            results.append(func(*inner_args, **inner_kwargs))
    return stack_results(results)


def stack_results(results: Sequence[Any]) -> Any:
    """One structure with a Stacked where each model's has a tensor."""
    flat, shapes = zip(*(tree_flatten(result) for result in results), strict=True)
    together = []
    for values in zip(*flat, strict=True):
        if isinstance(values[0], torch.Tensor):
            if any(value.shape != values[0].shape for value in values):
                raise NotFusableError("the models' results differ in shape")
            together.append(Stacked(torch.stack(values), len(values)))
        else:
            together.append(values[0])
    return tree_unflatten(together, shapes[0])


def _wrapped(value: Any, count: int) -> Any:
    return Stacked(value, count) if isinstance(value, torch.Tensor) else value


Stacked.compute = staticmethod(compute)
