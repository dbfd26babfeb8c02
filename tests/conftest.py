"""The models that tests share: the demo model as GGUF and as a pack, and the larger ones where they lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder of test models beside the repository, or where LMPACK_MODELS says."""
    folder = Path(os.environ.get("LMPACK_MODELS", REPOSITORY.parent / "shared" / "models"))
    if not folder.is_dir():
        pytest.skip(f"no test models in {folder}; set LMPACK_MODELS to their folder")
    return folder


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
