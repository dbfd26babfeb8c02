"""Print how far our numbers agree with llama.cpp's and transformers', as one table a section.

    python -m benchmarks.agreement                        (three minutes)
    python -m benchmarks.agreement --sections gguf --positions 256 --prompts 8

The trained tiny model as GGUF in three types and as safetensors, and the tiny models of every family that runs.
What the columns mean is in benchmarks/README.md, and why in tests/agreement.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.conversion import convert
from runtime.engine import Engine
from runtime.perplexity import measure_perplexity
from tests.agreement import Agreement
from tests.engine_answers import score_windows, split_windows
from tests.family_agreement import compare_with_hf, compare_with_stored_llamacpp
from tests.family_reference import RUNNABLE, load_hf_answers
from tests.gguf_agreement import GgufAgreement, Task, ask_llamacpp, compare_with_llamacpp
from tests.llamacpp_oracle import LlamaCppOracle
from tests.tiny_ggufs import write_tiny_gguf
from tests.transformers_oracle import TransformersOracle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).parents[1]
LLAMACPP_PERPLEXITY = {"BF16": 12.779, "Q8_0": 12.774, "Q4_K_M": 12.814}  # llama-perplexity, 512 context
PERPLEXITY_CONTEXT = 512  # tokens
WINDOW = 256  # tokens
PROMPT_LENGTH = 64  # tokens; longer ones are cut

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Bench:
    """The flags, and a folder for what is made on the way."""

    arguments: argparse.Namespace
    folder: Path

    @property
    def tiny(self) -> Path:
        """The trained model's folder."""
        path: Path = self.arguments.models / "tiny"
        return path

    def heldout(self) -> str:
        """Text that the trained model has not seen."""
        return (self.tiny / "heldout.txt").read_bytes().decode("utf-8")

    def tiny_gguf(self, dtype: str) -> Path:
        """The trained model as GGUF, written when asked for first."""
        if dtype == "Q4_K_M":
            return self.tiny / "tiny-Q4_K_M.gguf"
        path = self.folder / f"tiny-{dtype}.gguf"
        return path if path.exists() else write_tiny_gguf(self.tiny, dtype, path)

    def pack(self, source: Path) -> Path:
        """The source as a pack, converted when asked for first."""
        path = self.folder / f"{source.parent.name}-{source.name}.lmpack"
        return path if path.exists() else convert(source, path).path

    def load(self, pack: Path) -> Engine:
        """The engine with the flags' threads and kernels."""
        return Engine.load(
            pack,
            context_length=PERPLEXITY_CONTEXT,
            num_threads=self.arguments.threads,
            kernels=self.arguments.kernels,
        )


def main() -> None:
    """Parse the flags, measure, print each section as it is done."""
    sections = {
        "gguf": compare_ggufs,
        "perplexity": compare_perplexity,
        "safetensors": compare_safetensors,
        "families": compare_families,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=REPOSITORY.parent / "shared" / "models")
    parser.add_argument("--positions", type=int, default=1024, help="teacher-forced positions per model")
    parser.add_argument("--prompts", type=int, default=32, help="prompts that are continued greedily")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each continuation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default="auto", choices=("auto", "ggml", "torch"))
    parser.add_argument("--sections", nargs="+", default=list(sections), choices=list(sections))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    arguments = parser.parse_args()
    report: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sections:
            report[name] = sections[name](Bench(arguments, Path(folder)))
            if not arguments.json:
                print_table(report[name])
    if arguments.json:
        print(json.dumps(report, indent=1))


def compare_ggufs(bench: Bench) -> Rows:
    """The trained model's three GGUFs against llama.cpp."""
    rows = []
    for dtype in LLAMACPP_PERPLEXITY:
        gguf = bench.tiny_gguf(dtype)
        with LlamaCppOracle(gguf) as oracle:
            windows = split_windows(oracle.tokenize(bench.heldout()), bench.arguments.positions, WINDOW)
            prompts = [
                oracle.tokenize(prompt, parse_special=True)[:PROMPT_LENGTH]
                for prompt in _prompts(bench.tiny / "prompts", bench.arguments.prompts)
            ]
        task = Task(windows, prompts, num_tokens=bench.arguments.tokens)
        for compared, kv_dtype, found in _compare_gguf(bench, gguf, task):
            rows.append(
                {
                    "GGUF": dtype,
                    "compared with llama.cpp": compared,
                    "KV": kv_dtype,
                    **_describe(found.text),
                    "prompts": found.num_prompts,
                    "identical": found.num_identical,
                    "near ties": found.num_near_ties,
                    "largest gap": _largest_gap(found),
                }
            )
    return rows


