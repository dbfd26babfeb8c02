"""OLMoE: Llama's layer with 64 experts, and RMSNorm over the whole q and k projections before the heads."""

from runtime.families.family import Family

FAMILY = Family(architectures=("olmoe",))
