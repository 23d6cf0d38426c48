"""The cases that each decode attention kernel serves, listed independently of the kernels.

Tests follow this table and never ask a kernel; otherwise a kernel that wrongly refused a case would
silently lose its test.
"""

from pallas_kernels.decode.cases import DecodeCase

# Besides pages of the queries' dtype; never float64 and the shapes of toy models.
_NO_KERNEL = {"float64": "float64", "head_dim8": "", "page5": ""}
_FLOAT32 = "multiplies 16-bit numbers, not float32"
_REFUSED = {
    "mosaic_gpu": {
        "float32": _FLOAT32,
        "float32_group8_head_dim96": _FLOAT32,
        # 16 scales are too few for the copy engine; only a card reports the misaligned address.
        "float8_page16": "copies scales for float8 pages of at least 32 tokens",
    },
    "mosaic_mma": {
        "float32": _FLOAT32,
        "float32_group8_head_dim96": _FLOAT32,
    },
    "mosaic_tpu": {"float16": "serves bfloat16 and float32, not float16"},
}


def refusal(
    case: DecodeCase, implementation: str, capability: tuple[int, int] = (9, 0)
) -> str | None:
    """Words of the refusal of a case, or None if it is served.

    Args:
      case: one of `CONTRACT` or `XLA_ONLY`.
      implementation: "mosaic_gpu", "mosaic_mma" or "mosaic_tpu".
      capability: the compute capability of the GPU.
    """
    if implementation == "mosaic_gpu" and capability != (9, 0):
        return r"needs compute capability 9.0 (Hopper)"
    if implementation == "mosaic_mma" and capability < (8, 0):
        return "needs compute capability 8.0 (Ampere)"
    if case.name in _NO_KERNEL:
        return _NO_KERNEL[case.name]
    if case.pages_dtype and implementation == "mosaic_tpu":
        return "does not read float8 pages"
    if case.pages_dtype and implementation == "mosaic_mma" and capability < (8, 9):
        return "float8 needs compute capability 8.9 (Ada)"
    if case.head_dim == 512 and implementation == "mosaic_mma" and capability == (8, 9):
        return "bytes of shared memory"  # fewest on Ada
    return _REFUSED[implementation].get(case.name)
