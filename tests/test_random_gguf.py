"""The benchmarks' model generator: its files are sound, and its weights are what their sizes ask for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from lmpack.pack import Pack
from tests.round_trip import round_trip

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"layers": 1, "experts": 8, "top-k": 2, "hidden": 256, "expert-width": 256, "heads": 4, "kv-heads": 2}


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_random_weights_have_the_deviation_that_keeps_activations_finite(
    tmp_path: Path, demo_gguf: Path, quant: str
) -> None:
    path = tmp_path / "random.gguf"
    script = demo_gguf.parents[2] / "benchmarks" / "random_gguf.py"
    options = [f"--{name}={size}" for name, size in SIZES.items()]
    command = [sys.executable, str(script), str(path), *options, "--head-dim=64", f"--quant={quant}"]
    command += ["--vocab-from", str(demo_gguf)]
    subprocess.run(command, check=True, cwd=script.parents[1], env={"PYTHONPATH": str(script.parents[1])})
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, std in (
        ("blk.0.ffn_gate_exps.weight", 1 / 16),
        ("output.weight", 1 / 16),
        ("token_embd.weight", 1.0),
    ):
        weights = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert np.isfinite(weights).all()
        assert weights.std() == pytest.approx(std, rel=0.05)
        assert abs(weights.mean()) < 0.05 * std
    pack = round_trip(path, tmp_path)
    files = {expert.file for expert in Pack.open(pack.path).manifest.layer(0).experts}
    assert len(files) == 8  # no two experts are alike
