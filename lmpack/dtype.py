"""Dtypes: how many bytes a tensor takes, for every type that GGUF and safetensors files hold.

Sizes of block types are those of ggml 0.20 (ggml_blck_size, ggml_type_size in ggml.c); the others are
those of safetensors 0.8. This module knows sizes only; what the bits mean is the runtime's business.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Block(NamedTuple):
    """The smallest piece of a tensor that stands on whole bytes."""

    num_elements: int
    nbytes: int


BLOCKS: dict[str, Block] = {
    # plain numbers
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), Block(1, 1)),
    "F8_E8M0": Block(1, 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), Block(1, 2)),
    **dict.fromkeys(("U32", "I32", "F32"), Block(1, 4)),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), Block(1, 8)),
    # safetensors' packed numbers
    "F4": Block(2, 1),
    "F6_E2M3": Block(4, 3),
    "F6_E3M2": Block(4, 3),
    # ggml's blocks of 32
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
    "Q8_1": Block(32, 36),
    "IQ4_NL": Block(32, 18),
    # Q4_0 with the blocks of 4 or 8 rows interleaved
    **dict.fromkeys(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"), Block(32, 18)),
    "MXFP4": Block(32, 17),
    # ggml's blocks of 64 and 128
    "NVFP4": Block(64, 36),
    "Q2_0": Block(64, 18),
    "Q1_0": Block(128, 18),
    # ggml's super-blocks of 256
    "Q2_K": Block(256, 84),
    "Q3_K": Block(256, 110),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
    "Q8_K": Block(256, 292),
    "IQ1_S": Block(256, 50),
    "IQ1_M": Block(256, 56),
    "IQ2_XXS": Block(256, 66),
    "IQ2_XS": Block(256, 74),
    "IQ2_S": Block(256, 82),
    "IQ3_XXS": Block(256, 98),
    "IQ3_S": Block(256, 110),
    "IQ4_XS": Block(256, 136),
    "TQ1_0": Block(256, 54),
    "TQ2_0": Block(256, 66),
}

# safetensors packs these across rows: only the whole tensor has to end on a byte
PACKED_ACROSS_ROWS = frozenset({"F4", "F6_E2M3", "F6_E3M2"})

GGML_DTYPES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        8: "Q8_0",
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        30: "BF16",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
        42: "Q2_0",
    }
)
"""The type number in a GGUF tensor info -> dtype; the numbers left out were withdrawn by ggml."""

WITHDRAWN_GGML_DTYPES: Mapping[int, str] = MappingProxyType({31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"})
"""Types that ggml gave up in December 2024 and that files were made of before: they are copied, and never run."""


def is_known(dtype: str) -> bool:
    """Tell whether this version knows the size of a dtype."""
    return dtype in BLOCKS


def block_of(dtype: str) -> Block:
    """Return a dtype's block; raise UnsupportedError for a dtype this version does not know."""
    block = BLOCKS.get(dtype)
    if block is None:
        raise UnsupportedError(
            f"dtype {dtype!r:.40} is not known to this version of lmpack; known are {', '.join(sorted(BLOCKS))}"
        )
    return block


def dtype_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of this shape (numpy order, [] is a scalar).

    Raises UnsupportedError for an unknown dtype, or a row that is not a whole number of blocks.
    """
    block = block_of(dtype)
    num_elements = math.prod(shape)
    blocked = num_elements if dtype in PACKED_ACROSS_ROWS else (shape[-1] if shape else 1)
    if blocked % block.num_elements:
        raise UnsupportedError(
            f"shape {list(shape)}: a row of {dtype} needs a multiple of {block.num_elements} elements, got {blocked}"
        )
    return num_elements // block.num_elements * block.nbytes
