"""RepeatedConversions: what a manifest says was done to tensors, to be done once more to some of their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.quantization import TensorConversion, imatrix_name
from converters.quantizer import FLOAT_DTYPES, LIBRARY, QUANTIZED_DTYPES, load_quantizer
from lmpack.converted_tensor import part_name, shared_name
from lmpack.errors import PackError

if TYPE_CHECKING:
    from converters.importance_matrix import ImportanceMatrix
    from lmpack.manifest import ExpertPart, LayerEntry, Manifest, TensorInfo


class RepeatedConversions:
    """The conversions of one manifest's tensors, made when they are asked for."""

    def __init__(self, manifest: Manifest, imatrix: ImportanceMatrix | None) -> None:
        """Know what was converted, and the importance matrix that may have been used."""
        self._recorded = {entry.tensor: entry for entry in manifest.converted}
        self._imatrix = imatrix
        self._made: dict[str, TensorConversion] = {}

    def part(self, layer: LayerEntry, part: ExpertPart) -> TensorConversion | None:
        """Return the conversion of a part of a layer's experts; None when it was copied.

        Raises PackError when it cannot be repeated, UnsupportedError when there is no ggml here.
        """
        name = part_name(layer.layer, part.role)
        return self._conversion(name, imatrix_name(layer.layer, part.role), part, layer.num_experts)

    def shared(self, tensor: TensorInfo) -> TensorConversion | None:
        """Return the conversion of a shared tensor; None, and raises, as part() does."""
        return self._conversion(shared_name(tensor.name), tensor.name, tensor, 1)

    def _conversion(
        self, name: str, gguf_name: str, tensor: ExpertPart | TensorInfo, num_matrices: int
    ) -> TensorConversion | None:
        recorded = self._recorded.get(name)
        if recorded is None:
            return None
        if name in self._made:
            return self._made[name]
        quantizer, imatrix = load_quantizer(), self._imatrix
        is_known = (
            recorded.library == LIBRARY
            and recorded.source_dtype in FLOAT_DTYPES
            and tensor.dtype in (*QUANTIZED_DTYPES, *FLOAT_DTYPES)
            and (recorded.imatrix_sha256 or not quantizer.requires_imatrix(tensor.dtype))
        )
        if not is_known or len(tensor.shape) != 2:
            raise PackError(
                f"{name} was made {tensor.dtype} from {recorded.source_dtype} by {recorded.library} "
                f"{recorded.library_version}, which cannot be repeated here; name another copy of the pack"
            )
        importance = None
        if recorded.imatrix_sha256:
            if imatrix is None or imatrix.sha256 != recorded.imatrix_sha256:
                found = "" if imatrix is None else f", and {imatrix.path} is {imatrix.sha256[:12]}…"
                raise PackError(
                    f"{name} was quantized with the importance matrix {recorded.imatrix_sha256[:12]}… (SHA-256){found}; "
                    "name its file with --imatrix, or another copy of the pack"
                )
            importance = imatrix.of(gguf_name, num_matrices, tensor.shape[-1])
            if importance is None:
                raise PackError(f"{imatrix.path} has no weights for {name}; name another copy of the pack")
        made = TensorConversion(
            name, recorded.source_dtype, tensor.dtype, tensor.shape[-1], importance, quantizer
        )
        self._made[name] = made
        return made
