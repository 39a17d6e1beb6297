"""Whether chains have mixed: effective sample size, split R-hat, autocorrelation time and traces, by ArviZ."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bayesgrad.samplers.ensemble import Ensemble

WEIGHTS = 100  # of each tensor that are looked at


def _arviz() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        try:
            import arviz
        except ImportError as error:
            raise ImportError("diagnostics need ArviZ: pip install 'bayesgrad[samplers]'.") from error
    return arviz


def inference_data(chains: Ensemble | Sequence[Ensemble], *, weights: int | None = WEIGHTS) -> Any:
    """The samples as an ArviZ InferenceData: a variable for each tensor, and losses as `sample_stats.loss`.

    Args:
        chains: one ensemble, or several of the same model; those of `Chains` count as that many. Of chains that differ
            in length, the first samples that all have are taken.
        weights: how many of each tensor, evenly spaced; None is all of them, in their shape.
    """
    ensembles = [chains] if isinstance(chains, Ensemble) else list(chains)
    if not ensembles:
        raise ValueError("diagnostics need at least one ensemble, got an empty list.")
    draws = [ensemble.draws(weights) for ensemble in ensembles]
    length = min(next(iter(some.values())).shape[1] for some in draws)
    if any(set(some) != set(draws[0]) for some in draws):
        raise ValueError("the ensembles are of different models: their parameters have other names.")
    stacked = {name: torch.cat([some[name][:, :length] for some in draws]).numpy() for name in draws[0]}
    losses = [loss for e in ensembles for loss in [e.losses[:length]] * e.chains]
    return _arviz().from_dict(posterior=stacked, sample_stats={"loss": np.array(losses)})


@dataclass(frozen=True)
class Diagnostics:
    """What `diagnose` finds, name -> one number for each weight that was looked at.

    Args:
        ess: effective sample size for a mean, of all chains together.
        rhat: split R-hat: how much wider all halves of chains are than each; 1 where they have mixed.
        time: integrated autocorrelation time in samples, samples/ess; multiply by `thin` for steps.
        samples: of all chains together.
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
    rate lr has r = 1 - lr in each direction of a quadratic cost, so about 2/lr steps for one independent sample.

    Reference: Vehtari et al., 2021 (ArviZ); 003 for chains.
    Checked by: tests/equations/test_ensemble.py::test_autocorrelation_time_of_an_autoregressive_process
    """
    arviz = _arviz()
    data = inference_data(chains, weights=weights)
    draws = data.posterior.sizes["draw"]
    if draws < 4:
        raise ValueError(f"diagnostics need at least 4 samples of each chain, got {draws}: sample longer.")
    samples = data.posterior.sizes["chain"] * draws
    ess, rhat = (_values(found) for found in (arviz.ess(data, method="mean"), arviz.rhat(data, method="split")))
    return Diagnostics(ess, rhat, {name: samples / some for name, some in ess.items()}, samples)


def _values(found: Any) -> dict[str, np.ndarray]:
    return {str(name): np.asarray(found[name]) for name in found.data_vars}


def trace_plot(
    path: str | os.PathLike,
    chains: Ensemble | Sequence[Ensemble],
    *,
    names: Sequence[str] | None = None,
    weights: int = 3,
) -> None:
    """Densities and traces of a few weights of each tensor, a colour for each chain, into a picture file.

    Args:
        names: of the tensors that are shown; None is all.
        weights: of each.
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
