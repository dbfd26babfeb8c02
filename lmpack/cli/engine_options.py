"""The options of every command that loads a model, and the loading."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from lmpack.byte_size import parse_byte_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from profiles.routing_recorder import RoutingRecorder
    from runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a pack; None leaves the choice to the engine."""

    ram: str | None
    io: str
    kernels: str
    threads: int | None
    context: int | None
    kv_dtype: str

    def with_context(self, context: int) -> EngineOptions:
        """The same with another context length in tokens."""
        return replace(self, context=context)

    def load(self, pack: str, recorder: RoutingRecorder | None = None) -> Engine:
        """Open the pack and say on stderr which budget, store and kernels run."""
        from runtime.engine import Engine

        engine = Engine.load(
            pack,
            ram=parse_byte_size(self.ram) if self.ram is not None else None,
            io=self.io,
            kernels=self.kernels,
            num_threads=self.threads,
            context_length=self.context,
            kv_dtype=self.kv_dtype,
            recorder=recorder,
        )
        click.echo(
            f"{engine.pack.path.name}: {engine.budget.describe()}; "
            f"kernels {engine.kernels.name}, store {engine.cache.store.name}",
            err=True,
        )
        return engine


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that load a model; the command gets them as `engine_options`."""

    @click.option("--ram", metavar="SIZE", help="Hard memory limit, such as 8GiB. Default: what is free now.")
    @click.option(
        "--io",
        type=click.Choice(["auto", "mmap", "direct"]),
        default="auto",
        show_default=True,
        help="How experts are read from the drive.",
    )
    @click.option(
        "--kernels",
        type=click.Choice(["auto", "ggml", "torch"]),
        default="auto",
        show_default=True,
        help="What multiplies: ggml, or the slow torch reference.",
    )
    @click.option(
        "--threads", type=click.IntRange(1, 1024), help="Default: the processors this process may use."
    )
    @click.option(
        "--context",
        type=click.IntRange(min=1),
        metavar="TOKENS",
        help="Room for prompt and answer. Default: the model's, at most 4096.",
    )
    @click.option(
        "--kv-dtype",
        type=click.Choice(["f16", "bf16", "f32"]),
        default="f16",
        show_default=True,
        help="What keys and values are kept in.",
    )
    @functools.wraps(command)
    def wrapped(**options: Any) -> Any:
        names = [field.name for field in fields(EngineOptions)]
        chosen = EngineOptions(**{name: options.pop(name) for name in names})
        return command(engine_options=chosen, **options)

    return wrapped
