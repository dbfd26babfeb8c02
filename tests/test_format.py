"""FORMAT.md: today's writer gives yesterday's bytes, and a stranger's reader understands them."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors

from lmpack import (
    alignment,
    converted_tensor,
    dtype,
    layer_entry,
    manifest,
    source_file,
    strict_json,
    tensor_info,
)
from lmpack.manifest import Source, SourceFile, SourceSegment
from lmpack.pack_writer import PackWriter

if TYPE_CHECKING:
    from tests.conftest import TinyPack

FORMAT = (Path(manifest.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")


# --- the independent reader: json, struct, hashlib and FORMAT.md, nothing of lmpack ---


def align(n: int, a: int) -> int:
    return (n + a - 1) // a * a


def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


class StrangersReader:
    """Reads a pack as section 9 of FORMAT.md says; refuses with an AssertionError."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "manifest.json").read_bytes()
        assert len(raw) <= 67_108_864
        assert raw[:47] == b'{"format": "lmpack", "version": 1, "pack_id": "'
        self.folder = folder
        self.doc = json.loads(raw, object_pairs_hook=no_twins)
        self.pack_id = hashlib.sha256(raw[:47] + b"0" * 64 + raw[111:]).hexdigest()
        assert self.doc["pack_id"] == raw[47:111].decode() == self.pack_id
        self.layers = {layer["layer"]: layer for layer in self.doc["layers"]}
        for layer in self.doc["layers"]:
            self.check_layout(layer["parts"], 256, layer["stride"])
            own = [f"experts/L{layer['layer']:03d}/E{e:04d}.bin" for e in range(len(layer["experts"]))]
            for entry in layer["experts"]:
                assert entry["nbytes"] == layer["stride"]
                data = (folder / entry["file"]).read_bytes()
                assert hashlib.sha256(data).hexdigest() == entry["sha256"]
                assert entry["file"] in own
                end = 0
                for part in [*layer["parts"], {"offset": layer["stride"], "nbytes": 0}]:
                    assert not any(data[end : part["offset"]])
                    end = part["offset"] + part["nbytes"]
        self.shared_bin = (folder / "shared.bin").read_bytes()
        self.check_layout(self.doc["shared"], self.doc["page_size"], len(self.shared_bin))
        self.shared = {tensor["name"]: tensor for tensor in self.doc["shared"]}
        for name, tensor in self.shared.items():
            assert hashlib.sha256(self.tensor(f"shared:{name}")).hexdigest() == tensor["sha256"]

    def check_layout(self, tensors: list[dict[str, Any]], alignment: int, nbytes: int) -> None:
        end = 0
        for tensor in tensors:
            assert tensor["offset"] == align(end, alignment)
            end = tensor["offset"] + tensor["nbytes"]
        assert nbytes == align(end, self.doc["page_size"])

    def tensor(self, name: str) -> bytes:
        kind, _, rest = name.partition(":")
        if kind == "shared":
            tensor = self.shared[rest]
            return self.shared_bin[tensor["offset"] : tensor["offset"] + tensor["nbytes"]]
        number, *expert, role = rest.split(":")
        layer = self.layers[int(number)]
        (part,) = (part for part in layer["parts"] if part["role"] == role)
        experts = [layer["experts"][int(expert[0])]] if kind == "expert" else layer["experts"]
        files = ((self.folder / entry["file"]).read_bytes() for entry in experts)
        return b"".join(data[part["offset"] : part["offset"] + part["nbytes"]] for data in files)

    def source_file(self, file: dict[str, Any]) -> bytes:
        kept, at, end, out = (self.folder / file["kept"]).read_bytes(), 0, 0, b""
        assert hashlib.sha256(kept).hexdigest() == file["kept_sha256"]
        for segment in [*file["segments"], {"offset": file["nbytes"], "nbytes": 0, "tensor": None}]:
            gap = segment["offset"] - end
            out, at = out + kept[at : at + gap], at + gap
            out += self.tensor(segment["tensor"]) if segment["tensor"] else b""
            end = segment["offset"] + segment["nbytes"]
        assert at == len(kept) == file["kept_nbytes"]
        assert hashlib.sha256(out).hexdigest() == file["sha256"]
        return out


# --- what it reads ---


def test_a_strangers_reader_reads_every_tensor(tiny_pack: TinyPack) -> None:
    reader = StrangersReader(tiny_pack.path)
    assert reader.pack_id == tiny_pack.manifest.pack_id
    for name, raw in tiny_pack.tensors.items():
        assert reader.tensor(name) == raw
    assert {f"shared:{name}" for name in reader.shared} <= tiny_pack.tensors.keys()


