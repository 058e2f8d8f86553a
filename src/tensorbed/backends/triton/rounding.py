"""Rounding of what kernels store."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, to, WIDEN: tl.constexpr):
    """Single precision in the dtype that ``to`` points at: the nearest number, of two the even one.

    As every GPU does by itself. The interpreter cuts bfloat16 off instead, so that under WIDEN it is rounded here.
    """
    if WIDEN and to.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(to.dtype.element_ty)
