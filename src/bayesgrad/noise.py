"""Noise that is a pure function of (seed, draw, position), not of a generator's history.

A run that is resumed, a replica, and a step that is compiled or not draw the same numbers by construction. Positions
are hashed to two 32-bit integers, which Box and Muller's transformation turns into a normal variate: in arithmetic that
is the same to the last bit in eager and compiled mode, and with short polynomials for the logarithm and the sine,
because the drawing of noise would otherwise cost as much as the rest of a step.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, int]

# Floats are literals inside of functions: torch.compile would take global ones for inputs.


def key(*words: int) -> Key:
    """Two 32-bit integers from any number of whole numbers; different words, even by one bit, are unrelated keys."""
    text = ",".join(str(int(word)) for word in words).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def signed(x: int) -> int:
    """A whole number modulo 2^32, as an int32."""
    return (x + 2**31) % 2**32 - 2**31


def folded(seed: int) -> int:
    """A seed in the 32 bits that torch's generators of the CPU look at; one that has more, or a sign, is hashed."""
    return int(seed) if 0 <= seed < 2**32 else key(seed)[0] % 2**32


def generator_of(seed: int, draw: int) -> torch.Generator:
    """Torch's generator of the CPU, for what is drawn by torch itself: a function of (seed, draw)."""
    # Consecutive seeds of the Mersenne twister are independent streams; the odd factor keeps users' seeds apart.
    return torch.Generator("cpu").manual_seed((folded(seed) * 0x9E3779B97F4A7C15 + draw) % 2**63)


def positions(start: Any, like: Tensor) -> Tensor:
    """start, start + 1, ... for each element, int32 with wrap-around."""
    return torch.arange(like.numel(), dtype=torch.int32, device=like.device) + start


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers: any bit of the input changes each bit of the output half of the time."""
    x = (x ^ _shifted(x, 16)) * signed(0x7FEB352D)
    x = (x ^ _shifted(x, 15)) * signed(0x846CA68B)
    return x ^ _shifted(x, 16)


def bits(position: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """Two hashes of each position under a key; they are int32."""
    one = _mixed(_mixed(position ^ first) + second)
    return one, _mixed(one ^ signed(0x9E3779B9))


def fraction(hashed: Tensor) -> Tensor:
    """Uniform in (0, 1), symmetric about one half, float32: 23 bits and a half are exact."""
    return (_shifted(hashed, 9).to(torch.float32) + 0.5) * 2.0**-23


def log(u: Tensor) -> Tensor:
    """The natural logarithm of a positive, normal float32, to 1e-7 of its value."""
    whole = u.view(torch.int32)
    exponent = (whole - 0x3F3504F3) >> 23  # such that the mantissa is in [sqrt(1/2), sqrt(2))
    x = (whole - (exponent << 23)).view(torch.float32) - 1
    y = x * 7.0376836292e-2 - 1.1514610310e-1  # (log(1+x) - x + x^2/2)/x^3, as in the Cephes library
    y = y * x + 1.1676998740e-1
    y = y * x - 1.2420140846e-1
    y = y * x + 1.4249322787e-1
    y = y * x - 1.6668057665e-1
    y = y * x + 2.0000714765e-1
    y = y * x - 2.4999993993e-1
    y = y * x + 3.3333331174e-1
    square = x * x
    return x * square * y - 0.5 * square + x + exponent.to(torch.float32) * 0.6931471805599453


def quarter_sine(y: Tensor) -> Tensor:
    """sin(pi y/2) for |y| <= 1, to 3e-7; least squares at Chebyshev points."""
    square = y * y
    p = square * 1.50817160e-4 - 4.67222026e-3
    p = p * square + 7.96884748e-2
    p = p * square - 6.45963358e-1
    return y * (p * square + 1.57079629)


def normal_parts(position: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """(r^2, c), float32, such that sqrt(r^2) c is standard normal: a scale can go under the same root."""
    one, two = bits(position, first, second)
    y = 1 - (two.to(torch.float32) * 2.0**-30).abs()  # two is uniform, so the angle pi y/2 is uniform in half a turn
    return -2 * log(fraction(one)), quarter_sine(y)


def logistic(position: Tensor, first: Any, second: Any) -> Tensor:
    """log u - log(1 - u) for a uniform u, float32."""
    one, _ = bits(position, first, second)
    u = fraction(one)
    return log(u) - log(1 - u)
