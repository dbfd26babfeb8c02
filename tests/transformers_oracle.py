"""transformers as an oracle: a Hugging Face folder in float32 on the CPU, offline and quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Routing:
    """What one MoE layer's router said about each token of a text."""

    router_logits: NDArray[np.float32]  # [num_tokens, num_experts]
    topk_ids: NDArray[np.int64]  # [num_tokens, top_k], best first


class TransformersOracle:
    """One checkpoint folder as transformers understands it, its weights widened to float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # more would spin against whatever else runs
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [num_tokens, vocab] after each token."""
        return _numpy(self._forward(token_ids).logits[0])

    def hidden_states(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """[num_tokens, hidden] of the embedding, then after each layer; the last one is normalised."""
        states = self._forward(token_ids, output_hidden_states=True).hidden_states
        return [_numpy(state[0]) for state in states]

    def routing(self, token_ids: Sequence[int]) -> list[Routing]:
        """The routers' answers, one per MoE layer; none for a dense model."""
        if not hasattr(self.model.config, "output_router_logits"):
            return []
        answer = self._forward(token_ids, output_router_logits=True)
        top_k = self.model.config.num_experts_per_tok
        return [
            Routing(_numpy(logits), logits.topk(top_k, dim=-1).indices.numpy())
            for logits in answer.router_logits
        ]

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest continuation, computed without a KV cache."""
        past = list(prompt_ids)
        for _ in range(num_tokens):
            past.append(int(self._forward(past).logits[0, -1].argmax()))
        return past[len(prompt_ids) :]

    def _forward(self, token_ids: Sequence[int], **options: bool) -> Any:
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)]), use_cache=False, **options)


def _numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.float().numpy()
    return array
