"""lmpack simulate: what each cache policy would have hit and read on a recorded trace.

Keys of `--json`:
    trace, architecture
    num_tokens          tokens of the trace; num_decoded of them ran alone, the others in chunks
    runs[]              one per capacity and policy, Belady's bound first, then by what is read:
        capacity        as given;  capacity_nbytes: null without --pack
        num_slots       experts resident at once
        policy
        hits, misses, evictions, hit_rate     of all fetches; a chunk fetches an expert once per layer
        decode_hits, decode_misses, decode_hit_rate     of single tokens alone
        nbytes_read     null without --pack
        reads_to_least  experts read over those that Belady's reads; null where that is none
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.cli.path_argument import ExistingPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import print_json
from lmpack.cli.text_input import Word
from lmpack.errors import ProfileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import Manifest
    from profiles.policy_choice import PolicyChoice
    from profiles.policy_comparison import ComparedRun
    from profiles.routing_shape import RoutingShape
    from profiles.routing_trace import RoutingTrace
    from profiles.slot_pool import SlotPool


@click.command(
    epilog="""Examples:

\b
  lmpack profile qwen3.lmpack --prompts prompts.txt -o p.safetensors --trace t.safetensors
  lmpack simulate t.safetensors
  lmpack simulate t.safetensors --policy lru,layer+lrfu --capacity 10%,4GiB --pack qwen3.lmpack
  lmpack simulate t.safetensors --profile p.safetensors --warm --json
