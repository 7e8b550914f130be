"""The random numbers of csrc/common/philox.h."""

from __future__ import annotations

import triton
import triton.language as tl

#: What a random number is for. Streams never share a counter.
ACCEPT = tl.constexpr(0)
GUMBEL = tl.constexpr(1)
DRAFT = tl.constexpr(2)
TARGET = tl.constexpr(3)
BLOCK = tl.constexpr(4)


@triton.jit
def splitmix64(value):
    """A seed, int64, as a Philox key, uint64."""
    key = value.to(tl.uint64, bitcast=True) + tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    key = (key ^ (key >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    key = (key ^ (key >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return key ^ (key >> 31)


@triton.jit
def random_words(key, slot, stream, position):
    """Four uint32 of Philox4x32-10; slot is int32 and position int64, numbers or tensors of one shape."""
    zero = slot ^ slot
    c0 = slot.to(tl.uint32)
    c1 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = (zero + stream).to(tl.uint32)
    c3 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    a = tl.full([], 0xD2511F53, tl.uint32)
    b = tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, a), c0 * a
        high2, low2 = tl.umulhi(c2, b), c2 * b
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform_of(w0, w1):
    """53 bits, in [0, 1)."""
    bits = ((w0 >> 5).to(tl.int64) << 26) | (w1 >> 6).to(tl.int64)
    return bits.to(tl.float64) * (2.0**-53)


@triton.jit
def token_draw_of(w0, w1, w2, w3):
    """The uniforms of one token: which block of its row, which chunk of that, which id."""
    block = (w3.to(tl.int64) << 6) | (w1 & 63).to(tl.int64)
    chunk = (w2.to(tl.int64) << 5) | (w0 & 31).to(tl.int64)
    return block.to(tl.float64) * (2.0**-38), chunk.to(tl.float64) * (2.0**-37), uniform_of(w0, w1)
