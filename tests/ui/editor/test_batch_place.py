"""The number in the source that sets the batch size."""

from __future__ import annotations

import ast

import pytest

from stepscope.records.source_lines import BatchPlace, LineCosts
from stepscope.ui.editor.batch_size import batch_in_source

MEASURED = LineCosts(lines=(), step_ms=1, batch=64)


def found(text: str, batch: int | None = 64) -> str | None:
    """The line with the number in brackets."""
    costs = LineCosts(lines=(), step_ms=1, batch=batch)
    place = batch_in_source(text, costs)
    if place is None:
        return None
    line = text.splitlines()[place.line - 1]
    return (
        f"{line[: place.column]}<{line[place.column : place.end_column]}>{line[place.end_column :]}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loader = DataLoader(data, batch_size=64)", "loader = DataLoader(data, batch_size=<64>)"),
        ("loader = data.DataLoader(ds, 64)", "loader = data.DataLoader(ds, <64>)"),
        (
            "p.add_argument('--batch-size', default=64)",
            "p.add_argument('--batch-size', default=<64>)",
        ),
        (
            "p.add_argument('-b', '--bs', type=int, default=64)",
            "p.add_argument('-b', '--bs', type=int, default=<64>)",
        ),
        ("batch_size = 64", "batch_size = <64>"),
        ("BATCH = 64", "BATCH = <64>"),
        ("lr, bsz = 0.1, 64", "lr, bsz = 0.1, <64>"),
        ("batch_size: int = 64", "batch_size: int = <64>"),
        ("self.batch_size = 64", "self.batch_size = <64>"),
        ("def train(batch_size=64): pass", "def train(batch_size=<64>): pass"),
        ("def train(*, batch_size=64): pass", "def train(*, batch_size=<64>): pass"),
        ("config = {'lr': 1, 'batch_size': 64}", "config = {'lr': 1, 'batch_size': <64>}"),
        (
            "args = TrainingArguments(per_device_train_batch_size=64)",
            "args = TrainingArguments(per_device_train_batch_size=<64>)",
        ),
        ("x = torch.randn(64, 3)", "x = torch.randn(<64>, 3)"),
        ("x = torch.randint(0, 9, (64, 3))", "x = torch.randint(0, 9, (<64>, 3))"),
        ("N = 64\nx, y = torch.randn(N, 3), torch.zeros(N)", "N = <64>"),
        ("PER_STEP = 64\nload(batch_size=PER_STEP)", "PER_STEP = <64>"),
        ("PER_STEP = 64\nloader = DataLoader(ds, PER_STEP)", "PER_STEP = <64>"),
        ("größe = 'ä'; batch_size = 64", "größe = 'ä'; batch_size = <64>"),
        ("batch_size = 0x40", "batch_size = <0x40>"),
    ],
)
def test_every_way_to_write_it(text: str, expected: str) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "N = 64\nH = 64\nx, w = torch.randn(N, 3), torch.zeros(H, H)",
        "N = 64\nN = N * 2\nx = torch.randn(N, 3)",
        "N = 64\ndef make(N): return torch.randn(N, 3)",
        "eval_batch_size = 64",
        "num_batches = 64",
        "n_batches = 64",
        "test_batch_size = 64",
        "batch_size = 'auto'",
        "batch_size = -64",
        "batch_size = True",
        "x = torch.randn(32, 64)",
        "def broken(:",
        "",
    ],
)
def test_what_it_is_not(text: str) -> None:
    assert found(text) is None


def test_the_measured_batch_decides_between_candidates() -> None:
    text = "batch_size = 32\nbatch_size = 64\n"
    assert found(text) == "batch_size = <64>"
    assert found(text, batch=32) == "batch_size = <32>"
    assert found("batch_size = 16", batch=64) == "batch_size = <16>"  # four accumulated
    assert found("batch_size = 20", batch=35) == "batch_size = <20>"  # samples are not first
    assert found("x = torch.randn(64, 3)", batch=None) is None
    loader = "batch_size = 64\nloader = DataLoader(data, batch_size=64)"
    assert found(loader) == "loader = DataLoader(data, batch_size=<64>)"


def test_a_number_with_a_name_comes_before_one_that_divides_another_dimension() -> None:
    """Sequences first: 35 tokens of 20 samples, and an export with one sample."""
    text = "p.add_argument('--batch_size', default=20)\nexport(batch_size=1)\ngrid(batch_size=5)"
    assert found(text, 35) == "p.add_argument('--batch_size', default=<20>)"
    assert found("fit(batch_size=1)\nfit(batch_size=16)", 32) == "fit(batch_size=<16>)"


def test_only_the_number_changes() -> None:
    text = "# größe\nbatch_size = 64  # 64 fits\r\nx = 64\n"
    place = batch_in_source(text, MEASURED)
    assert place is not None
    assert text_with_batch(text, place, 96) == "# größe\nbatch_size = 96  # 64 fits\r\nx = 64\n"
    assert text_with_batch(text, place, place.value) == text


def test_lines_are_counted_as_python_counts_them() -> None:
    text = "a = '\x0c'\nb = '\u2028'\r\nbatch_size = 64\n"
    place = batch_in_source(text, MEASURED)
    assert place is not None
    assert place.line == 3
    assert text_with_batch(text, place, 8) == text.replace("64", "8")


def test_inputs_and_targets_change_together() -> None:
    text = "x, y = torch.randn(64, 3), torch.randint(0, 9, (64,))\n"
    place = batch_in_source(text, MEASURED)
    assert place is not None
    changed = text_with_batch(text, place, 8)
    assert changed == "x, y = torch.randn(8, 3), torch.randint(0, 9, (8,))\n"
    ast.parse(changed)


def text_with_batch(text: str, place: BatchPlace, batch: int) -> str:
    """Return the source with another batch size."""
    lines = text.split("\n")  # carriage returns stay where they are
    spots = [(place.line, place.column, place.end_column), *place.also]
    for number, column, end in sorted(spots, reverse=True):  # the last one first: columns shift
        line = lines[number - 1]
        lines[number - 1] = f"{line[:column]}{batch}{line[end:]}"
    return "\n".join(lines)
