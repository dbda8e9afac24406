"""A pruned VGG-like chain back by Blelloch's scan: sparsity, FLOPs and critical path by level.

    python benchmarks/scan_chain_table.py [--pruned 0.97] [--width 8] [--side 16] [--save FILE.json]

The chain has VGG-11's order of layers, narrower. The smallest weights of each layer are zero
(magnitude pruning). For one sample it prints how dense each layer's transposed Jacobian is, what a
level of the scan costs, and what going back layer by layer costs. The paper (Wang et al., MLSys
2020) compares the same: the cost of a step on the critical path against that of the baseline.
Gradients are compared with autograd's first.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "src"))

from stepscope.fix.scan import scan_chain

if TYPE_CHECKING:
    from stepscope.fix.scan.chain import ChainAnalysis

# VGG-11: channels over those of the first layer; None is a pool of 2.
_LAYERS = (1, None, 2, None, 4, 4, None, 8, 8, None, 8, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pruned", type=float, default=0.97, help="share of weights that are zero")
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--side", type=int, default=16, help="pixels of an image's side")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    rows = []
    for share in (0.0, options.pruned):
        row = measure(options.width, options.side, share)
        rows.append(row)
        print(table(row), flush=True)
        if options.save:
            options.save.write_text(json.dumps(rows, indent=1))


def vgg_like(width: int, side: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for times in _LAYERS:
        if times is None:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        else:
            layers += [nn.Conv2d(channels, times * width, 3, padding=1), nn.ReLU()]
            channels = times * width
    layers += [nn.Flatten(), nn.Linear(channels * side * side, 10)]
    return nn.Sequential(*layers).double()


def prune(model: nn.Sequential, share: float) -> float:
    """The smallest weights of each layer become zero; what share of all is zero then."""
    zeros, total = 0, 0
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                limit = layer.weight.abs().flatten().quantile(share) if share else -1.0
                layer.weight.mul_(layer.weight.abs() > limit)
                zeros += int((layer.weight == 0).sum())
                total += layer.weight.numel()
    return zeros / total


def measure(width: int, side: int, share: float) -> dict[str, Any]:
    model = vgg_like(width, side)
    zeros = prune(model, share)
    chain = scan_chain(copy.deepcopy(model))
    sample = torch.randn(3, side, side, dtype=torch.float64)
    analysis = chain.analyse(sample)
    return {
        "pruned": zeros,
        "gradient_error": _error(model, chain, sample.unsqueeze(0)),
        **describe(analysis),
    }


def describe(analysis: ChainAnalysis) -> dict[str, Any]:
    largest = max(analysis.one_by_one)
    return {
        "layers": len(analysis.one_by_one),
        "depth": len(analysis.levels),
        "depth_bound": 2 * math.ceil(math.log2(len(analysis.one_by_one) + 2)),
        "densities": list(analysis.densities),
        "levels": [
            {"products": level.products, "flops": level.flops, "critical": level.largest}
            for level in analysis.levels
        ],
        "critical_flops": sum(level.largest for level in analysis.levels),
        "chain_flops": sum(analysis.one_by_one),
        "step_over_baseline": max(level.largest for level in analysis.levels) / largest,
    }


def _error(model: nn.Module, chain: nn.Module, inputs: torch.Tensor) -> float:
    """The furthest that a gradient of the scan is from autograd's, as a share of it."""
    found = [
        torch.autograd.grad(one(inputs).square().sum(), list(one.parameters()))
        for one in (model, chain)
    ]
    return max(
        float((a - b).norm() / a.norm().clamp_min(1e-300)) for a, b in zip(*found, strict=True)
    )


def table(row: dict[str, Any]) -> str:
    lines = [
        f"{row['pruned']:.0%} of the weights pruned, {row['layers']} layers with a Jacobian; "
        f"gradients within {row['gradient_error']:.0e} of autograd's",
        "| level | products | FLOPs | of the largest product |",
        "|--:|--:|--:|--:|",
    ]
    for number, level in enumerate(row["levels"], 1):
        figures = (level["products"], level["flops"], level["critical"])
        lines.append(f"| {number} | " + " | ".join(f"{one:,}" for one in figures) + " |")
    lines += [
        f"critical path: {row['depth']} levels instead of {row['layers']}, "
        f"{row['critical_flops']:,} FLOPs; layer by layer {row['chain_flops']:,}",
        f"the largest product is {row['step_over_baseline']:.3g} times the largest of the baseline",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