"""
)
@click.argument("trace", type=ExistingPath(dir_okay=False, path_type=Path))
@click.option(
    "--policy",
    "policies",
    type=Word(),
    default="all",
    show_default=True,
    metavar="NAMES",
    help="With commas: lru, lfu, slru, lrfu, s3fifo; layer+lru shares the memory among the layers, "
    "pin+lru keeps the profile's most used experts.",
)
@click.option(
    "--capacity",
    "capacities",
    type=Word(),
    default="5%,10%,20%",
    show_default=True,
    metavar="SIZES",
    help="With commas: shares of the experts that fit in memory; with --pack also their bytes, such as 4GiB. It is "
    "room for experts alone; a run's --ram holds everything else, too, and --stats says what it leaves for experts.",
)
@click.option(
    "--pack",
    type=PackPath(),
    help="The trace's model: counts bytes, and shares slots among its layers as a run does.",
)
@click.option(
    "--profile",
    type=ExistingPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Whose most used experts are pinned by pin+ policies and are there at the start with --warm.",
)
@click.option("--warm", is_flag=True, help="Start with the profile's most used experts in memory.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def command(
    trace: Path,
    policies: str,
    capacities: str,
    pack: str | None,
    profile: Path | None,
    warm: bool,
    as_json: bool,
) -> None:
    """Replay TRACE, from lmpack profile --trace, through cache policies of several sizes.

    The policies are those that runs use: a simulated hit is a hit of the run. Belady's bound, which knows the future
    and which none can beat, stands beside them.
    """
    from profiles.policy_comparison import compare_policies
    from profiles.routing_profile import RoutingProfile
    from profiles.routing_trace import RoutingTrace

    if warm and profile is None:
        raise UsageError("--warm needs --profile FILE, whose most used experts are there at the start")
    recorded = RoutingTrace.load(trace)
    most_used: list[ExpertKey] = []
    if profile is not None:
        loaded = RoutingProfile.load(profile)
        loaded.require_fit(
            recorded.origin.architecture, recorded.shape, f"{profile} is of another model than {trace}"
        )
        most_used = loaded.most_used()
    choices = _choices(policies, has_profile=profile is not None)
    memories = _memories(capacities, recorded, pack)
    compared: list[tuple[_Memory, list[ComparedRun]]] = []
    with progress_bar(len(memories) * (1 + len(choices)), unit="run", description="simulate") as progress:
        for memory in memories:
            compared.append((memory, []))
            starts_with = most_used if warm else []
            for run in compare_policies(recorded, memory.pools, choices, most_used, starts_with):
                compared[-1][1].append(run)
                progress(1)
    num_decoded = int((np.diff(recorded.chunk_offsets) == 1).sum())
    rows = [row for memory, runs in compared for row in _rows(memory, runs)]
    if as_json:
        print_json(
            {
                "trace": str(trace),
                "architecture": recorded.origin.architecture,
                "num_tokens": recorded.num_tokens,
                "num_decoded": num_decoded,
                "runs": rows,
            }
        )
        return
    shape = recorded.shape
    click.echo(
        f"{trace.name}: {recorded.origin.architecture}, {sum(shape.num_experts)} experts in {shape.num_layers} "
        f"layers, {shape.top_k} a token; {recorded.num_tokens} tokens, {num_decoded} of them one by one"
    )
    click.echo(_table(rows))


@dataclass(frozen=True, slots=True)
class _Memory:
    """Room for some of the experts."""

    capacity: str  # as given
    pools: tuple[SlotPool, ...]
    strides: tuple[int, ...] | None  # bytes of a slot of each pool; None without a pack


def _choices(names: str, *, has_profile: bool) -> list[PolicyChoice]:
    from profiles.policy_choice import ORDERS, PolicyChoice

    if names == "all":
        return [
            PolicyChoice(order, per_layer, pinned)
            for pinned in ([False, True] if has_profile else [False])
            for per_layer in (False, True)
            for order in ORDERS
        ]
    choices = [PolicyChoice.parse(name.strip()) for name in names.split(",")]
    for choice in choices:
        if choice.pinned and not has_profile:
            raise UsageError(f"policy {choice.name} needs --profile FILE, whose most used experts it pins")
    return choices


def _memories(capacities: str, trace: RoutingTrace, pack: str | None) -> list[_Memory]:
    texts = [text.strip() for text in capacities.split(",")]
    if pack is None:
        return [_memory_of_equals(text, trace.shape) for text in texts]
    from lmpack.pack import Pack
    from profiles.routing_shape import RoutingShape

    manifest = Pack.open(Path(pack)).manifest
    differences = RoutingShape.of_manifest(manifest).differences(trace.shape)
    if differences:
        raise ProfileError(f"the trace is of another model than {pack}: {'; '.join(differences)}")
    return [_memory_of_pack(text, manifest, trace.shape.top_k) for text in texts]


def _memory_of_equals(text: str, shape: RoutingShape) -> _Memory:
    """One pool for experts of one unknown size."""
    from profiles.slot_pool import SlotPool

    if not text.endswith("%"):
        raise UsageError(
            f"capacity {text!r}: bytes need --pack, which knows how large an expert is; or give 10%"
        )
    num_slots = parse_byte_size(text, total=sum(shape.num_experts))
    if num_slots < shape.top_k:
        raise UsageError(
            f"capacity {text}: {num_slots} of {sum(shape.num_experts)} experts; a token needs {shape.top_k} at once"
        )
    return _Memory(text, (SlotPool(num_slots, shape.layers),), None)


def _memory_of_pack(text: str, manifest: Manifest, top_k: int) -> _Memory:
    """The pools that a run with so many bytes for experts has."""
    from profiles.slot_pool import SlotPool
    from runtime.expert_layout import expert_layouts
    from runtime.memory_budget import Memory, MemoryBudget

    all_nbytes = sum(entry.num_experts * entry.stride for entry in manifest.layers)
    nbytes = parse_byte_size(text, total=all_nbytes)
    smallest = sum(min(top_k, layout.num_experts) * layout.stride for layout in expert_layouts(manifest))
    if nbytes < smallest:
        raise UsageError(
            f"capacity {text}: a token needs {top_k} experts at once of each kind of layer; use {smallest} bytes or more"
        )
    budget = MemoryBudget.plan(
        manifest,
        ram_nbytes=nbytes,
        dense_nbytes=0,
        kv_nbytes=0,
        buffers_nbytes=0,
        top_k=top_k,
        memory=Memory("memory", "--capacity", lambda: 0, lambda: nbytes),
    )
    pools = tuple(
        SlotPool(num_slots, layout.layers)
        for layout, num_slots in zip(budget.layouts, budget.slots, strict=True)
    )
    return _Memory(text, pools, tuple(layout.stride for layout in budget.layouts))


def _rows(memory: _Memory, runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The runs of one capacity as in --json: Belady's, then those that read least."""
    least = runs[0].total.misses
    rows = [
        {
            "capacity": memory.capacity,
            "capacity_nbytes": _nbytes(memory, [pool.num_slots for pool in memory.pools]),
            "num_slots": sum(pool.num_slots for pool in memory.pools),
            "policy": run.policy,
            **asdict(run.total),
            "hit_rate": run.total.hit_rate,
            "decode_hits": run.decode.hits,
            "decode_misses": run.decode.misses,
            "decode_hit_rate": run.decode.hit_rate,
            "nbytes_read": _nbytes(memory, [pool.total.misses for pool in run.pools]),
            "reads_to_least": run.total.misses / least if least else None,
        }
        for run in runs
    ]
    return rows[:1] + sorted(rows[1:], key=lambda row: row["misses"])


def _nbytes(memory: _Memory, experts: Sequence[int]) -> int | None:
    """What so many experts of each pool take."""
    if memory.strides is None:
        return None
    return sum(number * stride for number, stride in zip(experts, memory.strides, strict=True))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    width = max(len(row["policy"]) for row in rows)
    lines = [f"capacity  experts  {'policy':{width}}     hits  decode hits  evicted      read  of least"]
    for row in rows:
        nbytes = row["nbytes_read"]
        read = format_nbytes(nbytes) if nbytes is not None else str(row["misses"])
        ratio = row["reads_to_least"]
        lines.append(
            f"{row['capacity']:>8}  {row['num_slots']:7}  {row['policy']:{width}}  {row['hit_rate']:7.1%}"
            f"  {row['decode_hit_rate']:11.1%}  {row['evictions']:7}  {read:>8}"
            f"  {f'{ratio:.2f} x' if ratio is not None else '-':>8}"
        )
    return "\n".join(lines)
