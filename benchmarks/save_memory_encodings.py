"""Encodings of save_memory on this device: right to the last bit, bytes held, and GB/s.

    PYTHONPATH=src python3 benchmarks/save_memory_encodings.py --save FILE.json [--seconds 40]

One row an encoding and type: whether it comes back (lossy ones: the largest error as a share of the
tensor's largest element), plain bytes over held bytes, and plain bytes over the time to encode and
to decode. Then ReLU's backward from bits beside torch's own, and the link to host memory. Rows are
saved one by one; a run that is cut goes on where it ended. `--tiny` takes small tensors, also on a
CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from stepscope.fix.saved.encodings import encode_use, encode_value, pooling_spec
from stepscope.fix.saved.encodings.encoded import same_bits
from stepscope.fix.saved.encodings.exact import sparse_spec
from stepscope.fix.saved.encodings.offload import link_of
from stepscope.fix.saved.step_record import LOSSY

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7
LARGE, TINY = 1 << 26, 1 << 12  # elements
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="start no row after this")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    parser.add_argument("--tiny", action="store_true", help="small tensors, as on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = (
        json.loads(options.save.read_text()) if options.save and options.save.exists() else []
    )
    known = {row["name"] for row in rows}
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext
    end = time.monotonic() + options.seconds
    for name, measure in checks(device, TINY if options.tiny else LARGE).items():
        if name in known or time.monotonic() > end:
            continue
        try:
            with alone():
                row = {"name": name, **measure()}
        except Exception as error:
            row = {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}
        rows.append(row)
        print(line(row), flush=True)
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wrong = [row["name"] for row in rows if "error" in row or not row.get("right", True)]
    print("wrong: " + ", ".join(wrong) if wrong else "all right")


def checks(device: torch.device, count: int) -> dict[str, Callable[[], Row]]:
    """The most telling rows first."""
    found: dict[str, Callable[[], Row]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        word = str(dtype).removeprefix("torch.")
        found[f"sign {word}"] = partial(sign, device, count, dtype)
        found[f"relu backward from bits {word}"] = partial(relu_backward, device, count, dtype)
        found[f"sparse {word}"] = partial(sparse, device, count, dtype)
        for spec in LOSSY:
            if dtype.itemsize > 2 or spec not in ("bf16", "fp16"):
                found[f"{spec} {word}"] = partial(lossy, device, count, dtype, spec)
    found["bits"] = partial(masks, device, count)
    found["window 2x2"] = partial(window, device, count, 2)
    found["window 3x3"] = partial(window, device, count, 3)
    found["narrow uint8"] = partial(narrow, device, count)
    found["link to host memory"] = partial(link, device, count)
    return found


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:<38} {row['error']}"
    cells = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float)]
    return f"{row['name']:<38} {'right' if row.get('right', True) else 'WRONG'}  {'  '.join(cells)}"


def activations(device: torch.device, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(count, device=device, generator=generator).to(dtype)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40], device=device)
    x[:5] = odd.to(dtype)
    return x


def exact(tensor: torch.Tensor, encode: Callable[[], Any]) -> Row:
    encoded = encode()
    right = bool(same_bits(encoded.decode().flatten(), tensor.flatten()))
    return {"right": right, **speed(tensor, encode)}


def speed(tensor: torch.Tensor, encode: Callable[[], Any]) -> Row:
    encoded = encode()
    return {
        "smaller": tensor.nbytes / max(1, encoded.size_bytes),
        "encode_gb_s": tensor.nbytes / 1e9 / seconds(encode, tensor.device),
        "decode_gb_s": tensor.nbytes / 1e9 / seconds(encoded.decode, tensor.device),
    }


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The fastest of some rounds, after one more."""
    run()
    times = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return max(1e-9, min(times))


