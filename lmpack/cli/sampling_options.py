"""The options of every command that draws tokens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from lmpack.cli.text_input import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.sampler import SamplingParams


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling options; the command gets them as `sampling`, a dict for `sampling_params`."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop")

    @click.option(
        "-n",
        "--max-tokens",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        help="Tokens to generate at most.",
    )
    @click.option(
        "--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy."
    )
    @click.option(
        "--top-k",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Keep the k likeliest; 0 is off.",
    )
    @click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        default=1.0,
        show_default=True,
        help="Keep the likeliest that hold this share of the probability.",
    )
    @click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        default=0.0,
        show_default=True,
        help="Keep those at least this likely, relative to the likeliest.",
    )
    @click.option(
        "--repetition-penalty",
        type=click.FloatRange(0, 100, min_open=True),
        default=1.0,
        show_default=True,
        help="Above 1 makes recent tokens less likely.",
    )
    @click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same text."
    )
    @click.option(
        "--stop",
        type=Text(may_be_empty=False),
        multiple=True,
        help="Stop before this text; may be repeated.",
    )
    @functools.wraps(command)
    def wrapped(**options: Any) -> Any:
        sampling = {name: options.pop(name) for name in names}
        return command(sampling=sampling, **options)

    return wrapped


def sampling_params(sampling: dict[str, Any], **more: Any) -> SamplingParams:
    """The options as SamplingParams; UsageError when one makes no sense."""
    from runtime.sampler import SamplingParams

    return SamplingParams(**sampling, **more)
