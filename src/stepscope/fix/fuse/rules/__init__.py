"""How each torch function is computed for all models at once: by a rule, by vmap, or one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from stepscope.errors import UsageError
from stepscope.fix.fuse.ledger import note, timed
from stepscope.fix.fuse.random_streams import drawing_as
from stepscope.fix.fuse.rules.registry import RULES, draws, writes
from stepscope.fix.fuse.stacked import NotFusableError, Stacked, all_common, is_final

_FILES = ("arithmetic", "shapes", "layers", "convolutions", "recurrent")
# What vmap would compute with one random stream for all models, or not at all.
_ONE_BY_ONE = {
    "lstm", "gru", "rnn_tanh", "rnn_relu", "embedding_bag", "ctc_loss", "alpha_dropout",
    "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli", "multinomial", "normal",
    "fractional_max_pool2d", "fractional_max_pool3d", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
}  # fmt: skip

_KNOWN_HOOKS = ("torch.utils.checkpoint", "torch.autograd.graph", "stepscope.")

for _file in _FILES:
    import_module(f"{__name__}.{_file}")


def compute(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Once, where all models would compute the same; else the first of three ways that can."""
    # What is packed for backward must be each model's own, unless torch only moves it.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not hooks[0].__module__.startswith(_KNOWN_HOOKS):
        raise NotFusableError("saved_tensors_hooks pack each model's own tensors")
    if all_common(args, kwargs) and not draws(name, kwargs):
        note(name, "once")
        return _compute_once(func, name, args, kwargs)
    if writes(name):
        first = args[0]  # what is written to needs a place for each model
        if isinstance(first, Stacked):
            first.separate()
        elif isinstance(first, torch.Tensor):
            raise NotFusableError("a tensor without models is written to")
    rule = RULES.get(name)
    if rule is not None:
        try:
            result = rule(func, *args, **kwargs)
        except Exception as error:
            _pass_on(error)
            result = NotImplemented  # what is wrong with the call, if anything, each model says
        if result is not NotImplemented:
            note(name, "fused")
            return result
    if name not in _ONE_BY_ONE:
        try:
            result = _by_vmap(func, args, kwargs)
        except Exception as error:
            _pass_on(error)
        else:
            note(name, "vmap")
            return result
    return one_by_one(func, name, args, kwargs, name in _ONE_BY_ONE or draws(name, kwargs))


def _pass_on(error: Exception) -> None:
    """Another way would not help."""
    if isinstance(error, NotFusableError) or is_final(error):
        raise error


