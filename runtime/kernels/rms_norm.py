"""The normalisation that precedes a layer's products, so that kernels can do both in one go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, eq. 4)."""

    weight: Tensor  # float32 [hidden]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise float32 [..., hidden]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
