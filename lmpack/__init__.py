"""lmpack: Mixture-of-Experts models that are larger than memory.

The one-line API; everything else is imported from the module that owns it:

    import lmpack

    with lmpack.load("model.lmpack", ram=8 << 30) as engine:
        ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.engine import Engine

__all__ = ["__version__", "load"]

__version__ = "0.1.0"


def load(path: str | Path, **options: Any) -> Engine:
    """Open the pack at `path` for generation; `options` are those of `Engine.load`, RunOptions included.

    The only place where the format's package reaches up to the runtime, and only when called: importing
    lmpack loads neither torch nor numpy.
    """
    from runtime.engine import Engine

    return Engine.load(path, **options)
