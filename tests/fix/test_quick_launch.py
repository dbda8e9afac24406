"""Kernels that were compiled before are launched at once, for arguments of the same kinds."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.fix.saved.encodings import quick_launch
from stepscope.fix.saved.encodings.quick_launch import launch


class FakeTensor:
    is_cuda = True

    def __init__(self, address: int, dtype: str = "float32") -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class FakeCompiled:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any) -> None:
            if self.fails:
                raise TypeError("another version takes other arguments")
            self.launched.append((grid, *args))

        return run


class FakeKernel:
    """As Triton's: compiles, and counts how often it was asked."""

    arg_names = ("values", "count", "BLOCK", "SIGNED")

    def __init__(self, *, fails: bool = False) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.compiled: list[FakeCompiled] = []
        self._fails = fails

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> FakeCompiled:
            self.asked.append((grid, args, options))
            self.compiled.append(FakeCompiled(self._fails))
            return self.compiled[-1]

        return run


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_launch.torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    variants = quick_launch._Variants()
    monkeypatch.setattr(quick_launch, "_variants", lambda: variants)


def test_the_second_launch_does_not_ask_triton() -> None:
    kernel, values = FakeKernel(), FakeTensor(1024)
    for grid in ((7,), (9, 2)):
        launch(kernel, grid, values, 32, SIGNED=True, BLOCK=64, num_warps=4)
    assert kernel.asked == [((7,), (values, 32), {"SIGNED": True, "BLOCK": 64, "num_warps": 4})]
    assert kernel.compiled[0].launched == [((9, 2, 1), values, 32, 64, True)]


@pytest.mark.parametrize(
    "other",
    [
        (FakeTensor(1028), 32, 64),  # no longer aligned
        (FakeTensor(1024, "bfloat16"), 32, 64),
        (FakeTensor(1024), 33, 64),  # not a multiple of 16
        (FakeTensor(1024), 1, 64),
        (FakeTensor(1024), 1 << 40, 64),
        (FakeTensor(1024), 32, 128),  # another constant
    ],
)
def test_another_kind_of_argument_is_another_variant(other: tuple[Any, ...]) -> None:
    kernel = FakeKernel()
    for values, count, block in ((FakeTensor(1024), 32, 64), other):
        launch(kernel, (1,), values, count, BLOCK=block, SIGNED=False)
    assert len(kernel.asked) == 2


def test_where_a_launch_fails_triton_does_it_from_then_on() -> None:
    kernel, values = FakeKernel(fails=True), FakeTensor(1024)
    for _ in range(3):
        launch(kernel, (1,), values, 32, BLOCK=64, SIGNED=False)
    assert len(kernel.asked) == 3