def test_a_strangers_reader_gives_the_source_back(tiny_pack: TinyPack) -> None:
    reader = StrangersReader(tiny_pack.path)
    files = {file["name"]: reader.source_file(file) for file in reader.doc["source"]["files"]}
    assert files == tiny_pack.sources
    raw = files["model-00002-of-00002.safetensors"]
    (length,) = struct.unpack_from("<Q", raw)
    assert json.loads(raw[8 : 8 + length])["shared:output.weight"]["shape"] == [5000]
    tensors = dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]
    assert bytes(tensors["experts:3:down"]["data"]) == reader.tensor("experts:3:down")


# --- golden bytes ---


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The pack of FORMAT.md's section 12."""
    ups = [bytes(range(0x10, 0x18)), bytes(range(0x20, 0x28))]
    downs = [bytes(range(0x30, 0x38)), bytes(range(0x40, 0x48))]
    norm = struct.pack("<2f", 1.0, 1.0)
    header = (
        b'{"up":{"dtype":"F16","shape":[2,2,2],"data_offsets":[0,16]},'
        b'"down.0":{"dtype":"F16","shape":[2,2],"data_offsets":[16,24]},'
        b'"down.1":{"dtype":"F16","shape":[2,2],"data_offsets":[24,32]},'
        b'"norm":{"dtype":"F32","shape":[2],"data_offsets":[32,40]}}'
    )
    rest = struct.pack("<Q", 248) + header.ljust(248)
    raw = rest + b"".join(ups) + b"".join(downs) + norm
    with PackWriter(tmp_path / "example.lmpack") as writer:
        writer.add_layer(0, 2, [("up", "F16", (2, 2)), ("down", "F16", (2, 2))])
        writer.add_shared("output_norm.weight", "F32", (2,))
        for expert in (1, 0):
            writer.write_part(0, expert, "down", downs[expert])
            writer.write_part(0, expert, "up", ups[expert])
        writer.write_shared("output_norm.weight", 0, norm)
        kept_nbytes, kept_sha256 = writer.keep("source/model.safetensors.rest", rest)
        places = [
            (16, "experts:0:up"),
            (8, "expert:0:0:down"),
            (8, "expert:0:1:down"),
            (8, "shared:output_norm.weight"),
        ]
        segments, at = [], len(rest)
        for nbytes, tensor in places:
            segments.append(SourceSegment(at, nbytes, tensor))
            at += nbytes
        file = SourceFile(
            "model.safetensors",
            len(raw),
            hashlib.sha256(raw).hexdigest(),
            "source/model.safetensors.rest",
            kept_nbytes,
            kept_sha256,
            tuple(segments),
        )
        writer.finish(
            architecture="example",
            config={"rms_norm_eps": 1e-6, "num_hidden_layers": 1, "num_experts": 2},
            source=Source("safetensors", (file,)),
        )
    return tmp_path / "example.lmpack"


def hex_dump(title: str) -> dict[int, bytes]:
    """Return offset -> bytes of the hex dump that follows `title` in FORMAT.md."""
    block = re.search(rf"{re.escape(title)}.*?\n\n((?:    [0-9a-f]{{8}}  [^\n]*\n)+)", FORMAT, re.DOTALL)
    assert block, title
    rows = (line.split(maxsplit=1) for line in block[1].strip().splitlines())
    return {int(offset, 16): bytes.fromhex(row) for offset, row in rows}


def test_the_writer_gives_the_manifest_of_the_example(example: Path) -> None:
    printed = re.search(r"```json\n(.*?)```", FORMAT, re.DOTALL)
    assert printed
    assert (example / "manifest.json").read_text() == printed[1]
    assert "manifest.json, 1,537 bytes" in FORMAT
    assert len(printed[1]) == 1537


@pytest.mark.parametrize("file", ["experts/L000/E0000.bin", "experts/L000/E0001.bin", "shared.bin"])
def test_the_writer_gives_the_bytes_of_the_example(example: Path, file: str) -> None:
    wanted = bytearray(4096)
    for offset, row in hex_dump(f"`{file}`, 4,096 bytes").items():
        wanted[offset : offset + 16] = row
    assert (example / file).read_bytes() == wanted


def test_the_example_gives_its_source_back(example: Path) -> None:
    reader = StrangersReader(example)
    (file,) = reader.doc["source"]["files"]
    raw = reader.source_file(file)
    for title in ("`source/model.safetensors.rest`, 256 bytes", "`model.safetensors`, 296 bytes"):
        for offset, row in hex_dump(title).items():
            assert raw[offset : offset + len(row)] == row
    assert len(raw) == 296
    assert f"SHA-256 `{hashlib.sha256(raw).hexdigest()[:8]}…`" in FORMAT


