"""Operations of a step: matrix products, convolutions, recurrent layers and decompositions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_aten: Any = torch.ops.aten


def _cubic(factor: float) -> Callable[..., int]:
    """So many n^3 for each square matrix of a batch."""
    return lambda shape, *_, **__: int(factor * math.prod(shape[:-2]) * shape[-2] * shape[-1] * min(shape[-2:]))


def _solve(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return math.prod(a[:-1]) * a[-1] * b[-1]


def _recurrent(x: Any, w_x: Any, w_h: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """A layer of an LSTM: both products, at all positions of all sequences."""
    return 2 * x[0] * x[1] * (math.prod(w_x) + math.prod(w_h))


def _recurrent_backward(*shapes: Any, **options: Any) -> int:
    return 2 * _recurrent(*shapes, **options)


def _pointwise(x: Any, w: Any, *_: Any, **__: Any) -> int:
    """x @ w' by oneDNN, as `bayesgrad.products` calls it."""
    return 2 * math.prod(x) * w[0]


# Golub and Van Loan, 2013: Cholesky 1/3, its inverse 2/3, inverse 2, QR with Q 8/3, eigenvectors 9, SVD 21.
DECOMPOSITIONS = {
    _aten.linalg_cholesky_ex: _cubic(1 / 3),
    _aten.cholesky_inverse: _cubic(2 / 3),
    _aten.linalg_inv_ex: _cubic(2),
    _aten.linalg_qr: _cubic(8 / 3),
    _aten._linalg_eigh: _cubic(9),
    _aten._linalg_svd: _cubic(21),
    _aten.linalg_solve_triangular: _solve,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    DECOMPOSITIONS[torch.ops.mkldnn._linear_pointwise] = _pointwise


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Counts what is done inside."""
    with FlopCounterMode(display=False, custom_mapping=DECOMPOSITIONS) as counter:
        yield counter.get_total_flops
