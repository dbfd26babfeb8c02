"""Qwen2, Qwen3 and their MoE kin: RMSNorm, GQA, SwiGLU.

Qwen3 normalises each query and key head, Qwen2 has q/k/v biases instead; Qwen2-MoE adds a shared expert
behind a sigmoid gate. GGUF and safetensors hold the same values in the same order.
"""

from runtime.families.family import Family

FAMILY = Family(architectures=("qwen2", "qwen2moe", "qwen3", "qwen3moe"))
