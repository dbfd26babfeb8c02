"""The models that tests share: the demo model as GGUF and as a pack, and the larger ones where they lie."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import hypothesis
import pytest

from lmpack.dtype import dtype_nbytes
from lmpack.manifest import Manifest, Source, SourceFile, SourceSegment
from lmpack.pack import Pack
from lmpack.pack_writer import PackWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hub_server import HubServer

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as lmpack.cli.main does it

REPOSITORY = Path(__file__).parents[1]

hypothesis.settings.register_profile(  # the same examples everywhere, on a slow machine as well
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder of test models beside the repository, or where LMPACK_MODELS says."""
    folder = Path(os.environ.get("LMPACK_MODELS", REPOSITORY.parent / "shared" / "models"))
    if not folder.is_dir():
        pytest.skip(f"no test models in {folder}; set LMPACK_MODELS to their folder")
    return folder


@pytest.fixture
def a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a bare number: no HOME, and no line in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub on this machine, the only one that can be reached, and the test's folder to work in."""
    from tests.hub_server import hub_server

    monkeypatch.chdir(tmp_path)
    with hub_server(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The embedded demo model: qwen3moe, 6 layers of 32 experts, Q4_K_M."""
    return REPOSITORY / "lmpack" / "demo" / "tiny-Q4_K_M.gguf"


@pytest.fixture(scope="session")
def demo_pack(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a pack; tests must not change it."""
    from converters.conversion import convert

    pack = tmp_path_factory.mktemp("demo") / "demo.lmpack"
    convert(demo_gguf, pack)
    return pack


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pack, Pack]:
    """One model as a plain and as a compressed pack; tests must not change them."""
    from tests.compressed_packs import plain_and_compressed, trained_tensors, write_gguf

    work = tmp_path_factory.mktemp("compressed")
    return plain_and_compressed(write_gguf(work / "model.gguf", trained_tensors()), work)


@pytest.fixture
def compressed(packs: tuple[Pack, Pack], tmp_path: Path) -> Pack:
    """A copy of the compressed pack that a test may damage."""
    return Pack.open(shutil.copytree(packs[1].path, tmp_path / "zstd.lmpack"))


@dataclass(frozen=True, slots=True)
class TinyPack:
    """A small pack with everything format 1 has, and what went into it."""

    path: Path
    manifest: Manifest
    sources: dict[str, bytes]  # the source files it was made from
    tensors: dict[str, bytes]  # "shared:NAME" and "expert:LAYER:EXPERT:ROLE" -> bytes


class WriteTinyPack(Protocol):
    """Write the tiny pack; a seed shuffles the order of its writes, threads share them."""

    def __call__(
        self, path: Path, *, page_size: int = 4096, seed: int | None = None, num_threads: int = 1
    ) -> TinyPack: ...


@pytest.fixture(scope="session")
def write_tiny_pack() -> WriteTinyPack:
    """The function that writes the tiny pack anywhere: two MoE layers, experts 1/0 and 1/2 identical."""
    return _write_tiny_pack


@pytest.fixture
def tiny_pack(tmp_path: Path) -> TinyPack:
    """The tiny pack in a folder of the test's own."""
    return _write_tiny_pack(tmp_path / "tiny.lmpack")


TINY_LAYERS: dict[int, tuple[int, list[tuple[str, str, tuple[int, ...]]]]] = {
    1: (
        3,
        [("gate", "F16", (2, 4)), ("up", "F16", (2, 4)), ("down", "F32", (4, 2)), ("down_bias", "F32", (4,))],
    ),
    3: (2, [("gate_up", "BF16", (4, 1100)), ("down", "BF16", (1100, 2))]),
}
TINY_SHARED: dict[str, tuple[str, tuple[int, ...]]] = {
    "token_embd.weight": ("F32", (3, 4)),
    "scale": ("I64", ()),
    "output.weight": ("U8", (5, 1000)),
}


