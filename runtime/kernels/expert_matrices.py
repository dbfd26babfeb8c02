"""Where an expert's three matrices lie inside its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.manifest import ExpertPart


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One projection of every expert of a bank."""

    dtype: str
    shape: tuple[int, int]  # [out_features, in_features]
    offset: int  # bytes from the start of the slot
    nbytes: int

    def followed_by(self, other: ExpertMatrix) -> ExpertMatrix | None:
        """Both as one taller matrix, where the other's rows come right after these."""
        if (
            self.dtype != other.dtype
            or self.shape[1] != other.shape[1]
            or self.offset + self.nbytes != other.offset
        ):
            return None
        shape = (self.shape[0] + other.shape[0], self.shape[1])
        return ExpertMatrix(self.dtype, shape, self.offset, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """down(silu(gate(x)) * up(x)) of one expert."""

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix

    @classmethod
    def of(cls, parts: Sequence[ExpertPart]) -> ExpertMatrices:
        """Find gate, up and down among an expert's parts; a fused gate_up has the gate's rows first.

        UnsupportedError names the role that no kernel can use yet (biases, scales), or the shape that does not fit.
        """
        matrices: dict[str, ExpertMatrix] = {}
        for part in parts:
            if part.role == "gate_up":
                rows, columns = _matrix_shape(part)
                half = (rows // 2, columns)
                nbytes = part.nbytes // 2
                matrices["gate"] = ExpertMatrix(part.dtype, half, part.offset, nbytes)
                matrices["up"] = ExpertMatrix(part.dtype, half, part.offset + nbytes, nbytes)
            elif part.role in ("gate", "up", "down"):
                matrices[part.role] = ExpertMatrix(part.dtype, _matrix_shape(part), part.offset, part.nbytes)
            else:
                raise UnsupportedError(f"expert part {part.role} ({part.dtype}): no kernel uses it yet")
        missing = [role for role in ("gate", "up", "down") if role not in matrices]
        if missing:
            have = ", ".join(part.role for part in parts)
            raise UnsupportedError(
                f"expert without {' and '.join(missing)} (its parts are {have}): not a SwiGLU"
            )
        found = cls(**matrices)
        inner, hidden = found.down.shape[1], found.down.shape[0]
        for role in ("gate", "up"):
            if matrices[role].shape != (inner, hidden):
                raise UnsupportedError(
                    f"expert part {role} has shape {list(matrices[role].shape)}, "
                    f"expected {[inner, hidden]} beside down {list(found.down.shape)}"
                )
        return found

    @property
    def hidden_size(self) -> int:
        return self.down.shape[0]


def _matrix_shape(part: ExpertPart) -> tuple[int, int]:
    if len(part.shape) != 2:
        raise UnsupportedError(f"expert part {part.role} has shape {list(part.shape)}, expected a matrix")
    return part.shape[0], part.shape[1]
