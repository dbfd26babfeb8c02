"""lmpack bench: how fast a pack runs, at one or several memory budgets.

Keys of `--json`:
    pack                what was run
    prompt_tokens, answer_tokens, repetitions, warmup   as asked
    runs[]              one per budget, the smallest first:
      architecture
      ram_nbytes          the budget
      resident_share      share of the experts' bytes that fit into it
      kernels, store, policy, num_threads, context_length
      peak_rss_nbytes     of the process, which ran nothing else
      prompt, answer      what was measured over all repetitions; answer is null when no token was asked for:
        tokens_per_s        mean over the repetitions
        tokens_per_s_stdev  their standard deviation; 0 for one
        hit_rate            share of expert look-ups that found the expert in memory; null for a dense model
        read_nbytes         experts' bytes read from the drive
        read_nbytes_per_s   the same per second, whether it waited for the drive or computed
        waiting_share       share of the time spent waiting for the drive
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.cli.budget_chart import BudgetChart, BudgetPoint
from lmpack.cli.engine_options import EngineOptions, engine_options_with
from lmpack.cli.fresh_process import call_fresh
from lmpack.cli.output_file import check_output
from lmpack.cli.path_argument import NewPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json
from lmpack.cli.text_input import TextPath, read_text
from lmpack.errors import UsageError
from lmpack.plural import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.speed import Phase

TEXT = Path(__file__).parents[1] / "demo" / "heldout.txt"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run at every budget."""

    prompt_tokens: int
    answer_tokens: int
    repetitions: int
    warmup: bool


