"""lmpack profile: which experts a set of prompts uses.

Keys of `--json`:
    profile, trace      the files written; trace is null without --trace
    architecture, pack_id, tokenizer_sha256, prompt_set_sha256
    num_prompts         prompts run
    num_tokens          tokens that passed through the layers, all of them counted;
    num_prompt_tokens     of these the prompts', the others were generated
    num_generated_tokens  tokens of the answers: the last one of an answer is chosen but not run
    top_k               experts per token and layer
    layers[]            layer, num_experts, busiest_expert, busiest_to_mean (choices of the busiest expert over
                        the mean), entropy_bits, gini, never_chosen (expert numbers), coverage
    coverage[]          percent, num_experts, share: the share of choices that the top percent of experts
                        covers, in the layer or (at the top level) over all layers' experts together
    stats               what the engine used and did, as in `lmpack run --json`
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.engine_options import EngineOptions, engine_options
from lmpack.cli.output_file import check_output
from lmpack.cli.path_argument import ExistingPath, NewPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import print_json
from lmpack.errors import LmpackError, UsageError
from lmpack.plural import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from profiles.prompt_file import PromptSet
    from profiles.routing_profile import RoutingProfile
    from profiles.routing_recorder import RoutingRecorder
    from profiles.routing_skew import Coverage, RoutingSkew
    from runtime.engine import Engine
    from runtime.tokenizer import Tokenizer


@click.command(
    epilog="""Examples:

\b
  lmpack profile qwen3.lmpack --prompts prompts.jsonl -n 64 -o qwen3.profile.safetensors
  lmpack profile qwen3.lmpack --prompts prompts.txt -o p.safetensors --trace t.safetensors --ram 8GiB
  lmpack profile qwen3.lmpack --prompts prompts.txt -o p.safetensors --json
