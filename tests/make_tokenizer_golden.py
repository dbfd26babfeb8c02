"""Makes tests/data/tokenizer_golden.json: two small vocabularies, and what llama.cpp makes of the hard strings.

Run it when the strings or the version of xllamacpp change: python -m tests.make_tokenizer_golden
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from runtime.pre_tokenizer import PRE_TOKENIZERS
from tests.llamacpp_vocabulary import LlamaCppVocabulary
from tests.tiny_vocabularies import BPE_SPECIAL, DATA, bpe_keys, hard_strings, sentencepiece_keys, write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

STORED = ("gpt-2", "qwen2", "llama-bpe")  # whole answers; of the others only a digest
NUM_BPE_TOKENS = 2500
NUM_PIECES = 900
_MIXED = [*"123abBA!.~\t", " ", "  ", "\n", "\r\n", "'s", "'T", "é", "漢", "\u0301", "\u00a0", "क", "ा", "़"]


def training_texts() -> Iterator[str]:
    """Prose, the hard strings, and mixes of characters whose borders pre-tokenizers care about."""
    prose = (DATA.parents[1] / "lmpack" / "demo" / "heldout.txt").read_text(encoding="utf-8")[:30_000]
    yield from (prose[i : i + 200] for i in range(0, len(prose), 200))
    yield from (text[:120] for text in hard_strings() for _ in range(3))
    choose = random.Random(0).choice
    yield from ("".join(choose(_MIXED) for _ in range(60)) for _ in range(1500))


def train_bpe() -> list[str]:
    """Merges that cross every border: the whole text is one word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    special = {text for text, _ in BPE_SPECIAL}
    # the hard strings hold texts of special tokens, which a vocabulary has once
    return [" ".join(pair) for pair in pairs if not special & {*pair, "".join(pair)}]


def choose_pieces() -> tuple[list[str], list[float]]:
    """Frequent pieces of one to six characters and runs of one character; scores come in groups of equals."""
    counts: Counter[str] = Counter()
    for text in training_texts():
        escaped = text.replace(" ", "\u2581").replace("\0", "")
        for length in range(1, 7):
            counts.update(escaped[i : i + length] for i in range(len(escaped) - length + 1))
    pieces = [
        piece for piece, _ in sorted(counts.items(), key=lambda item: (-item[1] * len(item[0]), item[0]))
    ]
    runs = [char * length for char in ("a", "\u2581", "=", "1", "\n") for length in range(1, 10)]
    start = sentencepiece_keys([], [])["tokens"]
    chosen = [piece for piece in dict.fromkeys(runs + pieces[:NUM_PIECES]) if piece not in start]
    return chosen, [-float(i // 5) for i in range(len(chosen))]


def answers(path: Path) -> list[list[list[int]]]:
    """For each hard string: its ids as plain text, and with everything special."""
    with LlamaCppVocabulary(path) as vocabulary:
        return [
            [
                vocabulary.tokenize(text, add_special=special, parse_special=special)
                for special in (False, True)
            ]
            for text in hard_strings()
        ]


def digest(found: list[list[list[int]]]) -> str:
    """What is kept of answers that are not stored."""
    return sha256(json.dumps(found).encode()).hexdigest()


def main() -> None:
    """Train, ask, and write the file."""
    merges = train_bpe()
    pieces, scores = choose_pieces()
    stored, digests = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for pre in PRE_TOKENIZERS:
            found = answers(write_gguf(path, bpe_keys(merges, pre), with_weights=True))
            digests[pre] = digest(found)
            if pre in STORED:
                stored[pre] = found
        keys = sentencepiece_keys(pieces, scores)
        stored["sentencepiece"] = answers(write_gguf(path, keys, with_weights=True))
    document = {"merges": merges, "pieces": pieces, "scores": scores, "answers": stored, "digests": digests}
    written = json.dumps(document, separators=(",", ":"))
    (DATA / "tokenizer_golden.json").write_text(written + "\n")
    print(f"{len(written)} bytes, {len(merges)} merges, {len(pieces)} pieces, {len(digests)} pre-tokenizers")


if __name__ == "__main__":
    main()
