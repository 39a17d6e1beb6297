"""Noise as a pure function of (seed, draw, position), independent of any generator's state.

So resumed runs, replicas, and compiled and eager steps have the same noise. Each position is hashed to two 32-bit
integers, which the Box-Muller transform turns into a normal number. The arithmetic is bit for bit the same in eager and
compiled mode. Logarithm and sine are short polynomials; with torch's functions, sampling would cost as much as the rest
of a step.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

Key = tuple[int, int]

# Floats are literals inside functions: torch.compile would treat global ones as inputs.


def key(*words: int) -> Key:
    """Two 32-bit integers, a hash of any number of integers."""
    text = ",".join(str(int(word)) for word in words).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def signed(x: int) -> int:
    """An integer modulo 2^32, as an int32."""
    return (x + 2**31) % 2**32 - 2**31


def seed32(seed: int) -> int:
    """A seed in [0, 2^32), of which torch's CPU generator uses 32 bits; larger or negative seeds are hashed."""
    return int(seed) if 0 <= seed < 2**32 else key(seed)[0] % 2**32


def fresh_seed() -> int:
    """A seed drawn from torch's global CPU generator, which is what `seed=None` means."""
    with unset_fake_temporarily():  # a seed is a number, also where tensors have none
        return int(torch.randint(2**32, (), dtype=torch.int64, device="cpu"))


def generator_of(seed: int, draw: int) -> torch.Generator:
    """A torch CPU generator that is a function of (seed, draw), for torch's own random functions."""
    # Consecutive seeds of the Mersenne twister are independent streams; the odd factor separates user seeds.
    return torch.Generator("cpu").manual_seed((seed32(seed) * 0x9E3779B97F4A7C15 + draw) % 2**63)


def randn(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`torch.randn` on the CPU, so that a seed gives the same numbers on every device, then moved to that of `like`.

    Large float64 tensors have torch's numbers up to rounding, and its generator's state: both are the Box-Muller
    transform of the same uniform numbers. torch computes it one number at a time there, which takes longer.
    """
    size = math.prod(shape)
    if like.dtype != torch.float64 or size < 1 << 13:
        return torch.randn(shape, dtype=like.dtype, generator=generator).to(like.device)
    numbers = torch.rand(size, dtype=torch.float64, generator=generator)
    rest = size % 16
    _box_muller_(numbers[: size - rest])
    if rest:  # the last 16 are drawn again
        _box_muller_(numbers[-16:].uniform_(generator=generator))
    return numbers.view(shape).to(like.device)


def _box_muller_(uniform: Tensor) -> None:
    """sqrt(-2 log(1 - u)) (cos 2πv, sin 2πv), in place; of each 16 numbers, 8 are u and 8 are v."""
    u, v = uniform.view(-1, 2, 8).unbind(1)
    radius = (1 - u).log_().mul_(-2).rsqrt_().reciprocal_()  # sqrt_ takes twice as long
    angle = v * (2 * torch.pi)
    torch.mul(radius, angle.cos(), out=u)
    torch.mul(radius, angle.sin_(), out=v)


def positions(start: Any, like: Tensor) -> Tensor:
    """start, start + 1, ... for each element, int32 with wrap-around."""
    return torch.arange(like.numel(), dtype=torch.int32, device=like.device) + start


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers: a change of one input bit flips each output bit with probability 1/2."""
    x = (x ^ _shifted(x, 16)) * signed(0x7FEB352D)
    x = (x ^ _shifted(x, 15)) * signed(0x846CA68B)
    return x ^ _shifted(x, 16)


def bits(position: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """Two int32 hashes of each position under a key."""
    one = _mixed(_mixed(position ^ first) + second)
    return one, _mixed(one ^ signed(0x9E3779B9))


def fraction(hashed: Tensor) -> Tensor:
    """Uniform in (0, 1), symmetric about 1/2, float32; (23-bit integer + 1/2) 2^-23 is exact."""
    return (_shifted(hashed, 9).to(torch.float32) + 0.5) * 2.0**-23


def log(u: Tensor) -> Tensor:
    """The natural logarithm of a positive, normal float32, with relative error 1e-7."""
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
    """sin(pi y/2) for |y| <= 1, with error 3e-7; least squares at Chebyshev points."""
    square = y * y
    p = square * 1.50817160e-4 - 4.67222026e-3
    p = p * square + 7.96884748e-2
    p = p * square - 6.45963358e-1
    return y * (p * square + 1.57079629)


def normal_parts(position: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """(r^2, c), float32, such that sqrt(r^2) c is standard normal; a variance can be multiplied under the same root."""
    one, two = bits(position, first, second)
    y = 1 - (two.to(torch.float32) * 2.0**-30).abs()  # two is uniform, so the angle pi y/2 is uniform in half a turn
    return -2 * log(fraction(one)), quarter_sine(y)


def logistic(position: Tensor, first: Any, second: Any) -> Tensor:
    """log u - log(1 - u) for a uniform u, float32."""
    one, _ = bits(position, first, second)
    u = fraction(one)
    return log(u) - log(1 - u)
