"""Traces come back from their file as they were, and nothing that contradicts itself is let in."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lmpack.errors import ProfileError
from profiles.routing_trace import RoutingTrace
from tests.tiny_routing import ORIGIN, SHAPE, record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace() -> RoutingTrace:
    return record([[5, 3, 1, 1], [2, 1]]).trace(ORIGIN)


def test_a_trace_survives_its_file(trace: RoutingTrace, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    trace.save(path)
    assert RoutingTrace.load(path) == trace
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]


def test_an_empty_trace_survives_its_file(tmp_path: Path) -> None:
    empty = record([]).trace(ORIGIN)
    empty.save(tmp_path / "t.safetensors")
    assert RoutingTrace.load(tmp_path / "t.safetensors") == empty


def test_a_trace_knows_its_prompts_and_chunks(trace: RoutingTrace) -> None:
    assert (trace.num_tokens, trace.num_prompts, trace.num_chunks) == (13, 2, 6)
    assert trace.prompt_offsets.tolist() == [0, 10, 13]
    assert trace.prompt_lengths.tolist() == [5, 2]
    assert trace.chunk_offsets.tolist() == [0, 5, 8, 9, 10, 12, 13]
    assert trace.token_ids.tolist() == [*range(10), *range(3)]


def test_a_reader_that_knows_only_the_specification_reads_a_trace(
    trace: RoutingTrace, tmp_path: Path
) -> None:
    path = tmp_path / "t.safetensors"
    trace.save(path)
    raw = path.read_bytes()
    (header_nbytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_nbytes])
    metadata = json.loads(header["__metadata__"]["lmpack"])
    assert metadata == {
        "kind": "routing_trace",
        "version": 1,
        "architecture": "tinymoe",
        "pack_ids": ["aa" * 32],
        "tokenizers_sha256": ["bb" * 32],
        "prompt_sets_sha256": ["cc" * 32],
        "layers": [1, 2, 4],
        "num_experts": [6, 4, 5],
        "top_k": 2,
        "num_tokens": 13,
        "num_prompts": 2,
        "num_chunks": 6,
    }
    assert header["topk_ids"]["dtype"] == "I16"
    assert header["topk_ids"]["shape"] == [13, 3, 2]
    first, last = header["topk_ids"]["data_offsets"]
    ids = struct.unpack("<78h", raw[8 + header_nbytes + first : 8 + header_nbytes + last])
    assert list(ids) == trace.topk_ids.ravel().tolist()


def replace_array(trace: RoutingTrace, field: str, array: np.ndarray) -> RoutingTrace:
    changes: dict[str, Any] = {field: array}
    return replace(trace, **changes)


def changed(array: np.ndarray, at: Any, value: float) -> np.ndarray:
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("topk_ids", (4, 1, 0), 4, "token 4 has expert 4 in layer 2, expected 0 to 3"),
        ("topk_ids", (4, 1, 0), -1, "token 4 has expert -1 in layer 2"),
        ("topk_ids", (4, 1), 2, "token 4 has an expert twice in layer 2"),
        ("topk_weights", (4, 1, 0), np.nan, "topk_weights: not finite"),
        ("token_ids", 3, -5, "token_ids: expected numbers from 0, got -5"),
        ("prompt_offsets", 0, 1, "prompt_offsets: expected numbers that rise from 0 to num_tokens, 13"),
        ("prompt_offsets", 1, 7, "chunk_offsets: a chunk reaches over the border of two prompts"),
        ("prompt_offsets", -1, 12, "prompt_offsets"),
        ("prompt_lengths", 1, 4, "prompt_lengths: prompt 1 has 4, expected 1 to its 3 tokens"),
        ("prompt_lengths", 0, 0, "prompt_lengths: prompt 0 has 0"),
        ("chunk_offsets", 2, 5, "chunk_offsets: expected numbers that rise"),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(
    trace: RoutingTrace, field: str, at: Any, value: float, message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        replace_array(trace, field, changed(getattr(trace, field), at, value))


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("topk_ids", np.zeros((13, 3, 2), np.int32), r"topk_ids: expected int16 \[13, 3, 2\], got int32"),
        ("topk_ids", np.zeros((13, 2, 2), np.int16), r"got int16 \[13, 2, 2\]"),
        ("topk_weights", np.zeros((12, 3, 2), np.float32), "topk_weights: expected"),
        ("prompt_lengths", np.ones(3, np.int64), r"prompt_lengths: expected int64 \[2\]"),
        ("prompt_offsets", np.zeros(0, np.int64), "prompt_"),
        ("chunk_offsets", np.zeros(0, np.int64), "chunk_offsets"),
    ],
)
def test_an_array_of_the_wrong_shape_or_dtype_is_refused(
    trace: RoutingTrace, field: str, wrong: np.ndarray, message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        replace_array(trace, field, wrong)


def test_a_trace_of_other_choices_is_another_trace(trace: RoutingTrace) -> None:
    assert replace(trace, token_ids=trace.token_ids + 1) != trace
    assert trace != SHAPE
