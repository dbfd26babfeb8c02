"""Llama and Mixtral (GGUF calls both "llama"): RMSNorm, GQA, SwiGLU or eight experts of it.

llama.cpp's converter stores the rows of q and k so that rotated pairs are neighbours; they are put back into
HF's order at load, so that both containers compute the same bits.
"""

from runtime.families.family import Family

FAMILY = Family(architectures=("llama",), gguf_permutes_qk=True)