@click.command(
    epilog="""Examples:

\b
  lmpack bench qwen3.lmpack
  lmpack bench qwen3.lmpack -p 2048 -n 128 -r 5 --json
  lmpack bench qwen3.lmpack --ram 4GiB,8GiB,16GiB,100% --plot qwen3.svg
"""
)
@click.argument("pack", type=PackPath())
@click.option(
    "-p",
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Length of the prompts.",
)
@click.option(
    "-n",
    "--answer-tokens",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Length of the answers.",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Prompts and answers to time.",
)
@click.option("--no-warmup", is_flag=True, help="Time the very first prompt and answer, too.")
@click.option(
    "-f",
    "--file",
    type=TextPath(),
    default=TEXT,
    help="Text to take the prompts from, for what is read decides which experts are. Default: English tales.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.option(
    "--plot",
    type=NewPath(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Draw tokens per second and hit rate over the budgets.",
)
@engine_options_with(
    ram="Budgets to run at, each in a process of its own: 8GiB or 4GiB,8GiB,50%. Default: 90% of what is free.",
    context="Room for prompt and answer. Default: what they need.",
)
def command(
    pack: str,
    prompt_tokens: int,
    answer_tokens: int,
    repetitions: int,
    no_warmup: bool,
    file: str,
    as_json: bool,
    plot: Path | None,
    engine_options: EngineOptions,
) -> None:
    """Time PACK's model: pp is running a prompt, tg writing an answer to it one token after the other.

    Prompts are parts of a real text, answers are greedy. One prompt and answer go before the timed ones, so that
    experts are in memory as far as they fit. Hits, reads and waiting are those of the answers.
    """
    if plot is not None:
        if plot.suffix != ".svg":
            raise UsageError(f"--plot {plot}: expected a name that ends with .svg")
        check_output(plot)
    work = Workload(prompt_tokens, answer_tokens, repetitions, not no_warmup)
    context = engine_options.context or prompt_tokens + answer_tokens
    if context < prompt_tokens + answer_tokens:
        raise UsageError(
            f"--context {context}: the prompt and the answer have {prompt_tokens + answer_tokens} tokens"
        )
    text = read_text(file)
    budgets = _ascending(engine_options.ram)
    runs = []
    for ram in budgets:
        options = replace(engine_options, ram=ram, context=context)
        if len(budgets) == 1:
            runs.append(_run(pack, work, text, options))
        else:
            runs.append(call_fresh(_run, pack, work, text, options))
        if not as_json:
            click.echo(_row(runs[-1]) if len(runs) > 1 else f"{_heading(work)}\n{_row(runs[0])}")
    if as_json:
        print_json({"pack": pack, **asdict(work), "runs": runs})
    else:
        click.echo(_setting(runs[-1]))
    if plot is not None:
        _chart(one_line(Path(pack).name), work, runs).save(plot)
        click.echo(f"wrote {plot}", err=as_json)


def _ascending(ram: str | None) -> list[str | None]:
    """The budgets, smallest first: one that is too small for the model is found out before hours are spent."""
    if ram is None or "," not in ram:
        return [ram]
    from runtime.free_memory import free_memory_nbytes

    free_nbytes = free_memory_nbytes()
    sizes = {size: parse_byte_size(size, total=free_nbytes) for size in ram.split(",")}
    return [*sorted(sizes, key=sizes.__getitem__)]


def _run(pack: str, work: Workload, text: str, engine_options: EngineOptions) -> dict[str, Any]:
    """Run the workload at one budget; the result is one of `runs`."""
    from runtime.speed import measure_repetitions

    with engine_options.load(pack, announce=False) as engine:
        token_ids = engine.tokenizer.encode(text)
        if not token_ids:
            raise UsageError("the text is empty; name one with -f FILE")
        repetitions = measure_repetitions(
            engine, token_ids, prompt_tokens=work.prompt_tokens, answer_tokens=work.answer_tokens
        )
        with progress_bar(work.warmup + work.repetitions, unit="repetition", description="bench") as progress:
            timed = []
            for number in range(work.warmup + work.repetitions):
                repetition = next(repetitions)
                progress(1)
                if number >= work.warmup:
                    timed.append(repetition)
        stats = engine.stats()
        return {
            "architecture": stats.architecture,
            "ram_nbytes": stats.ram_nbytes,
            "resident_share": engine.budget.resident_share,
            "kernels": stats.kernels,
            "store": stats.store,
            "policy": stats.policy,
            "num_threads": stats.num_threads,
            "context_length": stats.context_length,
            "peak_rss_nbytes": stats.peak_rss_nbytes,
            "prompt": _summary([repetition.prompt for repetition in timed]),
            "answer": _summary([repetition.answer for repetition in timed if repetition.answer]),
        }


def _summary(phases: Sequence[Phase]) -> dict[str, Any] | None:
    if not phases:
        return None
    rates = [phase.num_tokens / phase.seconds for phase in phases]
    seconds = sum(phase.seconds for phase in phases)
    read_nbytes = sum(phase.bytes_read for phase in phases)
    hits = sum(phase.hits for phase in phases)
    lookups = hits + sum(phase.misses for phase in phases)
    return {
        "tokens_per_s": statistics.fmean(rates),
        "tokens_per_s_stdev": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "hit_rate": hits / lookups if lookups else None,
        "read_nbytes": read_nbytes,
        "read_nbytes_per_s": read_nbytes / seconds,
        "waiting_share": sum(phase.read_s for phase in phases) / seconds,
    }


def _chart(name: str, work: Workload, runs: Sequence[dict[str, Any]]) -> BudgetChart:
    points = []
    for run in runs:
        told = run["answer"] or run["prompt"]
        rate = told["tokens_per_s"], told["tokens_per_s_stdev"]
        points.append(BudgetPoint(run["ram_nbytes"], *rate, told["hit_rate"]))
    what = (
        f"decoding {work.answer_tokens} tokens after a prompt of {work.prompt_tokens}"
        if work.answer_tokens
        else f"prompts of {work.prompt_tokens} tokens"
    )
    return BudgetChart(f"{name}: {what}", _setting(runs[-1]), points)


def _setting(run: dict[str, Any]) -> str:
    return (
        f"{run['architecture']}, {run['kernels']} kernels, {run['store']} store, {run['policy']} cache, "
        f"{counted(run['num_threads'], 'thread')}"
    )


def _heading(work: Workload) -> str:
    pp, tg = f"pp{work.prompt_tokens} tokens/s", f"tg{work.answer_tokens} tokens/s"
    return f"{'budget':>9}  resident  {pp:>17}  {tg:>17}    hits  GB/s read  waiting   peak RSS"


def _row(run: dict[str, Any]) -> str:
    told = run["answer"] or run["prompt"]
    hits = "-" if told["hit_rate"] is None else f"{told['hit_rate']:.1%}"
    return (
        f"{format_nbytes(run['ram_nbytes']):>9}  {run['resident_share']:>8.0%}  "
        f"{_rate(run['prompt']):>17}  {_rate(run['answer']):>17}  {hits:>6}  "
        f"{told['read_nbytes_per_s'] / 1e9:>9.2f}  {told['waiting_share']:>7.0%}  "
        f"{format_nbytes(run['peak_rss_nbytes']):>9}"
    )


def _rate(phase: dict[str, Any] | None) -> str:
    if phase is None:
        return "-"
    spread = f" ± {phase['tokens_per_s_stdev']:.2f}" if phase["tokens_per_s_stdev"] else ""
    return f"{phase['tokens_per_s']:.2f}{spread}"
