"""Running from a reference pack: the same bytes in every store, the same bits in every answer."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters.conversion import convert
from lmpack.errors import StorageError, UsageError
from lmpack.expert_key import ExpertKey
from runtime.direct_store import DirectStore
from runtime.engine import Engine
from runtime.mmap_store import MmapStore
from runtime.verified_store import VerifiedStore
from tests.expert_packs import all_keys, budget_with_slots, load
from tests.reference_packs import plain_and_reference
from tests.test_validation import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lmpack.manifest import ExpertPart
    from lmpack.pack import Pack
    from runtime.expert_store import ExpertStore

KEY = ExpertKey(1, 2)


@pytest.fixture
def gguf(tmp_path: Path) -> tuple[Path, Pack, Pack]:
    return plain_and_reference("gguf", tmp_path)


def parts_of(store: ExpertStore, key: ExpertKey, slot: int) -> list[bytes]:
    bank = store.bank(key.layer)
    start = slot * bank.stride
    return [
        bank.storage[start + part.offset : start + part.offset + part.nbytes].numpy().tobytes()
        for part in bank.parts
    ]


def cut_parts(raw: bytes, parts: tuple[ExpertPart, ...]) -> list[bytes]:
    return [raw[part.offset : part.offset + part.nbytes] for part in parts]


STORES: dict[str, Callable[..., ExpertStore]] = {
    "direct": DirectStore,
    "direct, buffered": partial(DirectStore, buffered=True),
    "mmap": MmapStore,
    "mmap on an old kernel": partial(MmapStore, populate=False),
}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("verify", [False, True])
def test_every_store_gives_the_bytes_of_the_plain_pack(
    gguf: tuple[Path, Pack, Pack], kind: str, verify: bool
) -> None:
    _, plain, reference = gguf
    store = STORES[kind](reference, budget_with_slots(reference.manifest, 4))
    store = VerifiedStore(store, reference) if verify else store
    for _ in range(2):
        for key in all_keys(plain):
            slot = store.acquire(key)
            assert slot is not None
            load(store, [key], [slot])
            wanted = cut_parts(plain.read_expert(key), plain.manifest.layer(key.layer).parts)
            assert parts_of(store, key, slot) == wanted
            store.release(key, slot)
    store.close()


@pytest.mark.parametrize("kind", ["split", "safetensors"])
def test_direct_reads_parts_wherever_they_begin_and_mmap_says_what_to_do(kind: str, tmp_path: Path) -> None:
    _, plain, reference = plain_and_reference(kind, tmp_path)
    budget = budget_with_slots(reference.manifest)
    store = VerifiedStore(DirectStore(reference, budget), reference)
    for key in all_keys(plain):
        slot = store.acquire(key)
        assert slot is not None
        store.read(key, slot)
    store.close()
    with pytest.raises(
        UsageError, match=r"cannot be mapped from the source.*use --io direct, or run: lmpack unpack"
    ):
        MmapStore(reference, budget)


@pytest.mark.parametrize("kind", STORES)
def test_a_source_that_is_cut_while_it_is_used_names_the_expert(
    gguf: tuple[Path, Pack, Pack], kind: str
) -> None:
    src, _, reference = gguf
    store = STORES[kind](reference, budget_with_slots(reference.manifest))
    os.truncate(src, src.stat().st_size - 1)
    slot = store.acquire(KEY)
    assert slot is not None
    with pytest.raises(StorageError, match=rf"expert {KEY}: {src}: truncated to .* run: lmpack validate"):
        store.read(KEY, slot)
    store.close()


def test_a_changed_weight_is_found_by_verified_reads(gguf: tuple[Path, Pack, Pack]) -> None:
    _, _, reference = gguf
    extent = reference.expert_extents(KEY)[1]
    flip(extent.path, extent.offset)
    store = VerifiedStore(DirectStore(reference, budget_with_slots(reference.manifest)), reference)
    slot = store.acquire(KEY)
    assert slot is not None
    with pytest.raises(StorageError, match=rf"expert {KEY}: {extent.path}: sha256 is"):
        store.read(KEY, slot)
    store.close()


def logits_of(path: Path, **options: Any) -> np.ndarray[Any, Any]:
    with Engine.load(path, num_threads=1, context_length=64, **options) as engine:
        ids = engine.tokenizer.encode("Once upon a time there was")
        return engine.forward(ids, engine.new_kv(), all_logits=True).numpy()


def test_the_demo_model_computes_the_same_bits(demo_gguf: Path, demo_pack: Path, tmp_path: Path) -> None:
    convert(demo_gguf, tmp_path / "reference.lmpack", reference=True)
    wanted = logits_of(demo_pack, io="direct")
    assert np.array_equal(wanted, logits_of(tmp_path / "reference.lmpack"))
    assert np.array_equal(wanted, logits_of(tmp_path / "reference.lmpack", verify_reads=True))


def test_a_mapped_model_computes_the_same_bits(demo_gguf: Path, tmp_path: Path) -> None:
    repository = demo_gguf.parents[2]
    command = [sys.executable, "benchmarks/random_gguf.py", str(tmp_path / "random.gguf"), "--quant=Q8_0"]
    command += ["--layers=2", "--experts=8", "--top-k=2", "--hidden=256", "--expert-width=256", "--heads=4"]
    command += ["--kv-heads=2", "--head-dim=64", "--vocab-from", str(demo_gguf)]
    subprocess.run(command, check=True, cwd=repository, env={"PYTHONPATH": str(repository)})
    convert(tmp_path / "random.gguf", tmp_path / "plain.lmpack")
    convert(tmp_path / "random.gguf", tmp_path / "reference.lmpack", reference=True)
    wanted = logits_of(tmp_path / "plain.lmpack", io="direct")
    for io in ("direct", "mmap"):
        assert np.array_equal(wanted, logits_of(tmp_path / "reference.lmpack", io=io))
