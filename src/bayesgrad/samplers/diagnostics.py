"""Convergence diagnostics by ArviZ: effective sample size, split R-hat, autocorrelation time and traces."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bayesgrad.samplers.ensemble import Ensemble

WEIGHTS = 100  # weights of each tensor that are diagnosed


def _arviz() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        try:
            import arviz
        except ImportError as error:
            raise ImportError("diagnostics need ArviZ: pip install arviz.") from error
    return arviz


def inference_data(chains: Ensemble | Sequence[Ensemble], *, weights: int | None = WEIGHTS) -> Any:
    """The samples as an ArviZ InferenceData: a variable for each tensor, and losses as `sample_stats.loss`.

    Args:
        chains: one ensemble, or several of the same model; an ensemble of `Chains` has several chains. Longer chains
            are cut to the length of the shortest.
        weights: the number of weights of each tensor, evenly spaced; None for all, in their shape.
    """
    ensembles = [chains] if isinstance(chains, Ensemble) else list(chains)
    if not ensembles:
        raise ValueError("diagnostics need at least one ensemble, got an empty list.")
    draws = [ensemble.draws(weights) for ensemble in ensembles]
    length = min(next(iter(some.values())).shape[1] for some in draws)
    if any(set(some) != set(draws[0]) for some in draws):
        raise ValueError("the ensembles must be of the same model: the names of their parameters differ.")
    stacked = {name: torch.cat([some[name][:, :length] for some in draws]).numpy() for name in draws[0]}
    losses = [loss for e in ensembles for loss in [e.losses[:length]] * e.chains]
    return _arviz().from_dict(posterior=stacked, sample_stats={"loss": np.array(losses)})


@dataclass(frozen=True)
class Diagnostics:
    """The results of `diagnose`, name -> one number for each diagnosed weight.

    Args:
        ess: effective sample size for a mean, over all chains.
        rhat: split R-hat; close to 1 if the chains have mixed. Of a single chain it compares the two halves, and is NaN
            for fewer than 8 samples.
        time: integrated autocorrelation time in samples, samples/ess; multiply by `thin` for steps.
        samples: the number of samples of all chains.
    """

    ess: dict[str, np.ndarray]
    rhat: dict[str, np.ndarray]
    time: dict[str, np.ndarray]
    samples: int

    @property
    def worst(self) -> tuple[float, float]:
        """The smallest effective sample size and the largest R-hat."""
        return (
            min(float(np.min(some)) for some in self.ess.values()),
            max(float(np.max(some)) for some in self.rhat.values()),
        )


def diagnose(chains: Ensemble | Sequence[Ensemble], *, weights: int | None = WEIGHTS) -> Diagnostics:
    """Effective sample size, split R-hat and autocorrelation time of weights.

    For an autoregressive process with coefficient r the time is (1 + r)/(1 - r); a natural-gradient chain with learning
    rate lr has r = 1 - lr in each direction of a quadratic cost, so about 2/lr steps per independent sample.

    Reference: Vehtari et al., 2021 (ArviZ); Smith et al. 2018, for chains.
    Checked by: tests/equations/test_ensemble.py::test_autocorrelation_time_of_an_autoregressive_process
    """
    arviz = _arviz()
    data = inference_data(chains, weights=weights)
    draws = data.posterior.sizes["draw"]
    if draws < 4:
        raise ValueError(f"diagnostics need at least 4 samples of each chain, got {draws}: sample longer.")
    samples = data.posterior.sizes["chain"] * draws
    ess, rhat = _values(arviz.ess(data, method="mean")), _values(_split_rhat(arviz, data.posterior))
    return Diagnostics(ess, rhat, {name: samples / some for name, some in ess.items()}, samples)


def _split_rhat(arviz: Any, posterior: Any) -> Any:
    half = posterior.sizes["draw"] // 2
    if posterior.sizes["chain"] > 1:
        return arviz.rhat(posterior, method="split")
    if half < 4:  # ArviZ would write to the log
        return posterior.mean(("chain", "draw")) * np.nan
    halves = {str(name): np.stack([draws[0, :half], draws[0, -half:]]) for name, draws in posterior.items()}
    return arviz.rhat(arviz.convert_to_dataset(halves), method="identity")  # ArviZ splits no single chain


def _values(found: Any) -> dict[str, np.ndarray]:
    return {str(name): np.asarray(found[name]) for name in found.data_vars}


def trace_plot(
    path: str | os.PathLike,
    chains: Ensemble | Sequence[Ensemble],
    *,
    names: Sequence[str] | None = None,
    weights: int = 3,
) -> None:
    """Plots densities and traces of a few weights of each tensor, one colour for each chain.

    Args:
        path: of the image file.
        names: of the tensors; None for all.
        weights: the number of weights of each tensor.
    """
    arviz = _arviz()
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    data = inference_data(chains, weights=weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", matplotlib.MatplotlibDeprecationWarning)  # of what ArviZ calls
        axes = arviz.plot_trace(data, var_names=list(names) if names is not None else None, compact=True)
    figure = axes.ravel()[0].figure
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=130)
    plt.close(figure)
