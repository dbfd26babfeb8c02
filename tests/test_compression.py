"""Compressed packs: smaller, whole, and every way back leads to the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard

from converters.conversion import convert
from lmpack.compression import compress_piece
from lmpack.decompression import Decompressor
from lmpack.errors import ManifestError, PackError, StorageError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import Manifest
from lmpack.pack import Pack
from lmpack.pack_writer import PackWriter
from lmpack.storage import PIECE_NBYTES
from lmpack.validation import validate
from runtime.direct_store import DirectStore
from runtime.engine import Engine
from runtime.mmap_store import MmapStore
from tests.compressed_packs import gaussian, trained_tensors, write_gguf
from tests.expert_packs import all_keys, budget_with_slots
from tests.manifest_forgery import drop, put
from tests.round_trip import files_below
from tests.test_manifest import WHERE
from tests.test_validation import flip, the_problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = ExpertKey(1, 1)


# --- the bytes, read by a stranger with nothing but FORMAT.md, json and zstd ---


def frames_of(stored: bytes) -> list[bytes]:
    """The contents of zstd frames that follow each other."""
    contents = []
    while stored:
        assert zstandard.get_frame_parameters(stored).content_size != zstandard.CONTENTSIZE_UNKNOWN
        one = zstandard.ZstdDecompressor().decompressobj()
        contents.append(one.decompress(stored))
        assert one.eof
        stored = one.unused_data
    return contents


def restored(stored: bytes, encoding: str) -> bytes:
    """A tensor's bytes, as section 10 describes them."""
    if encoding == "raw":
        return stored
    num_planes = int(encoding.removeprefix("zstd-split")) if encoding != "zstd" else 1
    frames, out = frames_of(stored), b""
    for first in range(0, len(frames), num_planes):
        planes = frames[first : first + num_planes]
        piece = bytearray(sum(map(len, planes)))
        assert len(piece) == 1_048_576 or first + num_planes == len(frames)
        for number, plane in enumerate(planes):
            piece[number::num_planes] = plane
        out += piece
    return out


def test_a_strangers_reader_finds_every_tensor(packs: tuple[Pack, Pack]) -> None:
    plain, compressed = packs
    raw = (compressed.path / "manifest.json").read_bytes()
    assert raw.startswith(b'{"format": "lmpack", "version": 2, "pack_id": "')
    document = json.loads(raw)
    assert (document["storage"], document["converted"]) == ("zstd", [])
    shared = (compressed.path / "shared.bin").read_bytes()
    end = 0
    for tensor in document["shared"]:
        stored = tensor["stored"]
        assert stored["offset"] == end
        end += stored["nbytes"]
        piece = shared[stored["offset"] : end]
        assert hashlib.sha256(piece).hexdigest() == stored["sha256"]
        assert restored(piece, stored["encoding"]) == plain.read_tensor(tensor["name"]).tobytes()
    assert end == len(shared)
    for layer in document["layers"]:
        for number, expert in enumerate(layer["experts"]):
            file, whole, end = (compressed.path / expert["file"]).read_bytes(), bytearray(layer["stride"]), 0
            assert hashlib.sha256(file).hexdigest() == expert["stored_sha256"]
            for part, stored in zip(layer["parts"], expert["stored"], strict=True):
                start, end = end, end + stored["nbytes"]
                raw = restored(file[start:end], stored["encoding"])
                whole[part["offset"] : part["offset"] + part["nbytes"]] = raw
            assert end == len(file)
            assert whole == plain.read_expert(ExpertKey(layer["layer"], number))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "U8"])
