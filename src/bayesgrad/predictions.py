"""What is predicted: moments of outputs, and the parts of an uncertainty."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Mean and variance of the network's outputs f under the posterior of the weights, without the noise of the data.

    A new label has the variance `variance + noise_scale**2`, which `predict(x, noise=True)` returns in its place.
    """

    mean: Tensor
    variance: Tensor


class NoisyMoments(NamedTuple):
    """Mean and variance of the mean of a label under the posterior of the weights, and its expected noise variance.

    A new label has the variance `variance + noise`.
    """

    mean: Tensor
    variance: Tensor
    noise: Tensor


class Interval(NamedTuple):
    """Lower and upper ends of intervals, in the shape of the predicted numbers."""

    lower: Tensor
    upper: Tensor


class Decomposed(NamedTuple):
    """A prediction with its aleatoric uncertainty (noise of labels) and epistemic uncertainty (lack of data).

    | likelihood | aleatoric | epistemic | total |
    |---|---|---|---|
    | categorical | the expected entropy, E H(p) | the mutual information of label and weights | H(E p), in nats |
    | bernoulli | the same for each output | | |
    | gaussian | the noise variance | Var f | the variance of a new label |
    | heteroscedastic gaussian | the expected noise variance | the variance of the mean | the variance of a new label |
    | poisson | the expected rate | the rate's variance | the variance of a new count |

    Args:
        prediction: what `predict` returns without `decompose`.

    Reference: Depeweg et al., 2018; the laws of total variance and of total entropy.
    Checked by: tests/equations/test_predictive.py, by quadrature.
    """

    prediction: Tensor | Moments | NoisyMoments
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def total(self) -> Tensor:
        return self.aleatoric + self.epistemic
