"""HF names: from transformers' tensor names to GGUF's, with the gguf package's own table.

The architecture's table is used when the package knows the architecture; a name without an entry keeps its HF form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SUFFIXES = (".weight", ".bias")
# multimodal checkpoints put the text model under one of these
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.text_model.")


def canonical_names(names: Iterable[str], architecture: str, num_hidden_layers: int) -> dict[str, str]:
    """Map each HF tensor name to GGUF's, or to itself when there is none or another tensor has it already."""
    import gguf

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        return {name: name for name in names}
    table = gguf.get_tensor_name_map(known[architecture], num_hidden_layers)
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        spellings = _spellings(name)
        mapped = (table.get_name(spelling, try_suffixes=_SUFFIXES) for spelling in spellings)
        canonical = next((candidate for candidate in mapped if candidate), name)
        found[name] = name if canonical in taken else canonical
        taken.add(found[name])
    return found


def _spellings(name: str) -> list[str]:
    """List the ways the table may know a name: as it is, without a text prefix, with the bias split off."""
    spellings = [name]
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            spellings.append("model." + name.removeprefix(prefix))
            break
    # converters rename router biases so: "gate.e_score_correction_bias" -> "gate.e_score_correction.bias"
    spellings += [
        spelling.removesuffix("_bias") + ".bias" for spelling in spellings if spelling.endswith("_bias")
    ]
    return spellings
