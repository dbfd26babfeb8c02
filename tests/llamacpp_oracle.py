"""llama.cpp as an oracle: the prebuilt `xllamacpp` wheel on the CPU, token ids in, log-probabilities out.

Facts of xllamacpp (2026.10), found by trying, on which this file rests:

- Only llama.cpp's server is bound. It reports probabilities for generated tokens alone, so a text is scored by
  asking for one token after each of its prefixes; `cache_prompt` keeps the prefix, and each request evaluates
  one token: 0.7 ms for a target's log-probability, 4 ms with 512 candidates, 15-20 ms with all of 4,096 (JSON).
- Log-probabilities are those of the raw logits, before samplers and biases (float32; sums are off by up to 2e-5).
- A *generated* token that is not complete UTF-8 is withheld together with its list. So the generated token is
  forced, by a bias, to one that is: its list is complete, incomplete tokens included, and nothing is lost.
- A forced token's own log-probability is reported without any list: the cheap way to score a given text.
- `predicted_ms` starts after the first token: n tokens are n - 1 steps of decoding.
- `cache_ram_mib` (8 GiB by default) keeps old prompts outside of the model's context; it is switched off here.
- The model's weights may be repacked for the CPU while loading (`repack`), which costs the memory again.
"""

from __future__ import annotations

import json
import math
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xllamacpp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

_KV_TYPES = {"f16": "GGML_TYPE_F16", "f32": "GGML_TYPE_F32", "bf16": "GGML_TYPE_BF16"}
_FORCE = 1e4  # logits; far more than any model gives
_EVERY_TOKEN = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens, best first; all of the vocabulary when as many were asked for."""

    token_ids: NDArray[np.int64]  # [num_candidates]
    logprobs: NDArray[np.float64]  # [num_candidates], natural logarithms over the whole vocabulary

    def logprob(self, token_id: int) -> float:
        """A token's log-probability, -inf when it is no candidate."""
        found = self.logprobs[self.token_ids == token_id]
        return float(found[0]) if len(found) else -math.inf


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of a prompt's evaluation and of the decoding after it."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class LlamaCppOracle:
    """One GGUF loaded by llama.cpp on the CPU; a context manager."""

    def __init__(
        self,
        gguf: Path,
        *,
        context_length: int = 1024,
        num_threads: int = 1,
        kv_dtype: str = "f16",
        flash_attention: bool = False,
        repack: bool = True,
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx = context_length + 1  # the server wants room for the token it is asked for
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = num_threads
        params.cpuparams_batch.n_threads = num_threads
        params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, _KV_TYPES[kv_dtype])
        flash = "ENABLED" if flash_attention else "DISABLED"
        params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
        params.no_extra_bufts = not repack
        params.fit_params = False
        params.cache_ram_mib = 0
        params.warmup = False
        params.ui = False
        params.verbosity = -1
        self.gguf = gguf
        self._server = xllamacpp.Server(params)
        self._safe_id = next(
            entry["id"] for entry in self._tokenize("a b c", False, False) if isinstance(entry["piece"], str)
        )
        self.vocab_size = len(self.next_token([self._safe_id], _EVERY_TOKEN).token_ids)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """The text's token ids."""
        return [entry["id"] for entry in self._tokenize(text, add_special, parse_special)]

    def next_token(self, token_ids: Sequence[int], num_candidates: int) -> Candidates:
        """The distribution after `token_ids`; only what follows the previous call's prefix is evaluated."""
        entry = self._score(token_ids, self._safe_id, num_candidates)
        top = entry["top_logprobs"]
        return Candidates(
            np.array([candidate["id"] for candidate in top], np.int64),
            np.array([candidate["logprob"] for candidate in top], np.float64),
        )

    def teacher_forced(
        self, token_ids: Sequence[int], num_candidates: int, first: int = 0
    ) -> list[Candidates]:
        """The distributions after each of token_ids[first:], given all before it."""
        return [
            self.next_token(token_ids[: position + 1], num_candidates)
            for position in range(first, len(token_ids))
        ]

    def target_logprobs(self, token_ids: Sequence[int], first: int = 0) -> NDArray[np.float64]:
        """The log-probabilities of token_ids[first + 1:], each given all before it."""
        values = []
        for position in range(first + 1, len(token_ids)):
            prefix, target = token_ids[:position], token_ids[position]
            entry = self._score(prefix, target, 1, withheld_is_none=True)
            if entry is None:
                values.append(self.next_token(prefix, _EVERY_TOKEN).logprob(target))
            else:
                values.append(entry["logprob"])
        return np.array(values, np.float64)

    def greedy(
        self, prompt_ids: Sequence[int], num_tokens: int, num_candidates: int = 16
    ) -> list[Candidates]:
        """The distributions at `num_tokens` greedy steps; step i's choice is its first candidate.

        End tokens are chosen like any other and do not stop it.
        """
        past, steps = list(prompt_ids), []
        for _ in range(num_tokens):
            steps.append(self.next_token(past, num_candidates))
            past.append(int(steps[-1].token_ids[0]))
        return steps

    def perplexity(
        self, token_ids: Sequence[int], context_length: int, num_chunks: int | None = None
    ) -> float:
        """As llama-perplexity: whole chunks of `context_length`, the second half of each is scored."""
        chunks = len(token_ids) // context_length
        losses = [
            -self.target_logprobs(
                token_ids[chunk * context_length : (chunk + 1) * context_length], context_length // 2
            )
            for chunk in range(min(chunks, num_chunks or chunks))
        ]
        return float(np.exp(np.concatenate(losses).mean()))

    def speed(self, prompt_ids: Sequence[int], num_tokens: int) -> Speed:
        """Evaluate the prompt without any cache, then decode `num_tokens` greedily in one request."""
        answer = self._complete(
            prompt=list(prompt_ids), n_predict=num_tokens, ignore_eos=True, cache_prompt=False
        )
        timings = answer["timings"]
        return Speed(
            timings["prompt_n"] / timings["prompt_ms"] * 1e3,
            (timings["predicted_n"] - 1) / timings["predicted_ms"] * 1e3,
        )

    def close(self) -> None:
        """Free the model and its threads."""
        del self._server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _score(
        self, prefix: Sequence[int], forced_id: int, num_candidates: int, *, withheld_is_none: bool = False
    ) -> Any:
        """The report on the token after `prefix`, which is forced to be `forced_id`."""
        answer = self._complete(
            prompt=list(prefix),
            n_predict=1,
            n_probs=num_candidates,
            cache_prompt=True,
            logit_bias=[[forced_id, _FORCE]],
        )
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs is None:
            assert withheld_is_none, f"llama.cpp withheld the probabilities of forced token {forced_id}"
            return None
        (entry,) = logprobs["content"]
        assert entry["id"] == forced_id
        return entry

    def _complete(self, **request: Any) -> Any:
        answer = self._server.handle_completions({"temperature": 0.0, "samplers": ["temperature"], **request})
        if "choices" not in answer:
            raise RuntimeError(f"{self.gguf.name}: llama.cpp answered {answer}")
        return answer

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> Any:
        question = {
            "content": text,
            "add_special": add_special,
            "parse_special": parse_special,
            "with_pieces": True,
        }
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            data=json.dumps(question).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]
