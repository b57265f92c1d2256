"""The quick start of NNTile's design with weights from a file; tests/native/test_examples.py runs the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
SEQ, BATCH, WIDTH = 16, 8, 64


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_block_with_weights_from_pytorch(tmp_path):
    """Over eight devices, the output has the mean square that PyTorch computes from the same file."""
    generator = torch.Generator().manual_seed(3)
    names = ("W_query", "W_key", "W_value", "W_out")
    weights = {n: torch.randn(WIDTH, WIDTH, generator=generator) / 8 for n in names}
    weights |= {"ln_gamma": torch.rand(WIDTH, generator=generator), "ln_beta": torch.rand(WIDTH)}
    torch.save(weights, tmp_path / "checkpoint.pt")
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)
    x = torch.tensor(x)
    parts = [x @ weights[n] for n in names[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*parts) @ weights["W_out"] + x
    out = torch.nn.functional.layer_norm(out, (WIDTH,), weights["ln_gamma"], weights["ln_beta"])
    printed = run("17_transformer_block.py", tmp_path / "checkpoint.pt")
    assert "(8, 16, 64)" in printed
    assert abs(float(printed.split()[-1]) - out.square().mean().item()) < 2e-3
