"""Reserved addresses: memory and files come and go under them, and failures are errors, not signals."""

from __future__ import annotations

import errno
import gc
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.address_range import AddressRange

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = mmap.PAGESIZE


def mapped_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture
def addresses() -> Iterator[AddressRange]:
    addresses = AddressRange(4 * PAGE)
    yield addresses
    addresses.close()


def test_memory_starts_as_zeros_and_keeps_what_is_written() -> None:
    addresses = AddressRange(3 * PAGE, alignment=2 << 20)
    addresses.fill_with_memory(huge_pages=True)
    assert addresses.address % (2 << 20) == 0
    tensor, view = addresses.tensor(), addresses.view()
    assert not tensor.any()
    view[PAGE : PAGE + 3] = b"abc"
    assert tensor[PAGE : PAGE + 3].tolist() == list(b"abc")
    assert tensor.data_ptr() == addresses.address
    addresses.close()


def test_memory_that_is_provided_is_there_before_it_is_touched() -> None:
    addresses = AddressRange(200 << 20)
    addresses.fill_with_memory(huge_pages=False)
    if not addresses.populate(0, PAGE):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    before = resident_nbytes()
    addresses.provide_memory()
    assert resident_nbytes() - before > 190 << 20
    addresses.close()


def test_a_file_is_seen_where_it_is_mapped_and_can_be_mapped_again(
    addresses: AddressRange, tmp_path: Path
) -> None:
    tensor = addresses.tensor()
    for fill in b"xy":
        path = tmp_path / "expert"
        path.write_bytes(bytes([fill]) * 2 * PAGE)
        with path.open("rb") as file:
            addresses.map_file(PAGE, 2 * PAGE, file.fileno())
        addresses.populate(PAGE, 2 * PAGE)
        assert (tensor[PAGE : 3 * PAGE] == fill).all()
        addresses.empty(PAGE, 2 * PAGE)
        path.unlink()


def test_pages_that_a_file_does_not_have_are_an_error_not_a_signal(
    addresses: AddressRange, tmp_path: Path
) -> None:
    path = tmp_path / "expert"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file:
        addresses.map_file(0, 2 * PAGE, file.fileno())
    if not addresses.populate(0, PAGE):
        pytest.skip("this kernel has no MADV_POPULATE_READ")
    with pytest.raises(OSError, match="read in") as caught:
        addresses.populate(0, 2 * PAGE)
    assert caught.value.errno == errno.EFAULT


def test_what_the_kernel_refuses_is_an_error_with_its_reason(addresses: AddressRange) -> None:
    with pytest.raises(OSError, match="cannot be mapped"):
        addresses.map_file(0, PAGE, -1)
    with pytest.raises(OSError, match="cannot be mapped"):
        AddressRange(1 << 60)


def test_closing_twice_does_no_harm(addresses: AddressRange) -> None:
    addresses.close()
    addresses.close()


@pytest.mark.parametrize("view", ["tensor", "view", "numpy"])
def test_addresses_that_nobody_closed_go_with_the_last_who_sees_them(view: str) -> None:
    before = mapped_nbytes()
    addresses = AddressRange(1 << 30)
    addresses.fill_with_memory(huge_pages=False)
    seen = addresses.tensor().numpy()[:1] if view == "numpy" else getattr(addresses, view)()[:1]
    del addresses
    gc.collect()
    assert seen[0] == 0
    assert mapped_nbytes() - before > 900 << 20
    del seen
    gc.collect()
    assert mapped_nbytes() - before < 100 << 20
