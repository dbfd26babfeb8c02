"""What each cache policy hits and reads on routing that a trained model really chose, and what asking it costs.

    python -m benchmarks.policies [--models ../shared/models] [--resident 10,25,50,75]

The model runs its prompt sets (a prefill each, then 48 greedy tokens) and its held-out text, each as a session of its
own that starts with an empty cache; the held-out text is replayed token by token, as if it had been decoded. Then every
policy replays them all with room for a share of the experts. Nothing here is timed but the last table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converters.conversion import convert
from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from profiles.cache_simulation import CacheFigures
from profiles.policy_choice import DEFAULT_POLICY, ORDERS, PolicyChoice
from profiles.policy_comparison import compare_policies
from profiles.prompt_file import read_prompt_set
from profiles.routing_origin import RoutingOrigin
from profiles.routing_profile import RoutingProfile
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from profiles.slot_pool import SlotPool
from runtime.engine import Engine
from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from profiles.policy_comparison import ComparedRun
    from profiles.routing_trace import RoutingTrace

CHOICES = [PolicyChoice(order, per_layer) for per_layer in (False, True) for order in ORDERS]
GENERATED = 48  # tokens after each prompt
WINDOW = 512  # tokens of held-out text that are one context


def record(pack: Path, models: Path, heldout_tokens: int) -> dict[str, RoutingTrace]:
    """A trace per prompt set, and one of the held-out text."""
    manifest = Pack.open(pack).manifest
    shape = RoutingShape.of_manifest(manifest)
    origin = RoutingOrigin(manifest.architecture, (manifest.pack_id,), ("0" * 64,), ("0" * 64,))
    traces = {}
    for file in [*sorted((models / "tiny" / "prompts").glob("*.jsonl")), models / "tiny" / "heldout.txt"]:
        recorder = RoutingRecorder(shape, keep_trace=True)
        with Engine.load(pack, recorder=recorder, num_threads=1, context_length=1024) as engine:
            if file.suffix == ".jsonl":
                _answer(engine, recorder, file)
                traces[file.stem] = recorder.trace(origin)
            else:
                _read(engine, recorder, file.read_text(encoding="utf-8"), heldout_tokens)
                trace = recorder.trace(origin)
                traces[file.stem] = replace(trace, chunk_offsets=np.arange(trace.num_tokens + 1))
    return traces


def _answer(engine: Engine, recorder: RoutingRecorder, file: Path) -> None:
    for prompt in read_prompt_set(file).prompts:
        assert prompt.text is not None, f"{file}: chats are not read here"
        ids = engine.tokenizer.encode(prompt.text)
        answer = engine.generate(ids, SamplingParams(max_tokens=GENERATED))
        ran = ids + [token.token_id for token in answer]
        recorder.end_prompt(ran[: recorder.num_pending], len(ids))


def _read(engine: Engine, recorder: RoutingRecorder, text: str, num_tokens: int) -> None:
    ids = engine.tokenizer.encode(text)[:num_tokens]
    for first in range(0, len(ids), WINDOW):
        window = ids[first : first + WINDOW]
        engine.hidden(window, engine.new_kv())
        recorder.end_prompt(window, len(window))


def pool_of(trace: RoutingTrace, percent: int) -> SlotPool:
    """Room for this share of the experts."""
    return SlotPool(sum(trace.shape.num_experts) * percent // 100, trace.shape.layers)


def halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    """The first prompts and the others."""
    middle = int(trace.prompt_offsets[trace.num_prompts // 2])
    return _part(trace, 0, middle), _part(trace, middle, trace.num_tokens)


def _part(trace: RoutingTrace, first: int, last: int) -> RoutingTrace:
    def between(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return offsets[(offsets >= first) & (offsets <= last)] - first

    starts = trace.prompt_offsets[:-1]
    return replace(
        trace,
        topk_ids=trace.topk_ids[first:last],
        topk_weights=trace.topk_weights[first:last],
        token_ids=trace.token_ids[first:last],
        prompt_offsets=between(trace.prompt_offsets),
        prompt_lengths=trace.prompt_lengths[(starts >= first) & (starts < last)],
        chunk_offsets=between(trace.chunk_offsets),
    )


def add_up(runs: Iterable[ComparedRun]) -> tuple[CacheFigures, CacheFigures]:
    """Of several sessions: decoding alone, and all."""
    runs = list(runs)
    return (
        sum((run.decode for run in runs), CacheFigures()),
        sum((run.total for run in runs), CacheFigures()),
    )


def all_policies(
    traces: dict[str, RoutingTrace], percents: Sequence[int]
) -> dict[int, list[list[ComparedRun]]]:
    """percent -> for each session Belady's run and each policy's."""
    return {
        percent: [
            list(compare_policies(trace, [pool_of(trace, percent)], CHOICES)) for trace in traces.values()
        ]
        for percent in percents
    }


def print_all(runs: dict[int, list[list[ComparedRun]]]) -> None:
    """A row per policy, a column per share."""
    rows = []
    for number, name in enumerate(["belady", *(choice.name for choice in CHOICES)]):
        row = [f"**{name}**" if name == DEFAULT_POLICY.name else name]
        for sessions in runs.values():
            decode, total = add_up(session[number] for session in sessions)
            _, least = add_up(session[0] for session in sessions)
            row.append(f"{decode.hit_rate:.1%} ({total.misses / least.misses:.2f} x)")
        rows.append(row)
    print_table(["policy", *(f"{percent} % resident" for percent in runs)], rows)


def print_sessions(names: Sequence[str], runs: dict[int, list[list[ComparedRun]]]) -> None:
    """Per session: plain LRU, the default, the bound."""
    shown = ["lru", DEFAULT_POLICY.name, "belady"]
    rows = []
    for number, name in enumerate(names):
        cells = []
        for sessions in runs.values():
            by_policy = {run.policy: run.decode.hit_rate for run in sessions[number]}
            cells.append(" / ".join(f"{by_policy[policy]:.1%}" for policy in shown))
        rows.append([name, *cells])
    print_table([", ".join(shown), *(f"{percent} % resident" for percent in runs)], rows)


def print_starts(traces: dict[str, RoutingTrace], percents: Sequence[int]) -> None:
    """The second half of each session's prompts, with and without what a profile of the first half knows."""
    pinned = replace(DEFAULT_POLICY, pinned=True)
    starts = ["empty", "the half's most used", "the half's most used, half of them pinned"]
    rows = [[start] for start in starts]
    for percent in percents:
        runs: list[list[ComparedRun]] = [[], [], []]
        least: list[ComparedRun] = []
        for trace in traces.values():
            known, asked = halves(trace)
            pools, most_used = [pool_of(asked, percent)], RoutingProfile.from_trace(known).most_used()
            bound, cold = compare_policies(asked, pools, [DEFAULT_POLICY])
            _, warm, pins = compare_policies(asked, pools, [DEFAULT_POLICY, pinned], most_used, most_used)
            least.append(bound)
            for of_start, run in zip(runs, (cold, warm, pins), strict=True):
                of_start.append(run)
        for row, of_start in zip(rows, runs, strict=True):
            decode, total = add_up(of_start)
            row.append(f"{decode.hit_rate:.1%} ({total.misses / add_up(least)[1].misses:.2f} x)")
    print_table(["starts with", *(f"{percent} % resident" for percent in percents)], rows)


