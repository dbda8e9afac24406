"""torch.compile and whole steps on top of an array, and random numbers drawn together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import seeded, step

from stepscope.errors import UsageError
from stepscope.fix.fuse import ModelArray, fuse
from stepscope.fix.fuse.rules import convolutions
from stepscope.fix.fuse.rules.convolutions import transposed_gradients


def picture_net(share: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
        nn.Flatten(),
        nn.Dropout(share),
        nn.Linear(32, 5),
    )


def array_of(build: Callable[[], nn.Module], **settings: Any) -> ModelArray:
    models = seeded(build, 2)
    own = [
        torch.optim.Adam(model.parameters(), lr=1e-2 * (1 + place))
        for place, model in enumerate(models)
    ]
    return fuse(models, own, **settings)


def batches(steps: int, shared: bool = False) -> list[tuple[Any, Any]]:
    torch.manual_seed(5)

    def one() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(3, 3, 4, 4), torch.randint(5, (3,))

    if shared:
        return [one() for _ in range(steps)]
    pairs = [[one(), one()] for _ in range(steps)]
    return [([a[0], b[0]], [a[1], b[1]]) for a, b in pairs]


def train(array: ModelArray, compute: Callable[..., Any], given: list[Any]) -> torch.Tensor:
    return torch.stack([step(array, compute(x, y)) for x, y in given])


@pytest.mark.parametrize(
    "shared",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["own batches", "one batch"],
)
def test_a_compiled_loss_trains_as_the_plain_one(shared: bool) -> None:
    results = []
    for compiled in (False, True):
        array = array_of(picture_net, draws="together")

        def loss(x: Any, y: Any, array: ModelArray = array) -> torch.Tensor:
            return functional.cross_entropy(array(x), y)

        def plain(x: Any, y: Any, array: ModelArray = array, loss: Any = loss) -> Any:
            return array.apply_each(loss, x, y)

        compute = array.compile(loss, backend="aot_eager") if compiled else plain
        results.append((train(array, compute, batches(3, shared)), array.state_of(1)))
    (losses, state), (others, other) = results
    torch.testing.assert_close(losses, others)
    for name, value in state.items():  # running statistics too
        torch.testing.assert_close(other[name], value, msg=name)


@pytest.mark.slow
def test_a_compiled_array_follows_modes_shapes_and_models_that_leave() -> None:
    array = array_of(lambda: picture_net(0.5), draws="together")
    model = array.compile(backend="aot_eager")
    x = torch.randn(3, 3, 4, 4)
    assert not torch.equal(model(x).front(), model(x).front())  # dropout
    array.eval()
    for rows in (x, x[:2]):
        made = model(rows)
        for place in range(2):
            torch.testing.assert_close(made.of(place), array[place](rows))
    array.evict(0)
    made = model(x)
    assert made.count == 1
    torch.testing.assert_close(made.of(0), array[0](x))


def test_compiled_code_rounds_as_eager_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a maximum in bf16 is no more found by backward, whose gradients are then NaN."""
    asked: list[dict[str, Any]] = []

    def compile_by(run: Any, **options: Any) -> Any:
        asked.append(options)
        return run

    monkeypatch.setattr(torch, "compile", compile_by)
    array = array_of(picture_net, draws="together")
    x = torch.randn(3, 3, 4, 4)
    for options in (
        {},
        {"mode": "reduce-overhead", "fullgraph": True},
        {"options": {"emulate_precision_casts": False}},
        {"backend": "eager"},
    ):
        array.compile(**options)(x)
    plain, of_mode, own, other = asked
    rounds = {"emulate_precision_casts": True}
    assert plain == {"dynamic": False, "options": rounds}
    assert of_mode["options"] == {**rounds, "triton.cudagraphs": True}
    assert of_mode["fullgraph"]
    assert "mode" not in of_mode
    assert own["options"] == {"emulate_precision_casts": False}
    assert "options" not in other


def test_own_random_numbers_cannot_be_compiled() -> None:
    with pytest.raises(UsageError, match="together"):
        array_of(picture_net).compile()


