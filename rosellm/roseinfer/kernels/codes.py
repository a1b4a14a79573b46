"""Device functions that quantise rows to codes of 8 bits (``models.quantized``)."""

from __future__ import annotations

from rosellm.triton_or_none import has_triton, tl, triton

text = tl.constexpr if has_triton else str


@triton.jit
def coded(x, dtype: tl.constexpr):
    """Return the codes ``[N, K]`` and scales ``[N]`` of rows x ``[N, K]`` fp32.

    The scale of a row with a NaN is infinite, so that what is read from it is NaN.
    """
    LARGEST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    scales = tl.maximum(largest / LARGEST, 1.1754943508222875e-38)  # the smallest normal number
    left = x * (1.0 / scales)[:, None]
    left = tl.minimum(tl.maximum(left, -LARGEST), LARGEST)  # 448 may have become 448.00003
    return nearest(left, dtype), scales


# Pairs of codes in $2, each in 16 bits, become the low codes in $0 and the high ones in $1.
INT8_TO_FP16 = text("""{
    .reg .b32 low, high, less;  // 1024 + (code + 128), less 1152
    mov.b32 less, 0x64806480;
    and.b32 low, $2, 0x00FF00FF;  xor.b32 low, low, less;
    shr.b32 high, $2, 8;
    and.b32 high, high, 0x00FF00FF;  xor.b32 high, high, less;
    sub.f16x2 $0, low, less;
    sub.f16x2 $1, high, less;
}""")
INT8_TO_BF16 = text("""{
    .reg .b32 low, high, less, one;  // 128 + the lowest 7 bits, less 128 or, of a negative code, 256
    mov.b32 one, 0x3F803F80;
    and.b32 low, $2, 0x007F007F;  or.b32 low, low, 0x43004300;
    and.b32 less, $2, 0x00800080;  or.b32 less, less, 0xC300C300;
    fma.rn.bf16x2 $0, low, one, less;
    shr.b32 high, $2, 8;
    and.b32 less, high, 0x00800080;  or.b32 less, less, 0xC300C300;
    and.b32 high, high, 0x007F007F;  or.b32 high, high, 0x43004300;
    fma.rn.bf16x2 $1, high, one, less;
}""")
FP8_TO_FP16 = text("""{
    .reg .b32 low, high, sign, scale;  // the bits of the code / 2 ** 8, times 2 ** 8
    mov.b32 scale, 0x5C005C00;
    shl.b32 low, $2, 7;  and.b32 low, low, 0x3F803F80;
    shl.b32 sign, $2, 8;  and.b32 sign, sign, 0x80008000;  or.b32 low, low, sign;
    shr.b32 high, $2, 1;  and.b32 high, high, 0x3F803F80;
    and.b32 sign, $2, 0x80008000;  or.b32 high, high, sign;
    mul.f16x2 $0, low, scale;
    mul.f16x2 $1, high, scale;
}""")
FP8_TO_BF16 = text("""{
    .reg .b32 low, high, sign;  // the bits of the code / 2 ** 120
    shl.b32 low, $2, 4;  and.b32 low, low, 0x07F007F0;
    shl.b32 sign, $2, 8;  and.b32 sign, sign, 0x80008000;  or.b32 $0, low, sign;
    shr.b32 high, $2, 4;  and.b32 high, high, 0x07F007F0;
    and.b32 sign, $2, 0x80008000;  or.b32 $1, high, sign;
}""")


@triton.jit
def unpacked(pairs, codes: tl.constexpr, dtype: tl.constexpr):
    """Return the low and the high code of each pair, an int16, in fp16 or bf16, which hold them exactly.

    In bf16, codes of FP8 are divided by ``2 ** 120``, the difference of exponents. This works only on a GPU.

    codes: their dtype.
    """
    FROM_INT8: tl.constexpr = INT8_TO_FP16 if dtype == tl.float16 else INT8_TO_BF16
    FROM_FP8: tl.constexpr = FP8_TO_FP16 if dtype == tl.float16 else FP8_TO_BF16
    TEXT: tl.constexpr = FROM_INT8 if codes == tl.int8 else FROM_FP8
    both = tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r", [pairs], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
    )
    low, high = both
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """Round to the nearest code."""
    if dtype == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: to the nearest integer
    return x.to(dtype)