def test_the_tiny_pack_has_the_bytes_it_always_had(tiny_pack: TinyPack) -> None:
    hashes = {
        str(file.relative_to(tiny_pack.path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(tiny_pack.path.rglob("*"))
        if file.is_file()
    }
    assert hashes == {
        "experts/L001/E0000.bin": "24b97261dd559bee90d5ea62dc470054f1bd40de3a3a55aa61921f3fa88f4978",
        "experts/L001/E0001.bin": "9903025f89d53cec9a4d9ccee75f67f159014d07e3bf6d5fc94230a9b81a0cd5",
        "experts/L003/E0000.bin": "4b4c83b5d029452342cd7c80da2d5d89affe5b4a018b8d5e64b64922ad885fc8",
        "experts/L003/E0001.bin": "170a43cb66791b3808580899769b432f6282f7b5152ce018be48e9e832b59330",
        "manifest.json": "8a8cd20e3dcf927c4287709c486bc7053fb4425bf0b0844266e1afc9d80ba417",
        "shared.bin": "58fe09061ce7a2664874025de711359a9c4b5e1ad9533b84c0efd5ad3292fe8f",
        "source/config.json": "778cff46524b5749b020cc9834c33fe70afd30291ed79e6d9769550d2fd170ff",
        "source/model-00001-of-00002.safetensors.rest": "bbc3a4d1492e3ebebbf0610d250c8837da1a01384b9806624ed2e905480380a7",
        "source/model-00002-of-00002.safetensors.rest": "b26c0ce5993d255b46123b30b84e020449ea46d1fe17a2c70d6da93f97fd4f60",
    }
    assert tiny_pack.manifest.pack_id == "351fbe0e1e1adea9daa09d0d2c5fbbe3871aca5228a9694fe24a11cb852b19a4"


# --- the document says what the code does ---


def test_the_fixed_beginning_has_the_length_that_the_document_gives() -> None:
    begin = re.search(r'\| 0 \| (\d+) \| `(\{"format".*?)` \|', FORMAT)
    assert begin
    assert len(begin[2]) == int(begin[1]) == 47


def test_the_table_of_dtypes_is_the_codes() -> None:
    rows = re.findall(r"^\| ((?:`\w+`\*? ?)+) \| (\d+) \| (\d+) \|$", FORMAT, re.MULTILINE)
    documented = {
        name: (int(elements), int(nbytes))
        for names, elements, nbytes in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == {name: tuple(block) for name, block in dtype.BLOCKS.items()}
    assert set(re.findall(r"`(\w+)`\*", FORMAT)) == dtype.PACKED_ACROSS_ROWS


@pytest.mark.parametrize(
    ("row", "limit"),
    [
        ("manifest.json", manifest.MAX_MANIFEST_NBYTES),
        ("`page_size`", alignment.MAX_PAGE_SIZE),
        ("`page_size`", alignment.MIN_PAGE_SIZE),
        ("`layer`", layer_entry.MAX_LAYERS - 1),
        ("layers, experts in a layer", layer_entry.MAX_LAYERS),
        ("layers, experts in a layer", layer_entry.MAX_EXPERTS_PER_LAYER),
        ("parts of an expert", layer_entry.MAX_PARTS),
        ("dimensions of a shape", layer_entry.MAX_DIMS),
        ("shared tensors", tensor_info.MAX_SHARED_TENSORS),
        ("name of a shared tensor", tensor_info.MAX_TENSOR_NAME),
        ("source files", source_file.MAX_SOURCE_FILES),
        ("segments of a file", source_file.MAX_SEGMENTS),
        ("path", source_file.MAX_PATH),
        ("keys of `config`; values in a list", manifest.MAX_CONFIG_KEYS),
        ("keys of `config`; values in a list", manifest.MAX_CONFIG_LIST),
        ("`reason`, string in `config`", manifest.MAX_TEXT),
        ("converted tensors", converted_tensor.MAX_CONVERTED),
    ],
)
def test_every_limit_in_the_document_is_the_codes(row: str, limit: int) -> None:
    limits = FORMAT[FORMAT.index("## 8.") : FORMAT.index("## 9.")]
    found = re.search(rf"^\| {re.escape(row)} \| ([^|]*) \|", limits, re.MULTILINE)
    assert found
    assert f"{limit:,}" in found[1]


def test_integers_end_where_the_document_says() -> None:
    assert strict_json.MAX_INTEGER == 2**53 - 1
    assert "| any integer | 2^53 - 1 |" in FORMAT
    assert f"align(end of part i-1, {alignment.PART_ALIGNMENT})" in FORMAT
    assert f"more than {strict_json.MAX_FLOAT_DIGITS} characters" in FORMAT
