"""Read the experts of gpt-oss, which are stored in 4 bits (MXFP4), as bfloat16.

A matrix [X, out, in] of all experts is two tensors: `name_blocks` uint8 [X, out, in / 32, 16], two
numbers in a byte, the first in its low half, and `name_scales` uint8 [X, out, in / 32]. With e2m1
the numbers of 4 bits (OCP Microscaling Formats 1.0, section 5.3.3) and s a scale,

    value = e2m1 * 2^(s - 127)

which bfloat16 holds exactly. The matrix is returned in transformers' layout, [X, in, out].
"""

from typing import Any

import ml_dtypes
import numpy as np

from dms_jax.checkpoint.weights import Tensors
from dms_jax.errors import CheckpointError, plain

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_POSITIVE, *(-each for each in _POSITIVE)], np.float32)


class Unpacked(Tensors):
    """Tensors by name, some of them packed in MXFP4.

    Args:
        packed: the stored tensors.

    Raises:
        CheckpointError: blocks have missing or mismatched scales.
    """

    def __init__(self, packed: Tensors):
        self.config_name, self._packed = packed.config_name, packed
        self.shapes, self.dtypes = dict(packed.shapes), dict(packed.dtypes)
        for blocks in [name for name in packed.shapes if name.endswith(BLOCKS)]:
            name = blocks.removesuffix(BLOCKS)
            scales, shape = name + SCALES, packed.shapes[blocks]
            if (
                len(shape) != 4
                or shape[-1] != BLOCK // 2
                or shape[:-1] != packed.shapes.get(scales)
            ):
                raise CheckpointError(
                    f"{plain(blocks)} {list(shape)} and {plain(scales)} "
                    f"{plain(packed.shapes.get(scales, 'missing'))} are not matrices in MXFP4: "
                    "download the file again"
                )
            for each in (blocks, scales):
                del self.shapes[each], self.dtypes[each]
            self.shapes[name] = (shape[0], shape[2] * BLOCK, shape[1])
            self.dtypes[name] = np.dtype(ml_dtypes.bfloat16)

    def read(self, name: str, index: tuple[slice, ...] = (), dtype: Any = None) -> np.ndarray:
        if name in self._packed.shapes:
            return self._packed.read(name, index, dtype)
        experts, inputs, outputs = index or (slice(None),) * 3
        rows = (experts, outputs, slice(None))
        blocks = self._packed.read(name + BLOCKS, (*rows, slice(None)))
        scales = self._packed.read(name + SCALES, rows)
        out = np.empty((*blocks.shape[:2], self.shapes[name][1]), ml_dtypes.bfloat16)
        for matrix, own, scale in zip(out, blocks, scales, strict=True):  # one expert at a time
            numbers = np.stack([_E2M1[own & 15], _E2M1[own >> 4]], axis=-1)
            numbers = numbers.reshape(*scale.shape, BLOCK)
            exponents = scale.astype(np.int32)[..., None] - 127
            matrix[:] = np.ldexp(numbers, exponents).reshape(matrix.shape)
        out = np.swapaxes(out, 1, 2)[:, inputs]
        return out if dtype is None else out.astype(dtype, copy=False)

    def file_name(self, name: str) -> str:
        return self._packed.file_name(self._stored(name))

    def stored_name(self, name: str) -> str:
        return self._packed.stored_name(self._stored(name))

    def _stored(self, name: str) -> str:
        packed = name in self.shapes and name not in self._packed.shapes
        return name + BLOCKS if packed else name
