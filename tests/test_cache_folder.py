"""The cache folder: the user's choice, a home's, or an error that says what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmpack.cache_folder import cache_folder
from lmpack.errors import StorageError


def test_the_folder_is_the_one_that_the_user_chose(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "lmpack"


@pytest.mark.parametrize("environment", [{}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}])
def test_what_is_no_absolute_path_does_not_count(environment: dict[str, str]) -> None:
    assert cache_folder(environment) == Path.home() / ".cache" / "lmpack"


@pytest.mark.usefixtures("a_user_without_a_home")
def test_a_user_without_a_home_is_told_what_to_set() -> None:
    with pytest.raises(
        StorageError, match=r"user 3999999999 has no home folder .*; set HOME or XDG_CACHE_HOME"
    ):
        cache_folder({})
