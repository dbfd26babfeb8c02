"""Importance matrices of both of llama.cpp's containers give the same weights, and broken ones are refused."""

from __future__ import annotations

import hashlib
import random
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from converters.importance_matrix import ImportanceMatrix
from lmpack.errors import CheckpointError, LmpackError
from tests.gguf_fixtures import Tensor, gguf_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Sums = Mapping[
        str, tuple[NDArray[np.float32], NDArray[np.float32]]
    ]  # name -> sums [n, columns], counts [n]

EXPERTS, DENSE = "blk.0.ffn_down_exps.weight", "blk.0.attn_q.weight"


def gguf_imatrix(sums: Sums) -> bytes:
    """The GGUF that llama-imatrix writes."""
    tensors = []
    for name, (values, counts) in sums.items():
        tensors.append(Tensor(f"{name}.in_sum2", "F32", values.shape, values.tobytes()))
        tensors.append(Tensor(f"{name}.counts", "F32", (len(counts), 1), counts.tobytes()))
    return gguf_bytes(
        tensors, {"general.type": "imatrix", "imatrix.chunk_count": 3, "imatrix.chunk_size": 512}
    )


def legacy_imatrix(entries: Mapping[str, tuple[NDArray[np.float32], int]]) -> bytes:
    """The .dat that llama-imatrix wrote before: sums, and by how many calls to divide them."""
    raw = struct.pack("<i", len(entries))
    for name, (values, num_calls) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", num_calls, values.size)
        raw += values.astype("<f4").tobytes()
    return raw + struct.pack("<ii", 3, 4) + b"text"


SUMS: Sums = {
    EXPERTS: (np.arange(12, dtype=np.float32).reshape(3, 4), np.array([2, 0, 4], np.float32)),
    DENSE: (np.full((1, 8), 6, np.float32), np.array([3], np.float32)),
}


def test_the_gguf_gives_means_and_ones_for_an_expert_that_no_token_reached(tmp_path: Path) -> None:
    (tmp_path / "imatrix.gguf").write_bytes(gguf_imatrix(SUMS))
    matrix = ImportanceMatrix.read(tmp_path / "imatrix.gguf")
    assert matrix.sha256 == hashlib.sha256(gguf_imatrix(SUMS)).hexdigest()
    experts = matrix.of(EXPERTS, 3, 4)
    assert experts is not None
    assert experts.tolist() == [[0, 0.5, 1, 1.5], [1, 1, 1, 1], [2, 2.25, 2.5, 2.75]]
    dense = matrix.of(DENSE, 1, 8)
    assert dense is not None
    assert (dense == 2).all()
    assert matrix.of("output.weight", 1, 8) is None


def test_the_older_file_gives_the_same(tmp_path: Path) -> None:
    raw = legacy_imatrix(
        {EXPERTS: (np.arange(12, dtype=np.float32), 4), DENSE: (np.full(8, 6, np.float32), 0)}
    )
    (tmp_path / "imatrix.dat").write_bytes(raw)
    matrix = ImportanceMatrix.read(tmp_path / "imatrix.dat")
    experts, dense = matrix.of(EXPERTS, 3, 4), matrix.of(DENSE, 1, 8)
    assert experts is not None
    assert dense is not None
    assert experts.tolist() == (np.arange(12).reshape(3, 4) / 4).tolist()
    assert (dense == 6).all()


def test_the_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "imatrix.gguf").write_bytes(gguf_imatrix(SUMS))
    with pytest.raises(CheckpointError, match="has 12 weights, this model needs 4 x 4"):
        ImportanceMatrix.read(tmp_path / "imatrix.gguf").of(EXPERTS, 4, 4)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("container", ["gguf", "dat"])
def test_weights_that_cannot_be_are_refused(tmp_path: Path, container: str, value: float) -> None:
    values = np.full((1, 8), value, np.float32)
    gguf = gguf_imatrix({DENSE: (values, np.array([3], np.float32))})
    path = tmp_path / f"imatrix.{container}"
    path.write_bytes(gguf if container == "gguf" else legacy_imatrix({DENSE: (values, 3)}))
    with pytest.raises(CheckpointError, match="negative or not finite"):
        ImportanceMatrix.read(path)


def test_what_is_no_importance_matrix_is_refused(tmp_path: Path, demo_gguf: Path) -> None:
    with pytest.raises(CheckpointError, match="no importance matrix in it"):
        ImportanceMatrix.read(demo_gguf)
    for raw in (b"", b"abc", b"\xff" * 100, struct.pack("<i", 5), struct.pack("<iii", 1, -1, 5)):
        (tmp_path / "x.dat").write_bytes(raw)
        with pytest.raises(
            CheckpointError,
            match=r"x\.dat: (is not an importance matrix, or .*; name a file that|no importance matrix in it)",
        ):
            ImportanceMatrix.read(tmp_path / "x.dat")
    (tmp_path / "x.dat").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer"):
        ImportanceMatrix.read(tmp_path / "x.dat")


def test_sums_whose_mean_is_beyond_a_float_are_one_error(tmp_path: Path) -> None:
    huge, tiny = np.full((1, 8), 1e38, np.float32), np.full(1, 1e-30, np.float32)
    (tmp_path / "x.gguf").write_bytes(gguf_imatrix({DENSE: (huge, tiny)}))
    with pytest.raises(CheckpointError, match="negative or not finite"):
        ImportanceMatrix.read(tmp_path / "x.gguf")


@pytest.mark.parametrize("container", ["gguf", "dat"])
def test_damaged_files_are_refused_or_give_weights(tmp_path: Path, container: str) -> None:
    good = gguf_imatrix(SUMS) if container == "gguf" else legacy_imatrix({DENSE: (np.ones(8, np.float32), 2)})
    pick = random.Random(5)
    for _ in range(300):
        raw = bytearray(good[: pick.randrange(len(good))] if pick.random() < 0.3 else good)
        if raw:
            raw[pick.randrange(len(raw))] ^= 1 << pick.randrange(8)
        (tmp_path / "x").write_bytes(raw)
        with suppress(LmpackError):
            assert ImportanceMatrix.read(tmp_path / "x").weights
