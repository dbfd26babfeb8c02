"""A matrix in the blocks that the checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch

from lmpack.dtype import dtype_nbytes
from lmpack.errors import UnsupportedError

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A [out_features, in_features] matrix over memory that somebody else owns."""

    storage: torch.Tensor  # uint8, one-dimensional, contiguous, on the compute device
    dtype: str
    shape: tuple[int, int]  # [out_features, in_features]
    interleaved: bool = False  # by ggml: only its matrix products can read it

    def float32(self) -> torch.Tensor:
        """The dequantised matrix, float32 [out_features, in_features], by gguf's own codecs."""
        assert not self.interleaved
        if self.dtype in _PLAIN_DTYPES:
            return self.storage.view(_PLAIN_DTYPES[self.dtype]).view(self.shape).float()
        num_rows, num_columns = self.shape
        rows = self.storage.cpu().numpy().reshape(num_rows, dtype_nbytes(self.dtype, (num_columns,)))
        try:
            floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.dtype])
        except (KeyError, NotImplementedError):
            raise UnsupportedError(
                f"a {self.dtype} matrix of shape {list(self.shape)}: the gguf package has no codec for this dtype; "
                f"convert from another quantization"
            ) from None
        # A copy in torch's own memory, which is always aligned alike: products of it give the same bits every time.
        return torch.tensor(np.ascontiguousarray(floats), dtype=torch.float32, device=self.storage.device)

    def unpaired(self, num_heads: int) -> Weight:
        """The same rows with each head's pairs (2i, 2i + 1) moved to (i, i + head_dim / 2)."""
        head_dim = self.shape[0] // num_heads
        rows = self.storage.view(num_heads, head_dim // 2, 2, -1).transpose(1, 2).flatten()
        return Weight(rows, self.dtype, self.shape)
