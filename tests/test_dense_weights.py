"""The tensors every token uses: what they take in memory is what the budget counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmpack.dtype import dtype_nbytes
from lmpack.manifest import Source, SourceFile
from lmpack.pack import Pack
from lmpack.pack_writer import PackWriter
from runtime.dense_weights import DenseWeights, dense_nbytes

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "token_embd.weight": ("BF16", (6, 32)),
    "output_norm.weight": ("F16", (32,)),
    "blk.0.ffn_gate_inp.weight": ("BF16", (4, 32)),
    "blk.0.ffn_gate_inp_shexp.weight": ("Q8_0", (1, 32)),
}


def test_what_is_widened_counts_as_it_is_kept(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "dense.lmpack") as writer:
        for name, (dtype, shape) in TENSORS.items():
            writer.add_shared(name, dtype, shape)
        for name, (dtype, shape) in TENSORS.items():
            writer.write_shared(name, 0, bytes(dtype_nbytes(dtype, shape)))
        kept = writer.keep("source/a", b"a")
        source = Source("safetensors", (SourceFile("a", *kept, "source/a", *kept, ()),))
        writer.finish(architecture="x", config={}, source=source)
    pack = Pack.open(tmp_path / "dense.lmpack")
    weights = DenseWeights(pack, torch.device("cpu"))
    kept_nbytes = (
        weights.matrix("token_embd.weight").storage.nbytes
        + weights.vector("output_norm.weight").nbytes
        + weights.router("blk.0.ffn_gate_inp.weight").storage.nbytes
        + weights.router("blk.0.ffn_gate_inp_shexp.weight").storage.nbytes
    )
    assert dense_nbytes(pack.manifest) == kept_nbytes == 6 * 32 * 2 + (32 + 4 * 32 + 32) * 4
