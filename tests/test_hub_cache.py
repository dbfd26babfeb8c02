"""HubCache: what huggingface_hub has is not fetched again, and what we have it finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants, hf_hub_download

from lmpack.cli.main import run
from lmpack.errors import HubError
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.test_hub_pull import REPO, pulled

if TYPE_CHECKING:
    from tests.hub_server import HubServer


def test_a_kept_source_is_where_other_programs_find_it(hub: HubServer, tmp_path: Path) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"sub/m-Q8_0.gguf": raw})
    pulled(tmp_path / "m.lmpack", cache_folder=tmp_path / "other")
    found = hf_hub_download(
        REPO,
        "sub/m-Q8_0.gguf",
        revision=hub.repos[REPO].branches["main"].commit,
        cache_dir=tmp_path / "other",
        local_files_only=True,
    )
    assert Path(found).read_bytes() == raw


def test_what_is_cached_does_not_come_again_and_is_checked(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    commit = hub.repos[REPO].branches["main"].commit
    with monkeypatch.context() as download:  # another program's, of a hub that speaks no Xet
        download.setattr(constants, "HF_HUB_DISABLE_XET", True)
        cached = Path(
            hf_hub_download(
                REPO, "m-Q8_0.gguf", revision=commit, endpoint=hub.url, cache_dir=tmp_path / "cache"
            )
        )
    assert pulled(tmp_path / "m.lmpack").downloaded_nbytes == 0
    blob = cached.resolve()
    blob.write_bytes(raw[:-1] + bytes([raw[-1] ^ 0xFF]))
    with pytest.raises(HubError, match=r"damaged, its hash is not the hub's .*delete it"):
        pulled(tmp_path / "n.lmpack")


@pytest.mark.parametrize(
    ("withheld", "says"),
    [
        ({"ETag", "X_Linked_ETag"}, "answers with no ETag, expected [0-9a-f]{64}, so"),
        ({"X_Linked_ETag"}, "answers with ETag of-the-redirect, expected [0-9a-f]{64}, so"),
        ({"X_Repo_Commit"}, "answers with no X-Repo-Commit, expected [0-9a-f]{40}, so"),
        ({"X_Linked_Size"}, "answers with (no Content-Length|Content-Length 0), expected [0-9]+, so"),
    ],
    ids=["no ETag", "another ETag", "no commit", "no size"],
)
def test_a_mirror_that_names_files_otherwise_is_blamed_before_the_download(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    withheld: set[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)})
    hub.withheld = withheld
    assert run(["pull", REPO, "m.lmpack"]) == 1
    error = capsys.readouterr().err
    assert re.search(f"error: {REPO}: m-Q8_0.gguf: {hub.url} {says} .*--discard-source", error)
    assert "m.lmpack.download:" not in error
    fetched = [request for request in hub.requests if request.range and request.server == "store"]
    assert len(fetched) <= 1  # the header
    assert run(["pull", REPO, "m.lmpack", "--discard-source"]) == 0  # the advice helps
