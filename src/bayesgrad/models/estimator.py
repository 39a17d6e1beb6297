"""The base classes of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from bayesgrad.models.checks import as_finite, as_numpy
from bayesgrad.models.multinomial import Multinomial
from bayesgrad.models.observations import NAMES, Observation

OBSERVATIONS: dict[str, type[Observation] | type[Multinomial]] = {**NAMES, "multinomial": Multinomial}


class Estimator(BaseEstimator):
    """Base class: settings are the fields of a dataclass, and results are NumPy arrays, or tensors if X is a tensor."""

    n_features_in_: int
    components_: Any  # of transformers, one row per column of `transform`
    _fixed_settings: ClassVar[tuple[str, ...]] = ()  # settings that a stream cannot change
    _device: torch.device | None  # of the X of `fit`; None for arrays

    def _validated(self, X: Any, *, reset: bool = False, **options: Any) -> Any:
        """X as a float64 array of the right width, which may contain NaN and infinity."""
        options = {"dtype": np.float64, "ensure_all_finite": False} | options
        return validate_data(self, as_numpy(X), reset=reset, **options)

    def _remember_settings(self) -> None:
        self._first_settings = {name: getattr(self, name) for name in self._fixed_settings}

    def _require_same_settings(self) -> None:
        """Raises a ValueError for settings that changed between calls of partial_fit."""
        for name, before in self._first_settings.items():
            if (now := getattr(self, name)) != before:
                raise ValueError(
                    f"{name} was {before!r} in the first call and is {now!r} now: restore it, or start again with fit "
                    "or a new estimator."
                )

    def _remember_kind(self, X: Any) -> None:
        self._device = X.device if isinstance(X, Tensor) else None

    def _kind(self, result: Tensor) -> Any:
        """A result as the kind of array that was passed to `fit`."""
        return result.cpu().numpy() if self._device is None else result.to(self._device)


def classifies(model: Supervised) -> bool:
    """Whether the targets of an estimator are labels."""
    given = model.likelihood
    return getattr(OBSERVATIONS.get(given) if isinstance(given, str) else given, "classifies", False)


class Supervised(Estimator):
    """Base class: a classifier if the targets of its `likelihood` are labels, else a regressor."""

    likelihood: Any
    classes_: Any
    predict: Callable[..., Any]
    _binary: ClassVar[tuple[str, ...]] = ()  # likelihoods of two classes only

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if classifies(self):
            multiple = self.likelihood not in self._binary
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags(multi_class=multiple)
        else:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
            tags.target_tags.positive_only = self.likelihood == "poisson"
        return tags

    def _read(self, X: Any, y: Any, *, reset: bool = True) -> tuple[Tensor, np.ndarray]:
        """Validated rows, and targets as they were given."""
        rows, targets = self._validated(X, y=as_numpy(y), reset=reset, y_numeric=not classifies(self))
        return as_finite(rows, X), np.asarray(targets)

    def _set_classes(self, y: Any, targets: np.ndarray) -> int:
        """Sets `classes_`, in the array type of y, and returns their number."""
        check_classification_targets(targets)
        labels = np.unique(targets)
        if len(labels) < 2:
            raise ValueError(f"y has only one class, {labels[0].item()!r}: at least two are needed.")
        self.classes_ = torch.as_tensor(labels) if isinstance(y, Tensor) else labels
        return len(labels)

    def _encode(self, targets: np.ndarray, rows: Tensor) -> Tensor:
        """Targets as numbers; labels as their places in `classes_`."""
        if not classifies(self):
            return torch.as_tensor(np.array(targets, dtype=np.float64)).to(rows)
        labels = as_numpy(self.classes_)
        places = np.searchsorted(labels, targets).clip(max=len(labels) - 1)
        if (labels[places] != targets).any():
            unknown = targets[labels[places] != targets][0].item()
            raise ValueError(f"y contains the label {unknown!r}, which is not in classes, {labels.tolist()}.")
        return torch.as_tensor(places).to(rows)

    def _most_probable(self, X: Any, probabilities: Tensor) -> Any:
        """The label of the most probable class of each row, as a tensor if X is one and labels are numbers."""
        labels = as_numpy(self.classes_)[probabilities.argmax(-1).cpu().numpy()]
        tensors = isinstance(X, Tensor) and labels.dtype.kind in "biuf"
        return torch.as_tensor(labels, device=X.device) if tensors else labels

    def score(self, X: Any, y: Any, sample_weight: Any = None, **options: Any) -> float:
        """Accuracy for classification, R² for regression; further options are those of `predict`."""
        found, metric = as_numpy(self.predict(X, **options)), accuracy_score if classifies(self) else r2_score
        return float(metric(as_numpy(y), found, sample_weight=as_numpy(sample_weight)))
