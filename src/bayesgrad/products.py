"""Products of float32 matrices on CPUs, by the faster of torch's two libraries.

torch multiplies matrices by MKL, which does not use the widest instructions of AMD's processors. oneDNN, by which torch
computes convolutions, does: from about 150 rows and columns on it is 1.5 to 2.3 times as fast where these instructions
take one cycle (from Zen 5 on), and up to 1.2 times where they take two. Both round alike, and neither uses a shorter
type. Elsewhere, and for small matrices, these functions are torch's own.

Layers themselves are left to torch, so that recording them changes no number.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FEWEST = 3 << 20  # multiplications, from which on oneDNN is faster: a call of it takes longer
SHORTEST = 64  # sums, from which on a product is worth two more passes over what it is added to
ONE_CYCLE = 26  # the family of AMD's processors from which on the widest instructions take one cycle


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, for (m, k) and (k, n), or stacks of such."""
    if not _is_large(a, b) or (multiply := _onednn()) is None:
        return a @ b
    left, right = (_dense(t[0] if t.dim() == 3 else t) for t in (a, b))
    found = multiply(left, right.mT, None, "none", [], "")
    return found[None] if a.dim() == 3 or b.dim() == 3 else found


def addmm_(target: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
    """target <- beta target + alpha a @ b, in place."""
    if a.shape[-1] < SHORTEST or not _is_large(a, b) or not _adds_by_onednn():
        multiply = target.addmm_ if target.dim() == 2 else target.baddbmm_
        multiply(a, b, beta=beta, alpha=alpha)
    elif beta:
        (target if beta == 1 else target.mul_(beta)).add_(mm(a, b), alpha=alpha)
    else:
        torch.mul(mm(a, b), alpha, out=target)


def uses_onednn() -> bool:
    """Whether large products are by oneDNN here."""
    return _onednn() is not None


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps between rows or columns, for which oneDNN has a slow loop alone."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


def _is_large(a: Tensor, b: Tensor) -> bool:
    """Whether these are matrices for oneDNN, which nothing traces, transforms or differentiates."""
    if a.dtype != torch.float32 or a.device.type != "cpu" or a.shape[-2] * a.shape[-1] * b.shape[-1] < FEWEST:
        return False
    if any(t.dim() > 3 or (t.dim() == 3 and len(t) > 1) for t in (a, b)) or b.dtype != a.dtype or b.device != a.device:
        return False
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return False
    plain = (Tensor, torch.nn.Parameter)
    if type(a) not in plain or type(b) not in plain or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """torch's operator for x @ w' by oneDNN, where it is faster; None elsewhere, and if it computes something else."""
    backends, x, w = torch.backends, torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    usable = backends.mkldnn.is_available() and backends.mkl.is_available() and "AMD" in _processor()
    if not usable or backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        operator = torch.ops.mkldnn._linear_pointwise.default
        found = operator(x, w, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):  # of another version of torch
        return None
    return operator if torch.equal(found, x @ w.T) else None


@cache
def _adds_by_onednn() -> bool:
    """Whether oneDNN, which adds to nothing, is faster by so much that passes over the target do not matter."""
    family = re.search(r"cpu family\s*:\s*(\d+)", _processor())
    return _onednn() is not None and family is not None and int(family[1]) >= ONE_CYCLE


def _processor() -> str:
    """Its name, with that of its maker."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else platform.processor()
