"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over all experts, then the top k (Shazeer et al. 2017; Mixtral renormalises, OLMoE does not)."""

    top_k: int
    norm_topk_prob: bool

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """[n, num_experts] -> topk_ids int64 [n, top_k], topk_weights float32 [n, top_k], best first."""
        topk_weights, topk_ids = router_logits.softmax(-1).topk(self.top_k, -1)
        if self.norm_topk_prob:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return topk_ids, topk_weights
