"""The device table: peaks that hang together, names as drivers print them, a page that is equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.records.hardware import DEVICES, DeviceSpec, find_device

PAGE = Path(__file__).parent.parent.parent / "docs/reference/devices.md"
GIB = 1 << 30
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
each_device = pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.name)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI250X", "MI250X (one GCD)"),
        ("AMD Instinct MI250", "MI250 (one GCD)"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("H100 SXM", "H100 SXM"),
    ],
)
def test_a_name_as_drivers_print_it_finds_its_row(printed: str, name: str) -> None:
    assert _name(find_device(printed)) == name


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "NVIDIA",
        "NVIDIA A1000",
        "NVIDIA RTX A1000",
        "NVIDIA A100",
        "NVIDIA A100X",
        "NVIDIA H20",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GH200 480GB",
        "AMD Instinct MI300A",
        "AMD Radeon Graphics",
        "gfx942",
        "gfx90a",
        "cpu",
    ],
)
def test_a_device_that_is_not_in_the_table_finds_nothing(printed: str) -> None:
    assert find_device(printed) is None


@pytest.mark.parametrize(
    ("printed", "gib", "multiprocessors", "name"),
    [
        ("AMD Radeon Graphics", 191.98, 304, "MI300X"),
        ("AMD Radeon Graphics", 255.98, None, "MI325X"),
        ("gfx942:sramecc+:xnack-", 191.98, None, "MI300X"),
        ("gfx90a", 63.98, 110, "MI250X (one GCD)"),
        ("AMD Instinct MI250X / MI250", 63.98, 110, "MI250X (one GCD)"),
        ("AMD Instinct MI250X/MI250", 63.98, 104, "MI250 (one GCD)"),
        ("NVIDIA A100-PG509-200", 39.39, 108, "A100 SXM 40GB"),
        ("Tesla T4", 14.74, 40, "T4"),
    ],
)
def test_memory_and_multiprocessors_distinguish_devices_of_one_name(
    printed: str, gib: float, multiprocessors: int | None, name: str
) -> None:
    assert _name(find_device(printed, int(gib * GIB), multiprocessors)) == name


@pytest.mark.parametrize(
    ("printed", "gib", "multiprocessors"),
    [
        ("NVIDIA H200", 17, 16),
        ("NVIDIA H200", 139.8, 60),
        ("AMD Instinct MI300X", 191.98, 38),
        ("AMD Radeon Graphics", 24, 96),
        ("gfx950", 287.98, 256),
        ("gfx90a", 63.98, None),
    ],
)
def test_a_slice_of_a_device_or_a_tie_of_two_finds_nothing(
    printed: str, gib: float, multiprocessors: int | None
) -> None:
    """A slice has less than its device; an MI350X and an MI355X have the same size."""
    assert find_device(printed, int(gib * GIB), multiprocessors) is None


def test_the_h200_is_as_its_data_sheet_says_without_sparsity() -> None:
    h200 = find_device("NVIDIA H200", 150109880320, 132)
    assert h200 is not None
    assert h200.peaks["bf16"] == 989.5e12
    assert h200.peaks["tf32"] == 494.7e12
    assert h200.peaks["fp8"] == 1979e12
    assert h200.peaks["fp32"] == 67e12
    assert h200.bandwidth_bytes_s == 4.8e12
    assert h200.multiprocessors == 132


@each_device
def test_every_row_names_the_source_of_its_figures(row: DeviceSpec) -> None:
    document, _, section = row.source.partition(",")
    assert row.vendor in document or "AWS" in document
    assert section.strip()


@each_device
def test_fewer_bits_are_never_slower(row: DeviceSpec) -> None:
    assert set(row.peaks) <= set(DTYPES)
    order = [row.peaks[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8") if dtype in row.peaks]
    assert order == sorted(order)
    assert row.peaks["fp16"] >= 2 * row.peaks["fp32"]
    assert row.peaks.get("bf16", row.peaks["fp16"]) == row.peaks["fp16"]
    assert row.peaks.get("int8", row.peaks["fp16"]) >= row.peaks["fp16"]
    assert row.peaks.get("fp64", 0) <= row.peaks["fp32"]


@each_device
def test_tf32_is_half_of_bf16_and_bf16_half_of_fp8(row: DeviceSpec) -> None:
    if "tf32" in row.peaks:
        assert row.peaks["tf32"] == pytest.approx(row.peaks["bf16"] / 2, rel=0.015)
    if "fp8" in row.peaks:
        assert row.peaks["fp8"] == pytest.approx(row.peaks["bf16"] * 2, rel=0.015)


@each_device
def test_the_ridge_lies_where_training_devices_have_it(row: DeviceSpec) -> None:
    """FLOPs a byte from which fp16 work is bound by arithmetic: a slip of a unit would show."""
    assert 100 < row.peaks["fp16"] / row.bandwidth_bytes_s < 450
    assert 16 * GIB <= row.memory_bytes <= 288 * GIB
    assert 30e9 < row.link_bytes_s < 2e12
    assert row.link_bytes_s < row.bandwidth_bytes_s


def test_names_and_printed_names_are_one_to_one_but_for_amds_family_names() -> None:
    assert len({row.name for row in DEVICES}) == len(DEVICES)
    shared: dict[str, int] = {}
    for row in DEVICES:
        for printed in row.printed:
            shared[printed] = shared.get(printed, 0) + 1
    assert {printed for printed, count in shared.items() if count > 1} == {
        "MI250X / MI250",
        "gfx90a",
        "gfx942",
        "gfx950",
        "Radeon Graphics",
    }


def test_the_page_of_devices_is_the_table() -> None:
    page = PAGE.read_text()
    for row in DEVICES:
        assert _line(row) in page
    rates, sources = page.split("## Sources")
    assert rates.count("\n|") == len(DEVICES) + 2
    for row in DEVICES:
        source = f"{row.source}. {row.note}".rstrip()
        lines = [line for line in sources.splitlines() if line.endswith(f"|{source}|")]
        assert len(lines) == 1
        assert row.name in lines[0].split("|")[1].split(", ")


def _line(row: DeviceSpec) -> str:
    cells = [row.name]
    cells += [f"{row.peaks[dtype] / 1e12:g}" if dtype in row.peaks else "" for dtype in DTYPES]
    cells += [
        f"{row.bandwidth_bytes_s / 1e9:g}",
        f"{row.memory_bytes // GIB}",
        f"{row.multiprocessors}",
        f"{row.link}, {row.link_bytes_s / 1e9:g}",
    ]
    return f"|{'|'.join(cells)}|"


def _name(row: DeviceSpec | None) -> str | None:
    return None if row is None else row.name
