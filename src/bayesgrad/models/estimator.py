"""The base class of all estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data
from torch import Tensor

from bayesgrad.models.arrays import as_numpy


class Estimator(BaseEstimator):
    """Base class: settings are the fields of a dataclass, and results are NumPy arrays, or tensors if X is a tensor."""

    n_features_in_: int
    _device: torch.device | None  # of the X of `fit`; None for arrays

    def _validated(self, X: Any, *, reset: bool = False, **options: Any) -> Any:
        """X as a float64 array of the right width, which may contain NaN and infinity."""
        return validate_data(
            self, as_numpy(X), reset=reset, **{"dtype": np.float64, "ensure_all_finite": False} | options
        )

    def _remember_kind(self, X: Any) -> None:
        self._device = X.device if isinstance(X, Tensor) else None

    def _kind(self, result: Tensor) -> Any:
        """A result as the kind of array that was passed to `fit`."""
        return result.cpu().numpy() if self._device is None else result.to(self._device)
