"""Heat map: a profile's counts at a glance, one row per layer, one block per expert or few neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from profiles.routing_profile import RoutingProfile

BLOCKS = "▁▂▃▄▅▆▇█"
NEVER = "·"


def draw_heat_map(profile: RoutingProfile, columns: int) -> str:
    """Draw expert 0 at the left; the tallest block is the layer's busiest, `·` was never chosen.

    `columns` is the width of the terminal; where experts outnumber it, a block is the mean of neighbours.
    """
    lines = []
    for index, layer in enumerate(profile.shape.layers):
        counts = profile.layer_counts(index)
        groups = np.array_split(counts, min(len(counts), max(8, columns - 10)))
        heats = [float(group.mean()) for group in groups]
        tallest = max(heats)
        blocks = [BLOCKS[min(int(8 * heat / tallest), 7)] if heat else NEVER for heat in heats]
        lines.append(f"L{layer:03d}  {''.join(blocks)}")
    return "\n".join(lines)