def test_a_step_is_itself_where_there_is_no_gpu() -> None:
    losses = []
    for graphed in (False, True):
        array = array_of(picture_net)

        def train_step(x: Any, y: Any, array: ModelArray = array) -> Any:
            def cross_entropy(x: Any, y: Any) -> torch.Tensor:
                return functional.cross_entropy(array(x), y)

            loss = array.apply_each(cross_entropy, x, y)
            step(array, loss)
            return loss

        run: Any = array.graph(train_step) if graphed else train_step
        made = [run(x, y) for x, y in batches(5)]
        if graphed:
            assert run._graph is None
            assert all(not one.front().requires_grad for one in made)
        losses.append(torch.stack([one.front().detach() for one in made]))
    torch.testing.assert_close(*losses)


def test_dropout_together_drops_each_models_own_share() -> None:
    models = [nn.Sequential(nn.Dropout(share)) for share in (0.2, 0.8)]
    array = fuse(models, draws="together")
    x = torch.ones(50, 40)
    torch.manual_seed(0)
    made = array([x, x])
    for place, share in enumerate((0.2, 0.8)):
        own = made.of(place)
        kept = own != 0
        torch.testing.assert_close(own[kept], torch.full_like(own[kept], 1 / (1 - share)))
        assert abs(float(kept.float().mean()) - (1 - share)) < 0.1


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d])
def test_whole_channels_are_dropped_together_too(kind: Any) -> None:
    array = fuse([nn.Sequential(kind(0.5)) for _ in range(2)], draws="together")
    rest = (4,) if kind is nn.Dropout1d else (4, 4)
    torch.manual_seed(0)
    made = array([torch.ones(6, 8, *rest)] * 2).front().flatten(3)
    assert bool(((made == 0).all(3) | (made == 2).all(3)).all())
    assert not torch.equal(made[0], made[1])
    assert 0.2 < float((made == 0).float().mean()) < 0.8


def test_an_unknown_way_to_draw_is_refused() -> None:
    with pytest.raises(UsageError, match="draws is"):
        fuse([nn.Linear(2, 2)], draws="alone")  # type: ignore[arg-type]


# Transposed convolutions, as a GPU computes them in bf16: channels last.


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(5, 4, 4, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, (4, 3), 2, 1, output_padding=(0, 1)),
    )


def array_of_three() -> ModelArray:
    models = seeded(generator)
    own = [torch.optim.SGD(one.parameters(), 0.1) for one in models]
    return fuse(models, own, draws="together")


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_is_half_on_cuda", lambda _: True)


def trained(array: ModelArray, compute: Any, noise: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(3):
        loss = step(array, compute(noise))
    return [loss, *array.state_of(2).values()]


@pytest.mark.filterwarnings("ignore:.*script_method")  # of the compiler itself
@pytest.mark.usefixtures("channels_last")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise_learns", [False, True])
def test_a_compiled_generator_trains_as_the_plain_one(backend: str, noise_learns: bool) -> None:
    noise = torch.randn(2, 5, 1, 1, requires_grad=noise_learns)
    results = []
    for compiled in (False, True):
        array = array_of_three()

        def loss(noise: Any, array: ModelArray = array) -> torch.Tensor:
            return array(noise).square().mean()

        def plain(noise: Any, array: ModelArray = array, loss: Any = loss) -> Any:
            return array.apply_each(loss, noise)

        compute = array.compile(loss, backend=backend) if compiled else plain
        values = trained(array, compute, noise)
        if noise_learns:
            values.append(noise.grad)
            noise.grad = None
        results.append(values)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_lie_as_the_compiler_is_told() -> None:
    """Whatever layout the arguments have: this is what made compiled backward passes fail."""
    gradient, pictures = torch.randn(2, 8, 4, 4), torch.randn(2, 6, 1, 1)
    filters = torch.randn(6, 4, 4, 4)
    settings = ([1, 1], [0, 0], [0, 0], [1, 1], 2, [True, True])
    real = transposed_gradients(gradient, pictures, filters, *settings)
    with torch._subclasses.FakeTensorMode() as fake:
        told = transposed_gradients(
            *(fake.from_tensor(one) for one in (gradient, pictures, filters)), *settings
        )
    assert [one.stride() for one in real] == [one.stride() for one in told]
    assert real[1].is_contiguous(memory_format=torch.channels_last)