def sign(device: torch.device, count: int, dtype: torch.dtype) -> Row:
    output = torch.relu(activations(device, count, dtype))
    gradient = activations(device, count, dtype).flip(0)
    encode = partial(encode_use, "sign", output)
    backward = torch.ops.aten.threshold_backward
    decoded = encode().decode()
    right = bool(same_bits(backward(gradient, decoded, 0), backward(gradient, output, 0)))
    return {"right": right, **speed(output, encode)}


def relu_backward(device: torch.device, count: int, dtype: torch.dtype) -> Row:
    output = torch.relu(activations(device, count, dtype))
    gradient = torch.randn_like(output)
    encoded = encode_use("sign", output)
    backward = torch.ops.aten.threshold_backward

    def from_bits() -> torch.Tensor:
        return backward(gradient, encoded.decode(), 0)

    right = bool(same_bits(from_bits(), backward(gradient, output, 0)))
    plain_s = seconds(lambda: backward(gradient, output, 0), device)
    return {"right": right, "plain_ms": 1e3 * plain_s, "ms": 1e3 * seconds(from_bits, device)}


def sparse(device: torch.device, count: int, dtype: torch.dtype) -> Row:
    output = torch.relu(activations(device, count, dtype))
    spec = sparse_spec(output)
    return exact(output, partial(encode_value, spec, output))


def lossy(device: torch.device, count: int, dtype: torch.dtype, spec: str) -> Row:
    x = activations(device, count, dtype)[512:].clone()
    encoded = encode_value(spec, x)
    error = float((encoded.decode().float() - x.float()).abs().max() / x.abs().max())
    on_host = lossy_on_host(x[: 1 << 16], spec)
    return {
        "right": error < 0.14 and on_host,
        "largest_error": error,
        **speed(x, partial(encode_value, spec, x)),
    }


def lossy_on_host(x: torch.Tensor, spec: str) -> bool:
    """Whether the device gives the same bits as the CPU; 4-bit ones with the same seed."""
    from stepscope.fix.saved.encodings.lossy import encode_four_bits

    def decoded(tensor: torch.Tensor) -> torch.Tensor:
        encoded = encode_four_bits(tensor, 3) if spec == "4-bit" else encode_value(spec, tensor)
        return encoded.decode().cpu()

    sample = x.clone()
    return bool(same_bits(decoded(sample), decoded(sample.cpu())))


def masks(device: torch.device, count: int) -> Row:
    mask = activations(device, count, torch.float32) > 0
    return exact(mask, partial(encode_value, "bits", mask))


def window(device: torch.device, count: int, kernel: int) -> Row:
    side = 64 if count >= LARGE else 8
    x = activations(device, count, torch.float32).view(-1, 16, side, side)
    stride, padding = (kernel, 0) if kernel == 2 else (2, 1)
    _, indices = functional.max_pool2d(x, kernel, stride, padding, return_indices=True)
    spec = pooling_spec("max_pool2d_with_indices", (x, kernel, stride, padding))
    return exact(indices, partial(encode_value, spec, indices))


def narrow(device: torch.device, count: int) -> Row:
    numbers = torch.arange(count, device=device) % 256
    return exact(numbers, partial(encode_value, "narrow uint8", numbers))


def link(device: torch.device, count: int) -> Row:
    """Offload and fetch while the device computes; whether all comes back."""
    host = link_of(device)
    if host is None:
        return {"note": "no link"}
    values = [torch.full((count // 8,), float(n), device=device) for n in range(6)]
    encoded = []
    for place, value in enumerate(values):
        encoded.append(encode_value("offload", value))
        values[place] = torch.empty(0)
        del value
        torch.empty(count // 8, device=device).fill_(-1)  # would overwrite what was freed early
    right = all(
        bool((one.decode() == float(n)).all()) for n, one in reversed(list(enumerate(encoded)))
    )
    measured = host.speed()
    return {
        "right": right,
        "out_gb_s": measured.out_bytes_per_ns,
        "in_gb_s": measured.in_bytes_per_ns,
        "host_us": measured.host_ns / 1e3,
    }


if __name__ == "__main__":
    main()
