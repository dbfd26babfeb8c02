"""What untrusted input costs: a lie is found before memory is spent on it, and work grows as the input does."""

from __future__ import annotations

import json
import struct
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from converters.checkpoint import open_checkpoint
from converters.conversion_plan import check_packable, plan_conversion
from converters.gguf_header import MAX_PARSED_NBYTES, read_gguf_header
from lmpack.errors import CheckpointError, LmpackError
from lmpack.strict_json import JsonError, parse_json
from tests.gguf_fixtures import ARRAY, METADATA, STRING, Raw, Tensor, gguf_bytes, moe_tensors, write_shards
from tests.safetensors_fixtures import Tensor as HFTensor
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import safetensors_bytes, safetensors_header, with_header, write_hf_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ONE_MEBIBYTE = 1 << 20


def peak_nbytes(work: Callable[[], object]) -> int:
    """The most memory that some work held at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def num_calls(work: Callable[[], object]) -> int:
    """How many functions some work called, Python's and C's."""
    count = 0

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(autouse=True, scope="module")
def _everything_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Modules are imported and patterns compiled at the first use, which is not the input's cost."""
    for model_of in (gguf_of, hf_folder_of):
        plan(model_of(tmp_path_factory.mktemp("first"), 1))


def refused(path: Path) -> None:
    with pytest.raises(LmpackError):
        plan(path)


def plan(path: Path) -> None:
    """Do all that a conversion does before it copies."""
    checkpoint = open_checkpoint(path)
    check_packable(checkpoint, plan_conversion(checkpoint), checkpoint.describe(), 4096)


GGUF_LIES = {
    "tensors": gguf_bytes(num_tensors=1 << 62),
    "keys": gguf_bytes(num_keys=1 << 62),
    "strings": gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", STRING, 1 << 59))}),
    "numbers": gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", 12, 1 << 59))}),
    "arrays": gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", ARRAY, 1 << 59))}),
    "a text": gguf_bytes(metadata={"a": Raw(STRING, struct.pack("<Q", (1 << 64) - 1))}),
    "a tensor past the end": gguf_bytes([Tensor("a", "F32", (1 << 50,), data=b"")], METADATA),
    "an offset that wraps": gguf_bytes([Tensor("a", "F32", (8,), offset=(1 << 64) - 16)], METADATA),
    "experts without end": gguf_bytes([Tensor("blk.0.ffn_up_exps.weight", "I8", (1 << 40, 1, 1), data=b"")], METADATA),
    "an alignment of a gibibyte": gguf_bytes([Tensor("a", "F32", (4,), data=b"")], METADATA | {"general.alignment": 1 << 30}),
}  # fmt: skip


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_a_lie_in_a_gguf_costs_no_memory(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF_LIES[lie] + bytes(ONE_MEBIBYTE // 4))
    assert peak_nbytes(lambda: refused(path)) < ONE_MEBIBYTE


SAFETENSORS_LIES = {
    "a header": struct.pack("<Q", 99_999_999) + b"{}" + bytes(1000),
    "a tensor": with_header(safetensors_header([HFTensor("a", "U8", (1 << 50,))]), b""),
    "dimensions": with_header({"a": {"dtype": "U8", "shape": [1] * 10_000, "data_offsets": [0, 1]}}, b"x"),
}


@pytest.mark.parametrize("lie", SAFETENSORS_LIES)
def test_a_lie_in_a_safetensors_header_costs_no_memory(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(SAFETENSORS_LIES[lie])
    assert peak_nbytes(lambda: refused(path)) < ONE_MEBIBYTE


def test_a_config_json_that_claims_many_layers_costs_no_memory(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 99_999}
    folder = write_hf_folder(tmp_path / "m", [[HFTensor("model.layers.99998.a", "U8", (1,))]], config=config)
    assert peak_nbytes(lambda: plan(folder)) < ONE_MEBIBYTE


@pytest.mark.parametrize(
    ("value_type", "value_nbytes"), [(STRING, 8), (ARRAY, 12)], ids=["empty strings", "empty arrays"]
)
def test_many_small_values_are_refused_before_they_fill_the_memory(
    tmp_path: Path, value_type: int, value_nbytes: int
) -> None:
    """The file has them all, as zeros that take no room on the drive; in memory each takes many times as much."""
    path = tmp_path / "m.gguf"
    count = MAX_PARSED_NBYTES // 50
    path.write_bytes(gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", value_type, count))}))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + count * value_nbytes)

    def read() -> None:
        with pytest.raises(CheckpointError, match="take more than 160000000 bytes of memory"):
            read_gguf_header(path)

    assert peak_nbytes(read) < 4 * ONE_MEBIBYTE


def gguf_of(folder: Path, factor: int) -> Path:
    """A GGUF whose keys, strings and tensors are all `factor` times as many."""
    metadata: dict[str, Any] = {f"key.{number}": ["x"] * 10 for number in range(20 * factor)}
    path = folder / "m.gguf"
    path.write_bytes(gguf_bytes(moe_tensors(num_layers=4 * factor, hidden=2, width=2), METADATA | metadata))
    return path


def split_gguf_of(folder: Path, factor: int) -> Path:
    tensors = moe_tensors(num_layers=4 * factor, layout="single", hidden=2, width=2)
    return write_shards(folder, [tensors[start :: 4 * factor] for start in range(4 * factor)])[0]


def hf_folder_of(folder: Path, factor: int) -> Path:
    """A folder whose tensors and shards are both `factor` times as many."""
    tensors = hf_moe_tensors(num_layers=2 * factor, hidden=2, width=2)
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2 * factor}
    return write_hf_folder(folder / "m", [tensors[at : at + 20] for at in range(0, len(tensors), 20)], config=config)  # fmt: skip


def many_experts_of(folder: Path, factor: int) -> Path:
    path = folder / "m.safetensors"
    path.write_bytes(
        safetensors_bytes(hf_moe_tensors(num_layers=1, num_experts=32 * factor, hidden=2, width=2))
    )
    return path


@pytest.mark.parametrize("model_of", [gguf_of, split_gguf_of, hf_folder_of, many_experts_of])
def test_planning_four_times_as_much_takes_four_times_the_calls(
    tmp_path: Path, model_of: Callable[[Path, int], Path]
) -> None:
    paths = []
    for factor in (2, 8):
        (tmp_path / str(factor)).mkdir()
        paths.append(model_of(tmp_path / str(factor), factor))
    small, large = (num_calls(lambda path=path: plan(path)) for path in paths)  # type: ignore[misc]
    assert large < 4.4 * small


@pytest.mark.parametrize(
    "document_of",
    [
        lambda size: {f"key {number}": number for number in range(size)},
        lambda size: [[]] * size,
        lambda size: ["x" * size],
        lambda size: {"a": [{"b": 1.5}] * size},
    ],
)
def test_strict_json_takes_calls_and_memory_in_proportion(document_of: Callable[[int], object]) -> None:
    small, large = (json.dumps(document_of(size)).encode() for size in (1000, 8000))
    assert num_calls(lambda: parse_json(large)) < 9 * num_calls(lambda: parse_json(small)) + 100
    assert peak_nbytes(lambda: parse_json(large)) < 100 * len(large)


def test_a_key_that_occurs_a_thousand_times_is_found_in_one_pass() -> None:
    raw = b"{" + b",".join(b'"a": 1' for _ in range(10_000)) + b"}"

    def parse() -> None:
        with pytest.raises(JsonError, match="'a' stands twice"):
            parse_json(raw)

    assert num_calls(parse) < 30_000
