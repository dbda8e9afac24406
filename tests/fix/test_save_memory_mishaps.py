"""save_memory where a pass fails or is interrupted, and where a model is copied or hooked."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from random_nets import same_bits
from saved_trainings import trained
from torch import nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver


class DropPath(nn.Module):
    """Leaves out whole samples, with numbers in the operators around the noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (0.9 + torch.rand(x.shape[0], 1)).floor()
        return x.div(0.9) * kept


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = DropPath()
        self.error: BaseException | None = None  # to be raised in the middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.norm(self.inner(x)) * 1.5)
        if self.error is not None:
            raise self.error
        return x + torch.tanh(self.drop(hidden))


class Speech(nn.Module):
    """Torch saves other tensors for this loss when its operators are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.letters = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.letters(functional.gelu(self.hidden(x))).log_softmax(-1)
        frames, spoken = x.shape[:2]
        lengths = torch.full((spoken,), frames), torch.full((spoken,), 2)
        return functional.ctc_loss(scores, torch.ones(spoken, 2, dtype=torch.long), *lengths)


def residuals() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual()), torch.randn(16, 8)


def end_with(error: BaseException, model: Any, x: torch.Tensor) -> None:
    """A pass that does not reach its end."""
    model[1].error = error
    with pytest.raises(type(error)):
        model(x)
    model[1].error = None


def as_planned(saver: MemorySaver) -> bool:
    assert saver.plan is not None
    assert saver.plan.changes_something()
    return saver.held_bytes == saver.plan.saved_bytes


def test_numbers_are_compared_where_operators_are_watched() -> None:
    model, x = residuals()
    plain = trained(copy.deepcopy(model), x, rate=0.1)
    saver = save_memory(model, warmup=0)
    assert same_bits(plain, trained(model, x, rate=0.1))
    assert saver.notes == []
    assert as_planned(saver)


def test_a_loss_that_saves_something_else_when_operators_are_watched() -> None:
    torch.manual_seed(0)
    model, x = Speech(), torch.randn(12, 3, 6)
    plain = trained(copy.deepcopy(model), x, 10, rate=0.1)
    saver = save_memory(model, warmup=0)
    assert same_bits(plain, trained(model, x, 10, rate=0.1))
    assert saver.notes == []
    assert as_planned(saver)


def test_hooks_between_operators_hide_who_made_a_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda *passed: passed[2] * 1.5)
    model[2].register_full_backward_hook(lambda *_: None)
    x = torch.randn(16, 8)
    plain = trained(copy.deepcopy(model), x, rate=0.1)
    saver = save_memory(model, warmup=0)
    assert same_bits(plain, trained(model, x, rate=0.1))
    assert saver.plan is not None
    assert saver.held_bytes in (None, saver.plan.saved_bytes)


def test_failed_passes_are_neither_planned_nor_counted() -> None:
    model, x = residuals()
    saver = save_memory(model, warmup=0)
    for _ in range(6):
        end_with(ValueError(), model, x)
        assert saver.plan is None
    trained(model, x, 4, rate=0.1)
    for _ in range(6):
        end_with(ValueError(), model, x)
    assert saver.notes == []
    assert as_planned(saver)


def test_a_pass_inside_an_error_handler_is_a_pass() -> None:
    model, x = residuals()
    saver = save_memory(model, warmup=0)
    try:
        raise KeyError("of somebody else")
    except KeyError:
        trained(model, x, 4, rate=0.1)
    assert as_planned(saver)


@pytest.mark.parametrize("before", [0, 1, 4])
def test_an_interrupt_ends_the_pass(before: int) -> None:
    """In the recorded pass, and in the first and later ones with the plan."""
    model, x = residuals()
    saver = save_memory(model, warmup=0)
    trained(model, x, before, rate=0.1)
    end_with(KeyboardInterrupt(), model, x)
    copy.deepcopy(model)
    bare, _ = residuals()
    bare.load_state_dict(model.state_dict())
    assert same_bits(trained(bare, x, rate=0.1), trained(model, x, rate=0.1))
    assert as_planned(saver)
    assert saver.notes == []
    assert gc.isenabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_removed_after_an_interrupt_nothing_stays_active() -> None:
    model, x = residuals()
    saver = save_memory(model, warmup=0)
    end_with(KeyboardInterrupt(), model, x)
    saver.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("saved", [False, True])
def test_a_copy_of_the_model_plans_for_itself(saved: bool) -> None:
    model, x = residuals()
    saver = save_memory(model, warmup=0)
    trained(model, x, 4, rate=0.1)
    if saved:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(model)
    expected = trained(model, x, rate=0.1)
    assert same_bits(expected, trained(other, x, rate=0.1))
    assert as_planned(saver)


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": "half"},
        {"max_slowdown": "5%"},
        {"max_slowdown": float("nan")},
        {"warmup": 1.5},
        {"plan": "plan.json"},
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(options))}="):
        save_memory(nn.Linear(2, 2), **options)


def test_a_target_that_leaves_no_time_is_said_to_be_the_reason() -> None:
    model, x = residuals()
    saver = save_memory(model, warmup=0, max_slowdown=0.0)
    trained(model, x, 2, rate=0.1)
    assert saver.plan is not None
    (note,) = [note for note in saver.plan.notes if "worth it" in note]
    assert note.startswith("Nothing is worth it within 0% of a step. ")
