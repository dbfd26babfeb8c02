"""The options of every command that loads a model, and the loading."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
            recorder=recorder,
        )
        click.echo(
            f"{engine.pack.path.name}: {engine.budget.describe()}; "
            f"kernels {engine.kernels.name}, store {engine.cache.store.name}",
            err=True,
        )
        return engine


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --ram, --io, --kernels, --threads, --context; the command gets them as `engine_options`."""

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
    def wrapped(
        ram: str | None, io: str, kernels: str, threads: int | None, context: int | None, **rest: Any
    ) -> Any:
        return command(engine_options=EngineOptions(ram, io, kernels, threads, context), **rest)

    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    return wrapped