def _write_tiny_pack(
    path: Path, *, page_size: int = 4096, seed: int | None = None, num_threads: int = 1
) -> TinyPack:
    tensors = _tiny_tensors()
    sources, segments = _tiny_sources(tensors)
    with PackWriter(path, page_size=page_size) as writer:
        for layer, (num_experts, parts) in TINY_LAYERS.items():
            writer.add_layer(layer, num_experts, parts)
        for name, (dtype, shape) in TINY_SHARED.items():
            writer.add_shared(name, dtype, shape)
        names = list(tensors)
        if seed is not None:
            random.Random(seed).shuffle(names)
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda name: _write_tiny_tensor(writer, name, tensors[name]), names))
        files = []
        for name, raw in sources.items():
            rest, end = b"", 0
            for segment in segments[name]:
                rest, end = rest + raw[end : segment.offset], segment.offset + segment.nbytes
            kept = f"source/{name}.rest" if segments[name] else f"source/{name}"
            kept_nbytes, kept_sha256 = writer.keep(kept, rest + raw[end:])
            sha256 = hashlib.sha256(raw).hexdigest()
            files.append(SourceFile(name, len(raw), sha256, kept, kept_nbytes, kept_sha256, segments[name]))
        manifest = writer.finish(
            architecture="tinymoe",
            config={
                "num_experts": 3,
                "rms_norm_eps": 1e-06,
                "rope_theta": 10000.0,
                "layer_types": ["full", "full"],
            },
            source=Source("safetensors", tuple(files)),
        )
    return TinyPack(path, manifest, sources, tensors)


def _tiny_tensors() -> dict[str, bytes]:
    tensors = {}
    for layer, (num_experts, parts) in TINY_LAYERS.items():
        for expert in range(num_experts):
            for role, dtype, shape in parts:
                seed = f"{layer}:{0 if (layer, expert) == (1, 2) else expert}:{role}"
                tensors[f"expert:{layer}:{expert}:{role}"] = _tiny_bytes(seed, dtype_nbytes(dtype, shape))
    for name, (dtype, shape) in TINY_SHARED.items():
        tensors[f"shared:{name}"] = _tiny_bytes(name, dtype_nbytes(dtype, shape))
    return tensors


def _tiny_bytes(seed: str, nbytes: int) -> bytes:
    return (hashlib.sha256(seed.encode()).digest() * (nbytes // 32 + 1))[:nbytes]


def _tiny_sources(
    tensors: dict[str, bytes],
) -> tuple[dict[str, bytes], dict[str, tuple[SourceSegment, ...]]]:
    """Make two real safetensors files, layer 3 with stacked experts, and a small file beside them."""
    stacked = {
        f"experts:3:{role}": b"".join(tensors[f"expert:3:{expert}:{role}"] for expert in range(2))
        for role in ("gate_up", "down")
    }
    first = {name: tensors[name] for name in tensors if name.startswith(("expert:1:", "shared:s"))}
    second = stacked | {name: tensors[name] for name in tensors if name.startswith(("shared:t", "shared:o"))}
    sources: dict[str, bytes] = {}
    segments: dict[str, tuple[SourceSegment, ...]] = {}
    for number, contents in ((1, first), (2, second)):
        header: dict[str, object] = {}
        places, at = [], 0
        for name, raw in contents.items():
            header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [at, at + len(raw)]}
            places.append((at, len(raw), name))
            at += len(raw)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = f"model-{number:05d}-of-00002.safetensors"
        sources[file] = struct.pack("<Q", len(text)) + text + b"".join(contents.values())
        segments[file] = tuple(SourceSegment(8 + len(text) + at, nbytes, name) for at, nbytes, name in places)
    sources["config.json"], segments["config.json"] = b'{"model_type": "tinymoe"}\n', ()
    return sources, segments


def _write_tiny_tensor(writer: PackWriter, name: str, raw: bytes) -> None:
    kind, _, rest = name.partition(":")
    if kind == "shared":
        half = len(raw) // 2
        writer.write_shared(rest, 0, raw[:half])
        writer.write_shared(rest, half, memoryview(raw)[half:])
    else:
        layer, expert, role = rest.split(":")
        writer.write_part(int(layer), int(expert), role, raw)
