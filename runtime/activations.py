"""How much memory a forward pass needs besides weights and KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.attend import SCORES_NBYTES

if TYPE_CHECKING:
    from lmpack.manifest import Manifest
    from runtime.model_config import ModelConfig

_FLOAT_NBYTES = 4
_LIVE_COPIES = 2  # ggml keeps an operand beside its quantized copy, torch a result beside its operands


def activation_nbytes(manifest: Manifest, config: ModelConfig, context_length: int, chunk: int) -> int:
    """Upper estimate in bytes of what one chunk of tokens keeps alive at once, in its widest layer."""
    width = config.hidden_size
    for entry in manifest.layers:
        pairs = config.num_experts_per_tok
        expert_rows = sum(part.shape[0] for part in entry.parts if len(part.shape) == 2)
        # All pairs' outputs, and the inner rows of one expert that every token chose.
        width = max(width, (pairs + 1) * config.hidden_size + expert_rows)
    for info in manifest.shared:
        if ".ffn_" in info.name and len(info.shape) == 2:
            width = max(width, 3 * info.shape[0])
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    past = 2 * context_length * config.num_key_value_heads * config.head_dim  # keys and values as floats
    logits = 4 * config.vocab_size
    floats = _LIVE_COPIES * (chunk * (width + 3 * heads) + past + logits)
    scores = min(SCORES_NBYTES, _FLOAT_NBYTES * config.num_attention_heads * chunk * context_length)
    return _FLOAT_NBYTES * floats + 4 * scores