def _compute_once(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    flat, shape = tree_flatten((tuple(args), kwargs))
    count = next(value.count for value in flat if isinstance(value, Stacked))
    values = [value.common if isinstance(value, Stacked) else value for value in flat]
    inner_args, inner_kwargs = tree_unflatten(values, shape)
    result = func(*inner_args, **inner_kwargs)
    if result is not None and any(result is value for value in values):  # in place
        return next(one for one, value in zip(flat, values, strict=True) if value is result)
    results, structure = tree_flatten(result)
    viewed = args[0] if args and isinstance(args[0], Stacked) else None
    for place, value in enumerate(results):
        if isinstance(value, torch.Tensor):
            results[place] = shared = Stacked.share(value, count)
            if viewed is not None and _root(value) is _root(viewed.common):
                call = partial(compute, func, name, args, kwargs)
                shared.view_again = partial(_view_again, viewed, call, place)
    return tree_unflatten(results, structure)


def _root(tensor: Any) -> Any:
    """The tensor that owns the memory, where it is known."""
    return tensor if tensor._base is None else tensor._base


def _view_again(viewed: Stacked, call: Callable[[], Any], place: int) -> Stacked:
    """The view of what is each model's own by now."""
    viewed.separate()
    own: Stacked = tree_flatten(call())[0][place]
    if _root(own.physical) is not _root(viewed.physical):
        raise NotFusableError("a part of a tensor without models is written to")
    return own


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

    def stacked(value: Any) -> Any:
        return Stacked(value, count) if isinstance(value, torch.Tensor) else value

    return tree_map(stacked, torch.vmap(call)(*(flat[place].front() for place in places)))


def one_by_one(
    func: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    own_numbers: bool = True,
) -> Any:
    """Each model's own call; their results are stacked. `own_numbers`: it may draw some."""
    note(name, "one by one")
    flat, shape = tree_flatten((tuple(args), kwargs))
    first = next(value for value in flat if isinstance(value, Stacked))
    results = []
    with timed("functions", name, first.physical):
        for model in range(first.count):
            values = [value.of(model) if isinstance(value, Stacked) else value for value in flat]
            inner_args, inner_kwargs = tree_unflatten(values, shape)
            with drawing_as(model) if own_numbers else nullcontext():
                results.append(func(*inner_args, **inner_kwargs))
        return stack_results(results)


def stack_input(value: Any, count: int) -> Any:
    """A list with one tensor, or packed sequence, for each model as a Stacked; likewise the parts
    of a tuple, such as the two states of an LSTM; all else as it is."""
    if isinstance(value, Stacked) and value.count != count:
        raise UsageError(f"a Stacked of {value.count} models, but {count} models are fused")
    if type(value) is tuple:
        return tuple(stack_input(part, count) for part in value)
    if not isinstance(value, list) or not value:
        return value
    if not isinstance(value[0], torch.Tensor | PackedSequence) or isinstance(value[0], Stacked):
        return value
    if len(value) != count:
        raise UsageError(f"{len(value)} tensors for {count} models: give one for each")
    try:
        return stack_results(value)
    except NotFusableError:
        raise UsageError(
            "the models' inputs differ in shape. Give them equal ones, or train with "
            "fuse_to_fit(...).train_step, which groups models by the shape of their inputs"
        ) from None


def stack_results(results: Sequence[Any], apart: bool = False) -> Any:
    """One structure with a Stacked where each model's has a tensor. `apart`: what cannot be stacked
    becomes a list with every model's."""
    flat, shapes = zip(*(tree_flatten(result) for result in results), strict=True)
    if any(shape != shapes[0] for shape in shapes):
        if apart:
            return list(results)
        raise NotFusableError("the models' results differ in structure")
    together = [_stack_values(values, apart) for values in zip(*flat, strict=True)]
    return tree_unflatten(together, shapes[0])


def _stack_values(values: tuple[Any, ...], apart: bool) -> Any:
    first = values[0]
    if any(isinstance(value, Stacked) for value in values):
        raise NotFusableError("one model's code got tensors of all models")
    if isinstance(first, torch.Tensor):
        if all(value.shape == first.shape for value in values):
            return Stacked(torch.stack(values), len(values))
        differs = "shape"
    elif any(
        isinstance(one, torch.Tensor) for one in tree_leaves(getattr(first, "__dict__", {}))
    ):  # a dataclass or the like
        together = copy.copy(first)
        vars(together).update(stack_results([vars(value) for value in values], apart))
        return together
    elif not isinstance(first, int | float | str) or all(value == first for value in values):
        return first
    else:
        differs = f"values such as {first!r}"
    if apart:
        return list(values)
    raise NotFusableError(f"the models' results differ in {differs}")


Stacked.compute = staticmethod(compute)

_apply_alone = vars(torch.autograd.Function)["apply"].__func__


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """torch asks no tensor before it runs a function with a backward of its own, and would see no
    gradients here: models compute it each, or by vmap where it allows that."""
    if not any(isinstance(value, Stacked) for value in args):
        result = _apply_alone(cls, *args, **kwargs)
        if any(isinstance(value, Stacked) for value in tree_leaves(result)):
            raise NotFusableError(f"{cls.__name__} got no tensor of the models and gives some")
        return result
    own, name = partial(_apply_alone, cls), f"{cls.__name__}.apply"
    has_rule = cls.generate_vmap_rule or cls.vmap is not torch.autograd.Function.vmap
    if has_rule or all_common(args, kwargs):
        return compute(own, name, args, kwargs)
    return one_by_one(own, name, args, kwargs)


torch.autograd.Function.apply = classmethod(_apply)
