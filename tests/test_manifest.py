"""The manifest: what it says survives a round trip, and whatever cannot be trusted is refused in one sentence."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpack.errors import ManifestError, PackError, UnsupportedError
from lmpack.manifest import MAX_MANIFEST_NBYTES, Manifest, check_description
from lmpack.pack import read_manifest
from tests.manifest_forgery import PREFIX, drop, forge, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import TinyPack

WHERE = Path("m.lmpack/manifest.json")


def refusal_of(raw: bytes) -> str:
    """Return the sentence with which a manifest is refused, "" when it is not."""
    try:
        Manifest.parse(raw, WHERE)
    except ManifestError as error:
        return str(error)
    return ""


def test_a_manifest_survives_the_round_trip(tiny_pack: TinyPack) -> None:
    raw = (tiny_pack.path / "manifest.json").read_bytes()
    manifest = Manifest.parse(raw, WHERE)
    assert manifest == tiny_pack.manifest
    assert manifest.to_bytes() == raw
    assert replace(manifest, pack_id="").to_bytes() == raw  # the id is computed, not copied


def test_another_layout_of_the_same_json_reads_the_same(tiny_pack: TinyPack) -> None:
    manifest = Manifest.parse(forge(tiny_pack.manifest, lambda document: None), WHERE)
    assert replace(manifest, pack_id="") == replace(tiny_pack.manifest, pack_id="")


def test_layers_and_tensors_are_found_by_name_and_missing_ones_named(tiny_pack: TinyPack) -> None:
    manifest = tiny_pack.manifest
    assert manifest.layer(3).num_experts == 2
    assert manifest.num_experts == 5
    assert manifest.layer(1).part("up").offset == 256
    assert manifest.tensor("scale").shape == ()
    assert manifest.has_tensor("scale")
    assert not manifest.has_tensor("rope")
    with pytest.raises(PackError, match=r"layer 2 .* no routed experts"):
        manifest.layer(2)
    with pytest.raises(PackError, match="no part 'gate', only gate_up, down"):
        manifest.layer(3).part("gate")
    with pytest.raises(PackError, match="no shared tensor 'rope'"):
        manifest.tensor("rope")


def test_flipping_any_byte_of_the_manifest_is_noticed(tiny_pack: TinyPack) -> None:
    raw = bytearray(tiny_pack.manifest.to_bytes())
    for position in range(len(raw)):
        raw[position] ^= 0xFF
        with pytest.raises(ManifestError, match=r"^m\.lmpack/manifest\.json: "):
            Manifest.parse(bytes(raw), WHERE)
        raw[position] ^= 0xFF
        if position % 7 == 0:
            raw[position] ^= 0x01
            with pytest.raises(ManifestError):
                Manifest.parse(bytes(raw), WHERE)
            raw[position] ^= 0x01


@pytest.mark.parametrize("version", [0, 3, 10, 999])
def test_another_version_is_refused_and_ours_named(tiny_pack: TinyPack, version: int) -> None:
    raw = tiny_pack.manifest.to_bytes().replace(b'"version": 1', f'"version": {version}'.encode(), 1)
    with pytest.raises(
        ManifestError, match=f"format version {version} is not known, this lmpack reads versions 1 and 2"
    ):
        Manifest.parse(raw, WHERE)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "not an lmpack manifest"),
        (b"null", "not an lmpack manifest"),
        (b'{"format": "gguf"}', "not an lmpack manifest"),
        (b'{"format": "lmpack"}', "version: expected a whole number"),
        (b'{"format": "lmpack", "version": 1.0}', "version: expected a whole number"),
        (b'{"format": "lmpack", "version": true}', "version: expected a whole number"),
        (b'{"format": "lmpack", "version": 1}', "manifest misses"),
        (b'{"version": 1, "version": 2}', "stands twice"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"9" * 5000, "beyond 2\\^53"),
        (b"-9007199254740992", "beyond 2\\^53"),
        (b"1" + b"0" * 400 + b".5", "not finite"),
        (b"1e999", "not finite"),
        (b"NaN", "NaN is not JSON"),
        (b"-Infinity", "-Infinity is not JSON"),
        (b"{} {}", "not JSON"),
        (b'"\x00"', "not JSON"),
        (b" " * (MAX_MANIFEST_NBYTES + 1), "largest allowed manifest"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_what_is_not_strict_json_of_ours_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=f"^m.lmpack/manifest.json: .*{message}"):
        Manifest.parse(raw, WHERE)


EXPERT = ("layers", 0, "experts", 1)
FILE = ("source", "files", 0)
FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown key": (put("comment", "hi"), "manifest has unknown 'comment'"),
    "missing key": (drop("layers"), "manifest misses layers"),
    "missing and unknown key": (
        put("layers", 0, "parts", 0, {"role": "gate", "x": 1}),
        "misses .* and has unknown 'x'",
    ),
    "page size not a power of two": (put("page_size", 4096 * 3), "power of two"),
    "page size too small": (put("page_size", 512), "page_size: expected a whole number from 4096"),
    "page size too large": (put("page_size", 4 * 2**20), "page_size: expected a whole number"),
    "another page size": (put("page_size", 8192), "layer 1 stride: 4096, its parts give 8192"),
    "page size is a float": (put("page_size", 4096.0), "page_size: expected a whole number"),
    "architecture with a slash": (put("architecture", "../x"), "architecture: expected"),
    "config null": (put("config", "x", None), "config x: expected"),
    "config nested list": (put("config", "x", [[1]]), "config x: expected"),
    "config object": (put("config", "x", {}), "config x: expected"),
    "config key": (put("config", "a b", 1), "config key"),
    "config is a list": (put("config", []), "config: expected an object"),
    "config too many": (
        put("config", {str(i): 1 for i in range(1025)}),
        "config: expected an object of at most",
    ),
    "reproducible is 1": (put("reproducible", 1), "reproducible: expected true or false"),
    "not reproducible, no reason": (put("reproducible", False), "reason: must say why"),
    "reason without need": (put("reason", "x"), "reason: must say why"),
    "layers unsorted": (lambda d: d["layers"].reverse(), "after layer 3: layer number"),
    "layer twice": (lambda d: d["layers"].append(copy.deepcopy(d["layers"][1])), "layer number"),
    "layer is a bool": (put("layers", 0, "layer", True), "layer number"),
    "layer negative": (put("layers", 0, "layer", -1), "layer number"),
    "layer huge": (put("layers", 1, "layer", 65_536), "layer number"),
    "no experts": (put("layers", 0, "experts", []), "layer 1 experts: expected a list of 1"),
    "no parts": (put("layers", 0, "parts", []), "layer 1 parts: expected a list of 1"),
    "too many parts": (lambda d: d["layers"][0].update(parts=d["layers"][0]["parts"] * 20), "layer 1 parts"),
    "role twice": (put("layers", 0, "parts", 1, "role", "gate"), "the role 'gate' stands twice"),
    "role with a colon": (put("layers", 0, "parts", 1, "role", "up:x"), "role: expected"),
    "unknown dtype": (put("layers", 0, "parts", 0, "dtype", "Q9_9"), "'Q9_9' is not known"),
    "row of half a block": (put("layers", 0, "parts", 0, "dtype", "Q8_0"), "multiple of 32"),
    "shape zero": (put("layers", 0, "parts", 0, "shape", [0, 4]), "shape: expected a whole number from 1"),
    "shape negative": (
        put("layers", 0, "parts", 0, "shape", [-2, -4]),
        "shape: expected a whole number from 1",
    ),
    "shape bool": (put("layers", 0, "parts", 0, "shape", [True, 8]), "shape: expected a whole number"),
    "shape float": (put("layers", 0, "parts", 0, "shape", [2.0, 4]), "shape: expected a whole number"),
    "shape huge": (put("layers", 0, "parts", 0, "shape", [2**50, 2**50]), "more than a file can have"),
    "shape of nine": (put("layers", 0, "parts", 0, "shape", [1] * 9), "shape: expected a list of 0 to 8"),
    "parts overlap": (put("layers", 0, "parts", 1, "offset", 0), "part up: bytes 0\\+16, .* give 256\\+16"),
    "gap between parts": (put("layers", 0, "parts", 1, "offset", 512), "part up: bytes 512\\+16"),
    "part unaligned": (put("layers", 0, "parts", 1, "offset", 16), "part up: bytes 16\\+16"),
    "part too long": (put("layers", 0, "parts", 3, "nbytes", 4096), "part down_bias: bytes 768\\+4096"),
    "stride too long": (put("layers", 0, "stride", 8192), "layer 1 stride: 8192, its parts give 4096"),
    "expert shorter than the stride": (put(*EXPERT, "nbytes", 16), "expert L001/E0001 nbytes: expected"),
    "expert nbytes is a float": (put(*EXPERT, "nbytes", 4096.0), "expert L001/E0001 nbytes: expected"),
    "expert file absolute": (
        put(*EXPERT, "file", "/etc/passwd"),
        "expert L001/E0001 file: expected experts/L001",
    ),
    "expert file outside": (put(*EXPERT, "file", "../../etc/passwd"), "expert L001/E0001 file"),
    "expert file of a later one": (put(*EXPERT, "file", "experts/L003/E0000.bin"), "expert L001/E0001 file"),
    "expert file of another": (put(*EXPERT, "file", "experts/L001/E0000.bin"), "expert L001/E0001 file"),
    "expert file is shared.bin": (put(*EXPERT, "file", "shared.bin"), "expert L001/E0001 file"),
    "expert sha256 in capitals": (put(*EXPERT, "sha256", "A" * 64), "expert L001/E0001 sha256: expected 64"),
    "expert sha256 short": (put(*EXPERT, "sha256", "a" * 63), "expert L001/E0001 sha256: expected 64"),
    "expert with a line end in its sha256": (put(*EXPERT, "sha256", "a" * 64 + "\n"), "sha256: expected 64"),
    "tensor twice": (
        put("shared", 1, "name", "token_embd.weight"),
        "the name 'token_embd.weight' stands twice",
    ),
    "tensor name with NUL": (put("shared", 1, "name", "a\0b"), "shared tensor 1 name: expected a printable"),
    "tensor name with a surrogate": (
        put("shared", 1, "name", "\ud800"),
        "shared tensor 1 name: expected a printable",
    ),
    "tensor name too long": (
        put("shared", 1, "name", "n" * 513),
        "shared tensor 1 name: expected a printable",
    ),
    "tensors overlap": (put("shared", 1, "offset", 0), "'scale': bytes 0\\+8, .* give 4096\\+8"),
    "tensor after a gap": (put("shared", 1, "offset", 8192), "'scale': bytes 8192\\+8"),
    "tensor unaligned": (put("shared", 1, "offset", 48), "'scale': bytes 48\\+8"),
    "tensor beyond 2^53": (put("shared", 2, "shape", [2**27, 2**27]), "more than a file can have"),
    "shared file too short": (put("shared_nbytes", 8192), "shared_nbytes: 8192, the tensors give 16384"),
    "source kind": (put("source", "kind", "pickle"), "source kind: expected gguf or safetensors"),
    "source without files": (put("source", "files", []), "source files: expected a list of 1"),
    "source file absolute": (put(*FILE, "name", "/etc/passwd"), "name: expected a relative path"),
    "source file outside": (put(*FILE, "name", "a/../../b"), "name: expected a relative path"),
    "source file with a backslash": (put(*FILE, "name", "a\\..\\b"), "name: expected a relative path"),
    "source file with a drive": (put(*FILE, "name", "C:x"), "name: expected a relative path"),
    "source file with NUL": (put(*FILE, "name", "a\0"), "name: expected a printable"),
    "source file empty": (put(*FILE, "name", ""), "name: expected a printable"),
    "source file with a double slash": (put(*FILE, "name", "a//b"), "name: expected a relative path"),
    "source file twice": (lambda d: d["source"]["files"].append(d["source"]["files"][2]), "stands twice"),
    "kept elsewhere": (put(*FILE, "kept", "shared.bin"), "kept: expected 'source/model-00001-of-00002"),
    "kept too long": (
        put(*FILE, "kept_nbytes", 1033),
        "kept_nbytes: 1033, but its segments leave 1032 of 1280",
    ),
    "kept whole but different": (put("source", "files", 2, "kept_sha256", "0" * 64), "kept_sha256: differs"),
    "segment outside": (put(*FILE, "segments", 12, "nbytes", 9), "segment 12 nbytes: expected"),
    "segments overlap": (put(*FILE, "segments", 1, "offset", 1040), "segment 1 offset"),
    "segments unsorted": (lambda d: d["source"]["files"][0]["segments"].reverse(), "segment 1 offset"),
    "segment of another size": (put(*FILE, "segments", 0, "tensor", "expert:1:0:down"), "has 32"),
    "segment of no layer": (put(*FILE, "segments", 0, "tensor", "expert:2:0:gate"), "the pack holds no"),
    "segment of no expert": (put(*FILE, "segments", 0, "tensor", "expert:1:3:gate"), "the pack holds no"),
    "segment expert -1": (put(*FILE, "segments", 0, "tensor", "expert:1:-1:gate"), "the pack holds no"),
    "segment expert 00": (put(*FILE, "segments", 0, "tensor", "expert:1:00:gate"), "the pack holds no"),
    "segment of no role": (put(*FILE, "segments", 0, "tensor", "expert:1:0:gated"), "the pack holds no"),
    "segment of no tensor": (put(*FILE, "segments", 0, "tensor", "shared:nothing"), "the pack holds no"),
    "segment of nothing": (put(*FILE, "segments", 0, "tensor", "gate"), "the pack holds no"),
    "segment with too many colons": (
        put(*FILE, "segments", 0, "tensor", "experts:1:0:gate"),
        "the pack holds no",
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_sealed_forgery_is_refused_for_what_it_is(tiny_pack: TinyPack, what: str) -> None:
    change, message = FORGERIES[what]
    with pytest.raises(ManifestError, match=f"^m.lmpack/manifest.json: .*{message}") as caught:
        Manifest.parse(forge(tiny_pack.manifest, change), WHERE)
    assert str(caught.value).isprintable()


def test_the_sealing_of_these_tests_makes_manifests_that_parse(tiny_pack: TinyPack) -> None:
    change = put("config", "top_k", 2)
    assert Manifest.parse(forge(tiny_pack.manifest, change), WHERE).config["top_k"] == 2


def test_the_manifest_must_begin_as_the_format_says(tiny_pack: TinyPack) -> None:
    raw = tiny_pack.manifest.to_bytes().replace(b'{"format"', b'{ "format"', 1)
    with pytest.raises(ManifestError, match="must begin with the bytes"):
        Manifest.parse(raw, WHERE)


def test_a_wrong_pack_id_is_refused(tiny_pack: TinyPack) -> None:
    raw = tiny_pack.manifest.to_bytes()
    other = raw.replace(tiny_pack.manifest.pack_id.encode(), b"0" * 64)
    with pytest.raises(ManifestError, match=re.escape("pack_id is 000000000000…, the manifest's bytes give")):
        Manifest.parse(other, WHERE)


def test_a_description_that_no_manifest_can_hold_is_known_before_the_conversion() -> None:
    check_description("qwen3moe", {"num_experts": 128, "rope_theta": 1e6, "layer_types": ["full"]})
    for config in ({"x": float("nan")}, {"x": [float("inf")]}, {"x": 2**60}, {"x": "\n"}, {"": 1}):
        with pytest.raises(UnsupportedError, match="the manifest cannot hold config"):
            check_description("qwen3moe", config)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="architecture"):
        check_description("", {})


def test_a_folder_without_manifest_is_no_pack(tmp_path: Path) -> None:
    partial = tmp_path / "m.lmpack.partial"
    partial.mkdir()
    with pytest.raises(
        ManifestError, match=r"no manifest\.json, so it is not a pack; a command that was interrupted left it"
    ):
        read_manifest(partial)
    with pytest.raises(PackError, match="not a folder"):
        read_manifest(tmp_path / "nothing")


def test_a_manifest_that_is_a_link_is_refused(tiny_pack: TinyPack, tmp_path: Path) -> None:
    (tiny_pack.path / "manifest.json").rename(tmp_path / "elsewhere.json")
    (tiny_pack.path / "manifest.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ManifestError, match="not a regular file"):
        read_manifest(tiny_pack.path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def places(value: object) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a document."""
    found: list[tuple[Any, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += [(key,), *((key, *path) for path in places(item))]
    return found


@settings(max_examples=150)
@given(data=st.data())
def test_any_value_anywhere_parses_or_is_refused_in_one_line(
    session_manifest: Manifest, data: st.DataObject
) -> None:
    document = json.loads(session_manifest.to_bytes())
    path = data.draw(
        st.sampled_from([p for p in places(document) if p[0] not in ("format", "version", "pack_id")])
    )
    raw = forge(session_manifest, put(*path, data.draw(JSON_VALUES)))
    refusal = refusal_of(raw)
    assert refusal.isprintable()
    assert len(refusal) < 1000


@settings(max_examples=100)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(raw: bytes) -> None:
    for start in (b"", PREFIX):
        with pytest.raises(ManifestError) as caught:
            Manifest.parse(start + raw, WHERE)
        assert str(caught.value).isprintable()


@pytest.fixture(scope="session")
def session_manifest(
    write_tiny_pack: Callable[[Path], TinyPack], tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    """The tiny pack's manifest, for tests that do not touch its files."""
    return write_tiny_pack(tmp_path_factory.mktemp("manifest") / "tiny.lmpack").manifest