def print_costs(num_layers: int = 48, num_experts: int = 128, top_k: int = 8) -> None:
    """Microseconds of this thread per call in a model of this shape, half of it resident."""
    pool = SlotPool(num_layers * num_experts // 2, tuple(range(num_layers)))
    rng = np.random.default_rng(1)
    skewed = rng.zipf(1.3, (500, num_layers, top_k)) % num_experts
    tokens = [
        [ExpertKey(layer, expert) for layer in pool.layers for expert in set(token[layer].tolist())]
        for token in skewed
    ]
    keys = {key: key for token in tokens for key in token}  # one object per expert, as in the runtime's cache
    rows = []
    for choice in CHOICES:
        policy = choice.make(pool)
        resident: set[ExpertKey] = set()
        touch_s = victim_s = 0.0
        touches = victims = 0
        for token in tokens:
            hits = [keys[key] for key in token if key in resident]
            started = time.thread_time()
            for key in hits:
                policy.touch(key)
            touch_s += time.thread_time() - started
            touches += len(hits)
            for key in token:
                if key in resident:
                    continue
                if len(resident) == pool.num_slots:
                    started = time.thread_time()
                    victim = policy.victim(key, ())
                    policy.forget(victim)
                    victim_s += time.thread_time() - started
                    victims += 1
                    resident.remove(victim)
                resident.add(key)
                policy.touch(key)
        rows.append([choice.name, f"{touch_s / touches * 1e6:.2f}", f"{victim_s / victims * 1e6:.1f}"])
    print_table(["policy", "touch, us", "victim, us"], rows)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print in Markdown."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def main() -> None:
    """Parse the flags, record, simulate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("../shared/models"), help="where tiny/ lies")
    parser.add_argument("--resident", default="10,25,50,75", help="percent of the experts, with commas")
    parser.add_argument("--heldout-tokens", type=int, default=8192)
    arguments = parser.parse_args()
    percents = [int(percent) for percent in arguments.resident.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        convert(arguments.models / "tiny" / "tiny-Q4_K_M.gguf", Path(folder) / "tiny.lmpack")
        traces = record(Path(folder) / "tiny.lmpack", arguments.models, arguments.heldout_tokens)
    num_tokens = sum(trace.num_tokens for trace in traces.values())
    num_decoded = sum(int((np.diff(trace.chunk_offsets) == 1).sum()) for trace in traces.values())
    print(f"{len(traces)} sessions, {num_tokens} tokens, {num_decoded} of them one by one.")
    print("Decode hits (and experts read, prefill included, over what Belady's bound reads):\n")
    runs = all_policies(traces, percents)
    print_all(runs)
    print("Decode hits by session:\n")
    print_sessions(list(traces), runs)
    print(
        f"Decode hits of {DEFAULT_POLICY.name} on the second half of each session, by what it starts with:\n"
    )
    print_starts(traces, percents)
    print("What a call costs, 48 layers of 128 experts, top-8, half of them resident:\n")
    print_costs()


if __name__ == "__main__":
    main()