"""
)
@click.argument("pack", type=PackPath())
@click.option(
    "--prompts",
    "prompt_file",
    type=ExistingPath(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help='.txt: one prompt a line; .jsonl: {"prompt": ...} or {"messages": [...]}.',
)
@click.option(
    "-n",
    "num_tokens",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    metavar="TOKENS",
    help="Generate this many tokens after each prompt, greedily.",
)
@click.option(
    "-o",
    "--output",
    type=NewPath(dir_okay=False, path_type=Path),
    required=True,
    metavar="OUT",
    help="Where the profile goes: counts, in safetensors.",
)
@click.option(
    "--trace",
    type=NewPath(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write every token's choices, too.",
)
@click.option("--parse-special", is_flag=True, help="Read <|special|> tokens in text prompts as such.")
@click.option(
    "--heatmap/--no-heatmap",
    default=None,
    help="Draw the counts. Default: when a person watches.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@engine_options
def command(
    pack: str,
    prompt_file: Path,
    num_tokens: int,
    output: Path,
    trace: Path | None,
    parse_special: bool,
    heatmap: bool | None,
    as_json: bool,
    engine_options: EngineOptions,
) -> None:
    """Run the prompts in FILE through PACK's model and record which experts each token takes.

    Tokens of prompts and of answers both count. The tables show how uneven the choices are: the busiest expert
    against the mean, Gini coefficient, entropy, experts never chosen, and the share of all choices that the
    top 10, 25 and 50 % of experts cover.
    """
    from lmpack.pack import Pack
    from profiles.prompt_file import read_prompt_set
    from profiles.routing_origin import RoutingOrigin
    from profiles.routing_recorder import RoutingRecorder
    from profiles.routing_shape import RoutingShape
    from profiles.routing_skew import RoutingSkew

    _check_outputs(output, trace, prompt_file)
    prompt_set = read_prompt_set(prompt_file)
    opened = Pack.open(Path(pack))
    manifest = opened.manifest
    recorder = RoutingRecorder(RoutingShape.of_manifest(manifest), keep_trace=trace is not None)
    with engine_options.load(opened, recorder) as engine:
        prompts_ids = _tokenize(prompt_set, engine, parse_special)
        total = sum(len(prompt_ids) + num_tokens for prompt_ids in prompts_ids)
        with progress_bar(total, unit="token", description="profile") as progress:
            num_generated = sum(
                _record(engine, recorder, prompt_ids, num_tokens, progress) for prompt_ids in prompts_ids
            )
        stats = engine.stats().to_json()
        tokenizer_sha256 = _tokenizer_sha256(engine.tokenizer)
    origin = RoutingOrigin(
        manifest.architecture, (manifest.pack_id,), (tokenizer_sha256,), (prompt_set.sha256,)
    )
    profile = recorder.profile(origin)
    profile.save(output)
    if trace is not None:
        recorder.trace(origin).save(trace)
    skew = RoutingSkew.of_profile(profile)
    if as_json:
        document = _document(profile, skew, len(prompts_ids), num_generated)
        files = {"profile": str(output), "trace": str(trace) if trace is not None else None}
        print_json({**files, **document, "stats": stats})
        return
    click.echo(
        f"{counted(len(prompts_ids), 'prompt')} of {counted(profile.num_prompt_tokens, 'token')}, "
        f"{counted(num_generated, 'token')} generated; {counted(profile.num_tokens, 'token')} went through "
        "the model and were counted"
    )
    click.echo(_table(profile, skew))
    if heatmap or (heatmap is None and sys.stdout.isatty()):
        from lmpack.cli.heat_map import draw_heat_map

        click.echo(f"\n{draw_heat_map(profile, shutil.get_terminal_size().columns)}")
    for path in (output, trace):
        if path is not None:
            click.echo(f"wrote {path} ({format_nbytes(path.stat().st_size)})")


def _check_outputs(output: Path, trace: Path | None, prompt_file: Path) -> None:
    """Find out before the run, not after it, that a file cannot or must not be written."""
    if trace is not None and trace.absolute() == output.absolute():
        raise UsageError(f"{trace}: profile and trace need two files")
    for path in (output, trace):
        if path is None:
            continue
        if path.resolve() == prompt_file.resolve():
            raise UsageError(f"{path}: holds the prompts; write to another file")
        check_output(path)


def _tokenize(prompt_set: PromptSet, engine: Engine, parse_special: bool) -> list[list[int]]:
    """Token ids of every prompt; checked before the first one runs."""
    from runtime.chat_template import encode_chat

    prompts_ids = []
    for prompt in prompt_set.prompts:
        try:
            if prompt.text is not None:
                ids = engine.tokenizer.encode(prompt.text, parse_special=parse_special)
            else:
                ids = encode_chat(engine.tokenizer, [asdict(message) for message in prompt.messages])
            engine.check_prompt(ids)
        except LmpackError as error:  # the model's template refuses what it does not know
            raise UsageError(f"{prompt_set.at(prompt)}: {error}") from error
        prompts_ids.append(ids)
    return prompts_ids


def _record(
    engine: Engine,
    recorder: RoutingRecorder,
    prompt_ids: list[int],
    num_tokens: int,
    progress: Callable[[int], None],
) -> int:
    """Run one prompt and its answer; return how many tokens were generated."""
    from runtime.sampler import SamplingParams

    generated: list[int] = []
    if num_tokens == 0:
        engine.hidden(prompt_ids, engine.new_kv())
    else:
        for token in engine.generate(prompt_ids, SamplingParams(max_tokens=num_tokens)):
            progress(1 if generated else len(prompt_ids) + 1)
            generated.append(token.token_id)
    progress(num_tokens - len(generated) if generated else len(prompt_ids) + num_tokens)
    # the last token of an answer never runs, unless the end token was chosen after it
    ran = (prompt_ids + generated)[: recorder.num_pending]
    recorder.end_prompt(ran, len(prompt_ids))
    return len(generated)


def _tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """The hash of a vocabulary, as profiles/FORMAT.md defines it."""
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.token_bytes(token_id)
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


def _document(
    profile: RoutingProfile, skew: RoutingSkew, num_prompts: int, num_generated_tokens: int
) -> dict[str, Any]:
    origin = profile.origin
    return {
        "architecture": origin.architecture,
        "pack_id": origin.pack_ids[0],
        "tokenizer_sha256": origin.tokenizers_sha256[0],
        "prompt_set_sha256": origin.prompt_sets_sha256[0],
        "num_prompts": num_prompts,
        "num_tokens": profile.num_tokens,
        "num_prompt_tokens": profile.num_prompt_tokens,
        "num_generated_tokens": num_generated_tokens,
        "top_k": profile.shape.top_k,
        **asdict(skew),
    }


def _table(profile: RoutingProfile, skew: RoutingSkew) -> str:
    """One line a layer, then the experts of all layers together."""
    percents = "".join(f"  top {entry.percent:2d} %" for entry in skew.coverage)
    lines = [f"layer  experts  busiest  x mean   gini  entropy, bits  never{percents}"]
    for layer in skew.layers:
        lines.append(
            f"L{layer.layer:03d} {layer.num_experts:9d}    E{layer.busiest_expert:04d}"
            f"  {layer.busiest_to_mean:6.2f}  {layer.gini:5.3f}"
            f"  {layer.entropy_bits:5.2f} of {math.log2(layer.num_experts):5.2f}"
            f"  {len(layer.never_chosen):5d}{_shares(layer.coverage)}"
        )
    num_never = sum(len(layer.never_chosen) for layer in skew.layers)
    lines.append(f"all  {sum(profile.shape.num_experts):9d}{num_never:46d}{_shares(skew.coverage)}")
    return "\n".join(lines)


def _shares(coverage: Sequence[Coverage]) -> str:
    return "".join(f"  {entry.share:8.1%}" for entry in coverage)
