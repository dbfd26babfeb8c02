"""The options of every command that loads a model, and the loading."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.cli.bus_errors import name_bus_errors
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line
from lmpack.cli.text_input import Word
from lmpack.errors import BudgetError, UsageError
from lmpack.plural import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmpack.pack import Pack
    from profiles.routing_recorder import RoutingRecorder
    from runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a pack; None leaves the choice to the engine."""

    ram: str | None
    device: str
    vram: str | None
    io: str
    kernels: str
    threads: int | None
    context: int | None
    kv_dtype: str
    policy: str | None
    warm: str | None
    prefetch: str | None
    verify_reads: bool

    def load(
        self, pack: Pack | str, recorder: RoutingRecorder | None = None, *, announce: bool = True
    ) -> Engine:
        """Open the pack and say on stderr which budget, store and kernels run, unless the command does.

        Raises UsageError for a --ram or --vram that is too small, as for every other option that cannot work.
        """
        from runtime.engine import Engine

        ram = _ram_nbytes(self.ram) if self.ram is not None else None
        vram = _vram_nbytes(self.vram, self.device) if self.vram is not None else None
        try:
            with progress_bar(None, description="load") as progress:
                engine = Engine.load(
                    pack,
                    ram=ram,
                    device=self.device,
                    vram=vram,
                    io=self.io,
                    kernels=self.kernels,
                    num_threads=self.threads,
                    context_length=self.context,
                    kv_dtype=self.kv_dtype,
                    policy=self.policy,
                    warm=self.warm,
                    prefetch=self.prefetch,
                    verify_reads=self.verify_reads,
                    recorder=recorder,
                    progress=progress,
                )
        except BudgetError as error:
            if self.ram is None and self.vram is None:
                raise
            raise UsageError(str(error)) from error
        if engine.io_choice.store == "mmap":
            name_bus_errors(engine)
        num_processors = len(os.sched_getaffinity(0))
        if engine.plan.num_threads > num_processors:
            click.echo(
                f"--threads {engine.plan.num_threads}: this process may use {counted(num_processors, 'processor')}, and "
                "threads that wait for one make a run many times slower",
                err=True,
            )
        if announce:
            click.echo(
                f"{one_line(engine.plan.pack.path.name)}: {engine.plan.tiers.describe()}; "
                f"kernels {engine.kernels.name}, store {engine.cache.store.name} ({engine.io_choice.reason}), "
                f"policy {engine.cache.policy_name}"
                + (f", {engine.cache.warmed} experts read in" if self.warm is not None else ""),
                err=True,
            )
        return engine


def _ram_nbytes(text: str) -> int:
    """The limit in bytes; a percentage is one of what is free, and more than that is said and cut."""
    from runtime.free_memory import free_memory_nbytes

    return _nbytes("--ram", text, free_memory_nbytes(), "for this process")


def _vram_nbytes(text: str, device: str) -> int:
    from runtime.compute_device import ComputeDevice

    found = ComputeDevice.find(device)
    return _nbytes("--vram", text, found.memory.free_nbytes(), f"on {found.name}")


def _nbytes(option: str, text: str, free_nbytes: int, where: str) -> int:
    nbytes = parse_byte_size(text, total=free_nbytes)
    if nbytes > free_nbytes:
        click.echo(
            f"{option} {text}: only {format_nbytes(free_nbytes)} are free {where}, so that is the limit",
            err=True,
        )
    return min(nbytes, free_nbytes)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that load a model; the command gets them as `engine_options`."""
    return engine_options_with()(command)


def engine_options_with(
    *,
    ram: str = "Hard memory limit: 8GiB, or 50% of what is free now. Default: 90%.",
    context: str = "Room for prompt and answer. Default: the model's, at most 4096.",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same for a command in which an option means something else, and says so in its help."""
    return functools.partial(_add_options, ram, context)


def _add_options(ram: str, context: str, command: Callable[..., Any]) -> Callable[..., Any]:
    @click.option("--ram", type=Word(), metavar="SIZE", help=ram)
    @click.option(
        "--device",
        type=Word(),
        metavar="cpu|cuda",
        default="cpu",
        show_default=True,
        help="What computes; cuda:1 is a second GPU.",
    )
    @click.option(
        "--vram",
        type=Word(),
        metavar="SIZE",
        help="Limit on the GPU's memory, CUDA's own context aside; --ram then limits what lies between it and the "
        "drive. Default: 90% of what is free there.",
    )
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
        help=context,
    )
    @click.option(
        "--kv-dtype",
        type=click.Choice(["f16", "bf16", "f32"]),
        default="f16",
        show_default=True,
        help="What keys and values are kept in.",
    )
    @click.option(
        "--policy",
        type=Word(),
        metavar="NAME",
        help="Which expert goes for another: lru, lfu, slru, lrfu or s3fifo, with layer+ for a share per layer, "
        "with pin+ to keep the most used of --warm. Default: layer+lrfu.",
    )
    @click.option(
        "--warm",
        type=Word(),
        metavar="PROFILE|last",
        help="Start with a profile's most used experts in memory, or with those the last session ended with "
        "(and keep this one's for the next).",
    )
    @click.option(
        "--prefetch",
        type=Word(),
        metavar="off|router|profile:FILE",
        help="Begin to read what the next layer may need: what its router says one layer early, or what followed in "
        "a profile. Default: off.",
    )
    @click.option(
        "--verify-reads",
        is_flag=True,
        help="Compare everything with the manifest's checksums when it is first read.",
    )
    @functools.wraps(command)
    def wrapped(**options: Any) -> Any:
        names = [field.name for field in fields(EngineOptions)]
        chosen = EngineOptions(**{name: options.pop(name) for name in names})
        return command(engine_options=chosen, **options)

    return wrapped