@pytest.mark.parametrize("nbytes", [4, 4096, PIECE_NBYTES, PIECE_NBYTES + 4, 2 * PIECE_NBYTES + 400])
def test_a_tensor_of_any_length_comes_back(dtype: str, nbytes: int) -> None:
    planes = {"F16": 2, "BF16": 2, "F32": 4}.get(dtype, 1)
    raw = memoryview(gaussian(dtype, nbytes // 4, "F32"))
    stored = b"".join(
        compress_piece(raw[start : start + PIECE_NBYTES], planes) for start in range(0, nbytes, PIECE_NBYTES)
    )
    encoding = "zstd" if planes == 1 else f"zstd-split{planes}"
    assert restored(stored, encoding) == raw
    target = bytearray(nbytes)
    Decompressor().restore(memoryview(stored), encoding, dtype, memoryview(target))
    assert target == raw
    pieces = Decompressor().pieces(memoryview(stored), encoding, dtype, nbytes)
    assert b"".join(map(bytes, pieces)) == raw


def test_floats_shrink_and_what_would_not_stays_as_it_is(packs: tuple[Pack, Pack]) -> None:
    _, compressed = packs
    for layer in compressed.manifest.layers:
        for expert in layer.experts:
            assert expert.stored is not None
            for part, stored in zip(layer.parts, expert.stored.parts, strict=True):
                if part.dtype == "BF16":
                    assert stored.encoding == "zstd-split2"
                    assert stored.nbytes < 0.8 * part.nbytes
    encodings = {t.name: t.stored.encoding for t in compressed.manifest.shared if t.stored is not None}
    assert encodings["token_embd.weight"] == "zstd-split4"  # zeros
    assert encodings["output_norm.weight"] in ("raw", "zstd-split4")


def test_four_bit_blocks_are_not_worth_it(demo_gguf: Path, tmp_path: Path) -> None:
    convert(demo_gguf, tmp_path / "demo.lmpack", compress=True)
    layer = Pack.open(tmp_path / "demo.lmpack").manifest.layers[0]
    forms = {
        (part.dtype, stored.encoding)
        for expert in layer.experts
        if expert.stored is not None
        for part, stored in zip(layer.parts, expert.stored.parts, strict=True)
    }
    assert ("Q4_K", "raw") in forms
    assert ("Q4_K", "zstd") not in forms


def test_a_trained_bf16_model_takes_three_quarters_at_most(models_dir: Path, tmp_path: Path) -> None:
    convert(models_dir / "tiny" / "hf", tmp_path / "tiny.lmpack", compress=True)
    manifest = Pack.open(tmp_path / "tiny.lmpack").manifest
    stored = (
        sum(e.file_nbytes for layer in manifest.layers for e in layer.experts) + manifest.shared_file_nbytes
    )
    raw = sum(layer.stride * layer.num_experts for layer in manifest.layers) + manifest.shared_nbytes
    assert stored <= 0.75 * raw


# --- damage ---


def test_flipping_any_byte_is_found_in_the_right_file(compressed: Pack) -> None:
    pick = random.Random(4)
    for file in sorted(files_below(compressed.path)):
        nbytes = (compressed.path / file).stat().st_size
        for position in {0, nbytes - 1, *(pick.randrange(nbytes) for _ in range(12))}:
            flip(compressed.path / file, position)
            assert the_problem(compressed.path).file == file
            flip(compressed.path / file, position)
    assert validate(compressed.path).ok


def replace_frames(pack: Pack, key: ExpertKey, change: Callable[[bytes], bytes]) -> Pack:
    """Change the first part of an expert's file, and the manifest with it, as a faulty writer might."""
    layer = pack.manifest.layer(key.layer)
    expert = layer.experts[key.expert]
    assert expert.stored is not None
    first, *others = expert.stored.parts
    file = (pack.path / expert.file).read_bytes()
    new = change(file[: first.nbytes])
    whole = new + file[first.nbytes :]
    (pack.path / expert.file).write_bytes(whole)
    stored = replace(
        expert.stored,
        sha256=hashlib.sha256(whole).hexdigest(),
        parts=(replace(first, nbytes=len(new)), *others),
    )
    experts = [replace(expert, stored=stored) if e == expert else e for e in layer.experts]
    layers = [replace(layer, experts=tuple(experts)) if e == layer else e for e in pack.manifest.layers]
    (pack.path / "manifest.json").write_bytes(replace(pack.manifest, layers=tuple(layers)).to_bytes())
    return Pack.open(pack.path)


def compress(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(raw)


def with_a_large_window(raw: bytes) -> bytes:
    params = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return stream.compress(raw) + stream.flush()


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "other bytes": (
        lambda frames: b"".join(compress(bytes(len(plane))) for plane in frames_of(frames)),
        "decompressed, its sha256 is",
    ),
    "a frame is missing": (lambda frames: compress(frames_of(frames)[0]), "ends too early"),
    "a frame too many": (lambda frames: frames + compress(b"more"), "longer than it should be"),
    "a frame that is too long": (
        lambda frames: b"".join(compress(plane + b"x") for plane in frames_of(frames)),
        "longer than it should be",
    ),
    "no zstd at all": (lambda frames: b"no frame " + frames[9:], "is damaged"),
    "a window that takes a gigabyte": (
        lambda frames: b"".join(map(with_a_large_window, frames_of(frames))),
        "is damaged .*memory",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_frames_that_lie_are_found_though_every_checksum_fits(compressed: Pack, lie: str) -> None:
    change, message = LIES[lie]
    pack = replace_frames(compressed, KEY, change)
    problem = the_problem(pack.path)
    assert problem.key == KEY
    assert re.search(message, problem.message)
    if lie != "other bytes":
        with pytest.raises(PackError, match=f"expert {KEY}: .*{message}.*; run: lmpack validate"):
            pack.read_expert(KEY)


EXPERT = ("layers", 1, "experts", 1)
FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "storage unknown": (put("storage", "lzma"), "storage: expected raw or zstd"),
    "storage raw": (put("storage", "raw"), "has unknown 'stored'"),
    "without storage": (drop("storage"), "misses storage"),
    "encoding of another dtype": (
        put(*EXPERT, "stored", 0, "encoding", "zstd"),
        "expert L001/E0001 stored encoding: expected raw or zstd-split2 for BF16",
    ),
    "raw of another size": (put(*EXPERT, "stored", 0, "encoding", "raw"), "stored nbytes: expected a whole"),
    "stored larger than raw": (put(*EXPERT, "stored", 0, "nbytes", 10**6), "stored nbytes: expected a whole"),
    "stored empty": (put(*EXPERT, "stored", 0, "nbytes", 0), "stored nbytes: expected a whole number from 9"),
    "a part missing": (lambda d: d["layers"][1]["experts"][1]["stored"].pop(), "expert L001/E0001 stored"),
    "stored_sha256": (put(*EXPERT, "stored_sha256", "x"), "stored_sha256: expected 64"),
    "tensor elsewhere": (
        put("shared", 1, "stored", "offset", 0),
        "stored offset: 0, the tensor before it ends",
    ),
    "tensor without form": (drop("shared", 1, "stored"), "misses stored"),
}


def forge(manifest: Manifest, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change a manifest of version 2 and seal it again."""
    document = json.loads(manifest.to_bytes())
    change(document)
    document["pack_id"] = "0" * 64
    raw = json.dumps(document).encode()
    return raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1)


@pytest.mark.parametrize("what", FORGERIES)
def test_a_sealed_forgery_is_refused_for_what_it_is(packs: tuple[Pack, Pack], what: str) -> None:
    change, message = FORGERIES[what]
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(forge(packs[1].manifest, change), WHERE)


def test_the_version_is_the_oldest_that_can_say_it(packs: tuple[Pack, Pack]) -> None:
    plain, compressed = packs
    assert (plain.manifest.version, compressed.manifest.version) == (1, 2)
    raw = plain.manifest.to_bytes().replace(b'"version": 1', b'"version": 2', 1)
    raised = forge(plain.manifest, lambda d: d.update(version=2, storage="raw", converted=[]))
    with pytest.raises(ManifestError, match=r"version: 2, but a pack like this is of version 1"):
        Manifest.parse(raised, WHERE)
    with pytest.raises(ManifestError, match="misses converted, storage"):
        Manifest.parse(raw, WHERE)


def test_a_small_file_cannot_claim_to_hold_a_terabyte(packs: tuple[Pack, Pack]) -> None:
    def claim(document: dict[str, Any]) -> None:
        tensor = document["shared"][-1]
        tensor.update(shape=[2**40], dtype="U8", nbytes=2**40)
        tensor["stored"].update(encoding="zstd", nbytes=10_000)
        document["shared_nbytes"] = tensor["offset"] + 2**40
        document["source"]["files"][0]["segments"].clear()

    with pytest.raises(ManifestError, match=rf"stored nbytes: expected a whole number from {9 << 20}"):
        Manifest.parse(forge(packs[1].manifest, claim), WHERE)


# --- running ---


@pytest.mark.parametrize("buffered", [False, True])
def test_the_direct_store_fills_slots_with_the_plain_bytes(packs: tuple[Pack, Pack], buffered: bool) -> None:
    plain, compressed = packs
    store = DirectStore(compressed, budget_with_slots(compressed.manifest), buffered=buffered)
    for key in all_keys(compressed):
        slot = store.acquire(key)
        assert slot is not None
        store.read(key, slot)
        bank = store.bank(key.layer)
        filled = bank.storage[slot * bank.stride : (slot + 1) * bank.stride].numpy().tobytes()
        assert filled == plain.read_expert(key)
    assert store.name.endswith("decompressing)")
    store.close()


def test_a_damaged_expert_is_named_by_the_store_which_goes_on(compressed: Pack) -> None:
    flip(compressed.path / KEY.file, 20)
    store = DirectStore(compressed, budget_with_slots(compressed.manifest))
    slot = store.acquire(KEY)
    assert slot is not None
    with pytest.raises(StorageError, match=rf"expert {KEY}: .*is damaged.*run: lmpack validate"):
        store.read(KEY, slot)
    store.read(ExpertKey(1, 0), slot)
    store.close()


def test_mmap_says_what_to_do_instead(compressed: Pack) -> None:
    with pytest.raises(UsageError, match=r"cannot be mapped; use --io direct, or run: lmpack unpack"):
        MmapStore(compressed, budget_with_slots(compressed.manifest))


def test_a_compressed_model_computes_the_same_bits(demo_gguf: Path, demo_pack: Path, tmp_path: Path) -> None:
    convert(demo_gguf, tmp_path / "zstd.lmpack", compress=True)
    logits = []
    for path in (demo_pack, tmp_path / "zstd.lmpack"):
        with Engine.load(path, io="direct", num_threads=1, context_length=64) as engine:
            ids = engine.tokenizer.encode("Once upon a time there was")
            logits.append(engine.forward(ids, engine.new_kv(), all_logits=True).numpy())
    assert np.array_equal(logits[0], logits[1])


# --- conversion ---


class KilledError(Exception):
    """Stands for a kill where the test goes on in the same process."""


def test_a_conversion_killed_while_it_compresses_goes_on_to_the_same_pack(
    packs: tuple[Pack, Pack], tmp_path: Path
) -> None:
    src = write_gguf(tmp_path / "model.gguf", trained_tensors())
    done = 0

    def stop(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > 1.2 * src.stat().st_size:
            raise KilledError

    with pytest.raises(KilledError):
        convert(src, tmp_path / "zstd.lmpack", compress=True, progress=stop)
    partial = tmp_path / "zstd.lmpack.partial"
    (partial / f"{KEY.file}.new").write_bytes(b"half of it")
    shutil.copytree(partial, tmp_path / "plain.lmpack.partial")
    for name, wanted in (("zstd.lmpack", packs[1]), ("plain.lmpack", packs[0])):
        convert(src, tmp_path / name, compress=name.startswith("zstd"), resume=True)
        assert files_below(tmp_path / name) == files_below(wanted.path)


def test_the_order_of_writes_does_not_change_a_byte(packs: tuple[Pack, Pack], tmp_path: Path) -> None:
    src = write_gguf(tmp_path / "model.gguf", trained_tensors())
    convert(src, tmp_path / "one.lmpack", compress=True, jobs=7)
    assert files_below(tmp_path / "one.lmpack") == files_below(packs[1].path)
    assert PackWriter(tmp_path / "two.lmpack").planned_nbytes == 0
