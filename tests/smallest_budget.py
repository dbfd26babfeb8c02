"""The smallest memory budget that something works with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable


def smallest_budget(refused: Callable[[], object]) -> int:
    """In bytes, as it is named by the refusal of a call that asks for less."""
    with pytest.raises(BudgetError) as refusal:
        refused()
    return int(re.findall(r"(\d+) bytes", str(refusal.value))[-1])
