"""Print how far our numbers agree with llama.cpp's and transformers', as one table.

    python -m benchmarks.agreement                        (two minutes)
    python -m benchmarks.agreement --positions 256 --prompts 8 --perplexity-chunks 4

The trained tiny model as GGUF in three types and as safetensors, and the tiny models of every family that runs.
What the columns mean is in tests/agreement.py; benchmarks/README.md says what is to be expected.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
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
from tests.gguf_agreement import compare_with_llamacpp
from tests.llamacpp_oracle import LlamaCppOracle
from tests.tiny_ggufs import write_tiny_gguf
from tests.transformers_oracle import TransformersOracle

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[1]
LLAMACPP_PERPLEXITY = {"BF16": 12.779, "Q8_0": 12.774, "Q4_K_M": 12.814}  # llama-perplexity, 512 context
PERPLEXITY_CONTEXT = 512
WINDOW = 256  # tokens
PROMPT_LENGTH = 64  # tokens; longer ones are cut


def main() -> None:
    """Parse the flags, measure, print each section as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=REPOSITORY.parent / "shared" / "models")
    parser.add_argument("--positions", type=int, default=1024, help="teacher-forced positions per model")
    parser.add_argument("--prompts", type=int, default=32, help="prompts that are continued greedily")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each continuation")
    parser.add_argument(
        "--perplexity-chunks",
        type=int,
        help="default: the whole text; else llama.cpp scores as many here and now",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default="auto", choices=("auto", "ggml", "torch"))
    parser.add_argument(
        "--sections", default="gguf,safetensors,families", help="which of the three to measure"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    arguments = parser.parse_args()
    sections = {"gguf": _gguf, "safetensors": _safetensors, "families": _families}
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sections.split(","):
            rows = sections[name](arguments, Path(folder))
            report[name] = rows
            if not arguments.json:
                _print_table(rows)
    if arguments.json:
        print(json.dumps(report, indent=1))


def _gguf(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The trained model's three GGUFs against llama.cpp."""
    tiny = arguments.models / "tiny"
    rows = []
    for dtype, published in LLAMACPP_PERPLEXITY.items():
        gguf, pack = _tiny_gguf(tiny, dtype, folder), folder / f"{dtype}.lmpack"
        convert(gguf, pack)
        with LlamaCppOracle(gguf) as oracle:
            token_ids = oracle.tokenize(_heldout(tiny))
            if arguments.perplexity_chunks is not None:  # what was published is for the whole text
                published = oracle.perplexity(token_ids, PERPLEXITY_CONTEXT, arguments.perplexity_chunks)
            prompts = [
                oracle.tokenize(prompt, parse_special=True)[:PROMPT_LENGTH]
                for prompt in _prompts(tiny / "prompts", arguments.prompts)
            ]
        found = compare_with_llamacpp(
            gguf,
            pack,
            split_windows(token_ids, arguments.positions, WINDOW),
            prompts,
            num_tokens=arguments.tokens,
            num_threads=arguments.threads,
            kernels=arguments.kernels,
        )
        with _load(arguments, pack) as engine:
            perplexity = measure_perplexity(
                engine,
                engine.tokenizer.encode(_heldout(tiny)),
                PERPLEXITY_CONTEXT,
                num_chunks=arguments.perplexity_chunks,
            ).perplexity
            kernels = engine.kernels.name
        rows.append(
            {
                "GGUF against llama.cpp": dtype,
                "kernels": kernels,
                **_describe(found.text),
                "continuations": found.num_prompts,
                "identical": found.num_identical,
                "near ties": found.num_near_ties,
                "largest gap": max((parting.gap for parting in found.partings), default=0.0),
                "perplexity": perplexity,
                "llama.cpp's": published,
                "difference %": (perplexity / published - 1) * 100,
            }
        )
    return rows


def _safetensors(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The trained model's safetensors against transformers, and against its own BF16 GGUF."""
    tiny = arguments.models / "tiny"
    pack, gguf_pack = folder / "hf.lmpack", folder / "bf16-again.lmpack"
    convert(tiny / "hf", pack)
    convert(_tiny_gguf(tiny, "BF16", folder), gguf_pack)
    with _load(arguments, pack) as engine:
        windows = split_windows(engine.tokenizer.encode(_heldout(tiny)), arguments.positions, WINDOW)
        logits, kernels = score_windows(engine, windows), engine.kernels.name
    with _load(arguments, gguf_pack) as engine:
        gguf_logits = score_windows(engine, windows)
    oracle = TransformersOracle(tiny / "hf")
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


def _families(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Each family's tiny model against the stored answers and against llama.cpp itself."""
    rows = []
    for family in RUNNABLE:
        source = arguments.models / "families" / family
        sequences = [answer.token_ids for answer in load_hf_answers(source)]
        pack = folder / f"{family}-hf.lmpack"
        convert(source / "hf", pack)
        for kernels in ("torch", "ggml"):
            found = compare_with_hf(source, pack, kernels=kernels)
            rows.append(
                {
                    "family": family,
                    "source": "safetensors",
                    "kernels": kernels,
                    "against": "transformers float32",
                    **_describe(found.text),
                    "experts": found.experts,
                    "identical": f"{found.num_greedy_identical}/{found.num_greedy}",
                    "largest gap": None,
                }
            )
        for gguf in sorted(source.glob("*.gguf")):
            dtype = gguf.stem.removeprefix(f"{family}-")
            pack = folder / f"{gguf.stem}.lmpack"
            convert(gguf, pack)
            live = compare_with_llamacpp(
                gguf,
                pack,
                sequences,
                sequences,
                num_tokens=24,
                num_candidates=512,
                kernels=arguments.kernels,
                kv_dtype="f32",
            )
            stored = compare_with_stored_llamacpp(source, pack, dtype, kernels=arguments.kernels)
            for against, agreement in (("llama.cpp", live.text), ("llama.cpp, stored", stored)):
                same = f"{live.num_identical}/{live.num_prompts}" if agreement is live.text else None
                gap = max((parting.gap for parting in live.partings), default=0.0) if same else None
                rows.append(
                    {
                        "family": family,
                        "source": f"GGUF {dtype}",
                        "kernels": arguments.kernels,
                        "against": against,
                        **_describe(agreement),
                        "experts": None,
                        "identical": same,
                        "largest gap": gap,
                    }
                )
    return rows


def _load(arguments: argparse.Namespace, pack: Path) -> Engine:
    return Engine.load(
        pack,
        context_length=PERPLEXITY_CONTEXT,
        num_threads=arguments.threads,
        kernels=arguments.kernels,
    )


def _tiny_gguf(tiny: Path, dtype: str, folder: Path) -> Path:
    if dtype == "Q4_K_M":
        return tiny / "tiny-Q4_K_M.gguf"
    path = folder / f"tiny-{dtype}.gguf"
    return path if path.exists() else write_tiny_gguf(tiny, dtype, path)


def _heldout(tiny: Path) -> str:
    return (tiny / "heldout.txt").read_bytes().decode("utf-8")


def _prompts(folder: Path, count: int) -> list[str]:
    """The first prompts of each kind of text in turn."""
    kinds = [path.read_text("utf-8").splitlines() for path in sorted(folder.glob("*.jsonl"))]
    lines = [line for group in zip(*kinds, strict=False) for line in group]
    return [json.loads(line)["prompt"] for line in lines[:count]]


def _describe(agreement: Agreement) -> dict[str, Any]:
    """The columns that every section has."""
    values = asdict(agreement)
    return {
        "positions": values["num_positions"],
        "top-1": values["top1"],
        "mean KL": values["mean_kl"],
        "max KL": values["max_kl"],
    }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One Markdown table."""
    cells = [list(rows[0]), *([_format(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def _format(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
