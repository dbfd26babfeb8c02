"""python -m fuzz TARGET [libFuzzer's options]: atheris looks for an input that breaks a reader."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import atheris

with atheris.instrument_imports(include=["converters", "lmpack"]):
    from fuzz.target import TARGETS

from fuzz.json_mutation import mutate_json

CORPUS = Path("build") / "fuzz"


def main() -> None:
    """Write the seeds to build/fuzz/TARGET, and fuzz from what lies there until libFuzzer's options say stop."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m fuzz {'|'.join(TARGETS)} [-max_total_time=SECONDS ...]")
    name, *options = sys.argv[1:]
    target, corpus = TARGETS[name], CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)

    def mutate(raw: bytes, max_nbytes: int, seed: int) -> bytes:
        random = Random(seed)
        try:
            changed = mutate_json(raw, random) if target.is_json and random.random() < 0.7 else b""
        except (ValueError, RecursionError):  # not JSON any more
            changed = b""
        if 0 < len(changed) <= max_nbytes:
            return changed
        found: bytes = atheris.Mutate(raw, max_nbytes)
        return found

    folder = Path(mkdtemp(prefix=f"{name}-files-", dir=CORPUS))  # stays: libFuzzer ends the process at once
    arguments = [sys.argv[0], str(corpus), f"-artifact_prefix={CORPUS}/{name}-", *options]
    atheris.Setup(arguments, lambda raw: target(raw, folder), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
