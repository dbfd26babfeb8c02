"""Reference packs: no second copy of the weights, the same bytes everywhere, and no way to other files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters.byte_origin import open_local_origin
from converters.conversion import convert
from converters.export import export
from converters.hub_client import HubClient
from converters.hub_model import choose_model
from converters.hub_pull import pull
from converters.hub_push import push
from converters.hub_repo import HubRepo
from converters.pack_diff import diff_packs
from converters.quantization import Quantization
from converters.repair import repair
from converters.source_comparison import compare_with_source
from lmpack.cli.main import run
from lmpack.errors import LmpackError, ManifestError, PackError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import Manifest
from lmpack.pack import Pack
from lmpack.reference import CONVERT_AGAIN, source_folder
from lmpack.unpacking import unpack
from lmpack.validation import validate
from tests.expert_packs import all_keys
from tests.hub_server import hub_server
from tests.manifest_forgery import drop, put
from tests.reference_packs import CHECKPOINTS, plain_and_reference
from tests.round_trip import files_below
from tests.test_compression import forge
from tests.test_manifest import WHERE
from tests.test_validation import flip, the_problem

if TYPE_CHECKING:
    from collections.abc import Callable


KEY = ExpertKey(1, 2)
AGAIN = re.escape(CONVERT_AGAIN)


@pytest.fixture(params=CHECKPOINTS)
def packs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Pack, Pack]:
    return plain_and_reference(request.param, tmp_path)


@pytest.fixture
def gguf(tmp_path: Path) -> tuple[Path, Pack, Pack]:
    return plain_and_reference("gguf", tmp_path)


def sources_of(src: Path) -> dict[str, bytes]:
    return files_below(src if src.is_dir() else src.parent)


# --- the same model, without its weights ---


def test_it_holds_headers_and_small_files_and_leads_to_the_plain_pack(
    packs: tuple[Path, Pack, Pack], tmp_path: Path
) -> None:
    src, plain, reference = packs
    manifest = reference.manifest
    assert (manifest.version, manifest.storage, manifest.source.folder) == (2, "reference", "../source")
    assert files_below(reference.path).keys() == {"manifest.json", *(f.kept for f in manifest.source.files)}
    raw = (reference.path / "manifest.json").read_bytes()
    assert raw.startswith(b'{"format": "lmpack", "version": 2, "pack_id": "')
    assert b'"storage": "reference",\n"converted": [],\n"source": {"kind": "' in raw
    assert b'", "folder": "../source", "files": [\n' in raw
    assert manifest.uncompressed() == plain.manifest
    for key in all_keys(plain):
        assert reference.read_expert(key) == plain.read_expert(key)
    for tensor in plain.manifest.shared:
        assert np.array_equal(reference.read_tensor(tensor.name), plain.read_tensor(tensor.name))
    assert diff_packs(plain, reference).equal
    report = unpack(reference, tmp_path / "unpacked.lmpack")
    assert report.pack_id == plain.manifest.pack_id
    assert files_below(tmp_path / "unpacked.lmpack") == files_below(plain.path)
    export(reference, tmp_path / "out")
    assert files_below(tmp_path / "out") == sources_of(src)


def test_a_stranger_finds_every_byte_by_the_segments(packs: tuple[Path, Pack, Pack]) -> None:
    src, _, reference = packs
    document = json.loads((reference.path / "manifest.json").read_bytes())
    sources, places = sources_of(src), {}
    for file in document["source"]["files"]:
        for segment in file["segments"]:
            places[segment["tensor"]] = sources[file["name"]][segment["offset"] :]
    for layer in document["layers"]:
        for number, expert in enumerate(layer["experts"]):
            whole = bytearray(layer["stride"])
            for part in layer["parts"]:
                at, nbytes = f"{layer['layer']}:{{}}{part['role']}", part["nbytes"]
                own, stacked = f"expert:{at.format(f'{number}:')}", f"experts:{at.format('')}"
                raw = places[own] if own in places else places[stacked][number * nbytes :]
                whole[part["offset"] : part["offset"] + nbytes] = raw[:nbytes]
            assert hashlib.sha256(whole).hexdigest() == expert["sha256"]
    for tensor in document["shared"]:
        raw = places[f"shared:{tensor['name']}"][: tensor["nbytes"]]
        assert hashlib.sha256(raw).hexdigest() == tensor["sha256"]


def test_what_a_killed_conversion_left_is_to_be_deleted(
    packs: tuple[Path, Pack, Pack], tmp_path: Path
) -> None:
    (tmp_path / "m.lmpack.partial").mkdir()
    with pytest.raises(UsageError, match=r"m\.lmpack\.partial: exists; .* killed left it; delete it first"):
        convert(packs[0], tmp_path / "m.lmpack", reference=True)


def test_two_conversions_give_the_same_pack(packs: tuple[Path, Pack, Pack], tmp_path: Path) -> None:
    convert(packs[0], tmp_path / "again.lmpack", reference=True, jobs=5)
    assert files_below(tmp_path / "again.lmpack") == files_below(packs[2].path)


def test_every_checksum_is_compared_with_the_source(packs: tuple[Path, Pack, Pack]) -> None:
    src, plain, reference = packs
    done: list[int] = []
    report = validate(reference.path, progress=done.append)
    assert report.ok
    files = plain.manifest.source.files
    assert report.num_files == 1 + len(files) + sum(bool(file.segments) for file in files)
    assert report.nbytes == sum(file.nbytes for file in files) == sum(done)
    assert validate(reference.path, quick=True).nbytes == 0
    origin = open_local_origin(src, reference.manifest.source)
    assert compare_with_source(reference, origin) == ()


def test_a_conversion_that_fails_leaves_nothing_behind(gguf: tuple[Path, Pack, Pack], tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(gguf[0], tmp_path / "new.lmpack", reference=True, progress=stop)
    assert not list(tmp_path.glob("new.*"))


# --- where the source is ---


def test_both_can_move_together(gguf: tuple[Path, Pack, Pack], tmp_path: Path) -> None:
    src, plain, reference = gguf
    moved = tmp_path / "elsewhere" / "deep"
    moved.mkdir(parents=True)
    shutil.move(src.parent, moved / "source")
    shutil.move(reference.path, moved / "renamed.lmpack")
    (tmp_path / "link.lmpack").symlink_to(moved / "renamed.lmpack")
    for path in (moved / "renamed.lmpack", tmp_path / "link.lmpack"):
        assert Pack.open(path).read_expert(KEY) == plain.read_expert(KEY)


@pytest.mark.parametrize(
    ("pack", "source", "folder"),
    [
        ("/m/a.lmpack", "/m", ".."),
        ("/m/a.lmpack", "/m/a", "../a"),
        ("/m/packs/a.lmpack", "/m/a", "../../a"),
        ("/srv/a.lmpack", "/mnt/usb", "/mnt/usb"),
        ("/a.lmpack", "/mnt/usb", "/mnt/usb"),
        ("/a.lmpack", "/", "/"),
    ],
)
def test_the_folder_is_relative_unless_they_have_nothing_in_common(
    pack: str, source: str, folder: str
) -> None:
    assert source_folder(Path(pack), Path(source)) == folder


def test_links_of_a_hubs_cache_are_followed(gguf: tuple[Path, Pack, Pack], tmp_path: Path) -> None:
    src, plain, _ = gguf
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    shutil.copy(src, tmp_path / "blob")
    (snapshot / src.name).symlink_to(tmp_path / "blob")
    convert(snapshot / src.name, tmp_path / "linked.lmpack", reference=True)
    linked = Pack.open(tmp_path / "linked.lmpack")
    assert validate(linked.path).ok
    assert linked.read_expert(KEY) == plain.read_expert(KEY)


def test_every_changed_weight_is_found(packs: tuple[Path, Pack, Pack]) -> None:
    _, plain, reference = packs
    assert reference.reference is not None
    keys: list[ExpertKey | None] = [key for key in all_keys(plain) if key.expert in (0, 3)]
    for key in keys or [None]:
        extent = (
            reference.expert_extents(key)[-1]
            if key is not None
            else reference.tensor_extent(reference.manifest.shared[0])
        )
        flip(extent.path, extent.offset + extent.nbytes - 1)
        problem = the_problem(reference.path)
        assert str(extent.path) in problem.file.split(" and ")
        assert problem.key == key
        assert re.search(rf"sha256 is \w{{12}}…, the manifest says \w{{12}}…; {AGAIN}", problem.message)
        flip(extent.path, extent.offset + extent.nbytes - 1)


# --- hostile manifests ---

FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no folder": (drop("source", "folder"), "source misses folder"),
    "an empty folder": (put("source", "folder", ""), "source folder: "),
    "a folder inside": (put("source", "folder", "source"), "expected /a/b or ../a/b"),
    "the pack itself": (put("source", "folder", "."), "expected /a/b or ../a/b"),
    "a detour": (put("source", "folder", "../a/../b"), "without detours"),
    "a slash too many": (put("source", "folder", "..//a"), "without detours"),
    "a slash at the end": (put("source", "folder", "/a/"), "without detours"),
    "a network path": (put("source", "folder", "//host/a"), "without detours"),
    "a hidden parent": (put("source", "folder", "..a"), "expected /a/b or ../a/b"),
    "a NUL": (put("source", "folder", "/a\0"), "source folder: "),
    "a number": (put("source", "folder", 1), "source folder: "),
    "a long path": (put("source", "folder", "/a" * 2049), "source folder: "),
    "a folder without reference": (put("storage", "raw"), "source has unknown 'folder'"),
    "a name that leaves": (put("source", "files", 0, "name", "../b"), "stays inside its folder"),
    "no place for a part": (
        drop("source", "files", 0, "segments", -1),
        "kept_nbytes: ",
    ),
    "not reproducible": (lambda d: d.update(reproducible=False, reason="no"), "reproducible: false"),
    "compressed as well": (put("shared", 0, "stored", {}), "has unknown 'stored'"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_sealed_forgery_is_refused_for_what_it_is(gguf: tuple[Path, Pack, Pack], what: str) -> None:
    change, message = FORGERIES[what]
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(forge(gguf[2].manifest, change), WHERE)


@pytest.mark.parametrize("number", [0, -1])
def test_a_tensor_without_a_place_is_refused(gguf: tuple[Path, Pack, Pack], number: int) -> None:
    def forget(document: dict[str, Any]) -> None:
        file = document["source"]["files"][0]
        file["kept_nbytes"] += file["segments"].pop(number)["nbytes"]

    with pytest.raises(ManifestError, match=r"no segment of the source is"):
        Manifest.parse(forge(gguf[2].manifest, forget), WHERE)


@pytest.mark.parametrize("header", [b"", b"-----BEGIN KEY", b"GGUF but not this header"])
def test_no_manifest_makes_weights_of_a_file_that_is_none(
    gguf: tuple[Path, Pack, Pack], tmp_path: Path, header: bytes
) -> None:
    """Sizes and checksums fit, and the maker guessed the first bytes; a checkpoint's header is out of reach."""
    src, _, reference = gguf
    secret = tmp_path / "secret" / src.name
    secret.parent.mkdir()
    raw = header.ljust(1024, b"s")
    secret.write_bytes((raw * (src.stat().st_size // 1024 + 1))[: src.stat().st_size])
    forged = forge(reference.manifest, put("source", "folder", str(secret.parent)))
    (reference.path / "manifest.json").write_bytes(forged)
    with pytest.raises(PackError, match=r"secret/model\.gguf: (is not a gguf file|its header is not)"):
        Pack.open(reference.path)


# --- commands ---


def test_it_is_not_pushed(gguf: tuple[Path, Pack, Pack]) -> None:
    with pytest.raises(UsageError, match=r"holds no weights.*push what lmpack unpack makes of it"):
        push(HubClient(), gguf[2].path, "owner/name")


@pytest.mark.parametrize("extra", [{}, {"shared.bin": b""}])
def test_it_is_not_pulled(
    gguf: tuple[Path, Pack, Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, bytes]
) -> None:
    with hub_server(monkeypatch, tmp_path) as hub:
        hub.add("owner/name", files_below(gguf[2].path) | extra)
        repo = HubRepo.open(HubClient(), "owner/name")
        with pytest.raises(
            LmpackError, match=r"owner/name: (holds no pack|manifest.json is of a pack that refers to)"
        ):
            pull(repo, choose_model(repo, None), tmp_path / "pulled.lmpack")
    assert not (tmp_path / "pulled.lmpack").exists()


@pytest.mark.parametrize("options", [["--resume"], ["--compress", "zstd"], ["--quantize", "q8_0"]])
def test_what_needs_weights_of_its_own_is_wrong_usage(
    gguf: tuple[Path, Pack, Pack], tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(gguf[0]), str(tmp_path / "new.lmpack"), "--reference", *options]) == 2
    assert "--reference writes no weights" in capsys.readouterr().err
    assert not list(tmp_path.glob("new.*"))


def test_quantizing_is_refused_in_python_too(gguf: tuple[Path, Pack, Pack], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--reference writes no weights"):
        convert(
            gguf[0], tmp_path / "new.lmpack", reference=True, quantization=Quantization.parse("q8_0", None)
        )


@pytest.mark.parametrize("origin", ["source", "plain"])
def test_what_it_holds_is_repaired_and_its_source_stays(packs: tuple[Path, Pack, Pack], origin: str) -> None:
    src, plain, reference = packs
    wanted, sources = files_below(reference.path), sources_of(src)
    kept = [file.kept for file in reference.manifest.source.files]
    flip(reference.path / kept[0], 30)
    (reference.path / kept[-1]).unlink()
    bytes_from = open_local_origin(src if origin == "source" else plain.path, reference.manifest.source)
    report = repair(reference.path, bytes_from, validate(reference.path).problems)
    assert set(report.repaired) == {kept[0], kept[-1]}
    assert (report.failed, report.validation.problems) == ((), ())
    assert (files_below(reference.path), sources_of(src)) == (wanted, sources)


def test_a_changed_source_is_not_repaired(gguf: tuple[Path, Pack, Pack]) -> None:
    src, plain, reference = gguf
    os.truncate(src, src.stat().st_size - 1)
    changed = sources_of(src)
    report = repair(reference.path, open_local_origin(plain.path, None), validate(reference.path).problems)
    assert report.repaired == ()
    (failure,) = report.failed
    assert str(failure).startswith(
        f"{src}: is of the checkpoint, and a repair writes only to the pack; put back"
    )
    (problem,) = report.validation.problems
    assert str(src) in problem.file
    assert re.search(AGAIN, problem.message)
    assert sources_of(src) == changed


def test_unpacking_a_changed_source_names_no_file_that_the_pack_lacks(
    gguf: tuple[Path, Pack, Pack], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, _, reference = gguf
    flip(src, src.stat().st_size - 10)
    assert run(["unpack", str(reference.path), str(tmp_path / "u.lmpack")]) == 1
    error = capsys.readouterr().err
    assert re.search(
        rf"error: {re.escape(str(reference.path))}: (expert L\d+/E\d+|tensor '.*'): sha256 is ", error
    )
    assert error.endswith(f"; run: lmpack validate {reference.path}\n")


def test_a_damaged_source_is_said_once_not_to_be_repaired(
    gguf: tuple[Path, Pack, Pack], capsys: pytest.CaptureFixture[str]
) -> None:
    src, plain, reference = gguf
    for at in (-10, src.stat().st_size // 2):
        flip(src, at % src.stat().st_size)
    for as_json in (False, True):
        args = [
            "validate",
            str(reference.path),
            "--repair",
            str(plain.path),
            *(["--json"] if as_json else []),
        ]
        assert run(args) == 1
        out = capsys.readouterr().out
        if as_json:
            (failure,) = json.loads(out)["not_repaired"]
            assert failure["file"] == str(src)
        else:
            assert out.count("not repaired: ") == 1


def test_the_commands_take_it(
    gguf: tuple[Path, Pack, Pack], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, plain, _ = gguf
    pack = str(tmp_path / "cli.lmpack")
    assert run(["convert", str(src), pack, "--reference"]) == 0
    assert run(["validate", pack]) == 0
    assert run(["validate", pack, "--source", str(src)]) == 0
    assert run(["inspect", pack, "--residency"]) == 0
    assert "storage    reference, weights in ../source" in capsys.readouterr().out
    assert run(["inspect", pack, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"]["folder"] == "../source"
    assert run(["warm", pack, "--json"]) == 0
    nbytes = sum(part.nbytes for layer in plain.manifest.layers for part in layer.parts) * 4
    assert json.loads(capsys.readouterr().out)["nbytes"] == nbytes
    assert run(["diff", pack, str(plain.path)]) == 0
    assert run(["unpack", pack, str(tmp_path / "unpacked.lmpack")]) == 0
    assert plain.manifest.pack_id in capsys.readouterr().out
    src.unlink()
    assert run(["inspect", pack]) == 1
    assert capsys.readouterr().err.count("\n") == 1