def _compare_gguf(bench: Bench, gguf: Path, task: Task) -> Iterator[tuple[str, str, GgufAgreement]]:
    """Ours over both kinds of KV cache, and llama.cpp with another attention, to see what rounding alone does."""
    threads, kernels, pack = bench.arguments.threads, bench.arguments.kernels, bench.pack(gguf)
    for kv_dtype in ("f32", "f16"):
        reference = ask_llamacpp(gguf, task, kv_dtype=kv_dtype, num_threads=threads)
        yield (
            "lmpack",
            kv_dtype,
            compare_with_llamacpp(
                reference, pack, task, kv_dtype=kv_dtype, num_threads=threads, kernels=kernels
            ),
        )
    flash = ask_llamacpp(gguf, task, kv_dtype="f16", num_threads=threads, flash_attention=True)
    yield (
        "itself, flash attention",
        "f16",
        GgufAgreement.of(reference, flash.as_logits(), flash.token_ids()),
    )


def compare_perplexity(bench: Bench) -> Rows:
    """The trained model's three GGUFs on the held-out text, next to llama.cpp's figures."""
    rows = []
    for dtype, expected in LLAMACPP_PERPLEXITY.items():
        with bench.load(bench.pack(bench.tiny_gguf(dtype))) as engine:
            token_ids = engine.tokenizer.encode(bench.heldout())
            found = measure_perplexity(engine, token_ids, PERPLEXITY_CONTEXT).perplexity
            rows.append(
                {
                    "GGUF": dtype,
                    "kernels": engine.kernels.name,
                    "perplexity": found,
                    "llama.cpp's": expected,
                    "difference %": (found / expected - 1) * 100,
                }
            )
    return rows


def compare_safetensors(bench: Bench) -> Rows:
    """The trained model's safetensors against transformers, and against its own BF16 GGUF."""
    with bench.load(bench.pack(bench.tiny / "hf")) as engine:
        windows = split_windows(engine.tokenizer.encode(bench.heldout()), bench.arguments.positions, WINDOW)
        logits, kernels = score_windows(engine, windows), engine.kernels.name
    with bench.load(bench.pack(bench.tiny_gguf("BF16"))) as engine:
        gguf_logits = score_windows(engine, windows)
    oracle = TransformersOracle(bench.tiny / "hf")
    expected = np.concatenate([oracle.logits(window) for window in windows])
    return [
        {
            "safetensors against": name,
            "kernels": kernels,
            **_describe(Agreement.of_logits(reference, logits)),
            "max logit difference": float(np.abs(reference - logits).max()),
        }
        for name, reference in (("transformers float32", expected), ("our BF16 GGUF pack", gguf_logits))
    ]


def compare_families(bench: Bench) -> Rows:
    """Each family's tiny model against the stored answers and against llama.cpp itself."""
    rows: Rows = []
    for family in RUNNABLE:
        source = bench.arguments.models / "families" / family
        for kernels in ("torch", "ggml"):
            hf = compare_with_hf(source, bench.pack(source / "hf"), kernels=kernels)
            identical = f"{hf.num_greedy_identical}/{hf.num_greedy}"
            rows.append(
                _family_row(
                    family, "safetensors", kernels, "transformers float32", hf.text, hf.experts, identical
                )
            )
        sequences = [answer.token_ids for answer in load_hf_answers(source)]
        task = Task(sequences, sequences, num_tokens=24)
        kernels = bench.arguments.kernels
        for gguf in sorted(source.glob("*.gguf")):
            pack, dtype = bench.pack(gguf), gguf.stem.removeprefix(f"{family}-")
            reference = ask_llamacpp(gguf, task, kv_dtype="f32")
            live = compare_with_llamacpp(reference, pack, task, kv_dtype="f32", kernels=kernels)
            stored = compare_with_stored_llamacpp(source, pack, dtype, kernels=kernels)
            identical, gap = f"{live.num_identical}/{live.num_prompts}", _largest_gap(live)
            name = f"GGUF {dtype}"
            rows += [
                _family_row(family, name, kernels, "llama.cpp, f32 KV", live.text, None, identical, gap),
                _family_row(family, name, kernels, "llama.cpp, stored, f16 KV", stored),
            ]
    return rows


def _family_row(
    family: str,
    source: str,
    kernels: str,
    against: str,
    agreement: Agreement,
    experts: float | None = None,
    identical: str | None = None,
    gap: float | None = None,
) -> dict[str, Any]:
    return {
        "family": family,
        "source": source,
        "kernels": kernels,
        "against": against,
        **_describe(agreement),
        "same experts": experts,
        "identical": identical,
        "largest gap": gap,
    }


def _describe(agreement: Agreement) -> dict[str, Any]:
    """The columns that most sections have."""
    return {
        "positions": agreement.num_positions,
        "top-1": agreement.top1,
        "mean KL": agreement.mean_kl,
        "max KL": agreement.max_kl,
    }


def _largest_gap(found: GgufAgreement) -> float:
    return max((parting.gap for parting in found.partings), default=0.0)


def _prompts(folder: Path, count: int) -> list[str]:
    """The first prompts of each kind of text in turn."""
    kinds = [path.read_text("utf-8").splitlines() for path in sorted(folder.glob("*.jsonl"))]
    lines = [line for group in zip(*kinds, strict=False) for line in group]
    return [json.loads(line)["prompt"] for line in lines[:count]]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One Markdown table, a column per key."""
    cells = [list(rows[0]), *([_format(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def _format(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


if __name__ == "__main__":
    main()
