"""Experiments: what the papers claim, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context


@dataclass(frozen=True)
class Experiment:
    """A claim of a paper and the function that measures it.

    Args:
        status: the verdict of the recorded laptop run, in a few words; its page is docs/results/<name>.md.
    """

    name: str
    paper: str
    figure: str
    about: str
    run: Callable[[Context], Report]
    status: str


def _lazily(module: str, function: str) -> Callable[[Context], Report]:
    def run(context: Context) -> Report:
        from importlib import import_module

        return getattr(import_module(f"bayesgrad_lab.{module}"), function)(context)

    return run


PAPER_000 = "Aitchison, A unified theory of adaptive stochastic gradient descent as Bayesian filtering"
PAPER_001 = "Aitchison, Bayesian filtering unifies adaptive and non-adaptive neural network optimization methods"
PAPER_002 = "Khan and Rue, The Bayesian learning rule"
PAPER_003 = "Smith et al., Stochastic natural gradient descent draws posterior samples in function space"
PAPER_004 = "Benzing, Kronecker-factored second-order optimizers perform first-order descent on neurons"
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "aitchison2018-momentum",
            PAPER_000,
            "Eq. 15-21",
            "where the filter is Adam, RMSProp, or neither",
            _lazily("aitchison2018", "momentum"),
            "Adam on 22 % of the map, RMSProp on 12 %",
        ),
        Experiment(
            "aitchison2018-kronecker",
            PAPER_000,
            "section 2.1",
            "what Kronecker factors tend to",
            _lazily("aitchison2018", "kronecker"),
            "holds",
        ),
        Experiment(
            "aitchison2018-convergence",
            PAPER_000,
            "section 2.2.3",
            "Reddi et al.'s counter-examples to Adam",
            _lazily("aitchison2018_convergence", "convergence"),
            "holds in part",
        ),
        Experiment(
            "aitchison2018-open-questions",
            PAPER_000,
            "section 2.2",
            "each suggestion against its plain counterpart",
            _lazily("aitchison2018_questions", "open_questions"),
            "none is better in test NLL at laptop scale",
        ),
        Experiment(
            "aitchison2020-fig1",
            PAPER_001,
            "Fig. 1",
            "the optimum of one weight drifts while the others are trained",
            _lazily("aitchison2020", "fig1"),
            "holds",
        ),
        Experiment(
            "aitchison2020-fig3",
            PAPER_001,
            "Fig. 3",
            "measured learning rates against the fixed-point curve",
            _lazily("aitchison2020", "fig3"),
            "holds",
        ),
        Experiment(
            "aitchison2020-table1",
            PAPER_001,
            "Table 1, Fig. 4, A1-A5",
            "ten optimizers on a ResNet and a DenseNet",
            _lazily("aitchison2020", "table1"),
            "does not hold at laptop scale",
        ),
        Experiment(
            "benzing2021-fig1",
            PAPER_004,
            "Fig. 1",
            "exact natural gradients: their cost, and KFAC's loss beside theirs",
            _lazily("benzing2021", "fig1"),
            "holds",
        ),
        Experiment(
            "benzing2021-fig2",
            PAPER_004,
            "Fig. 2, 6",
            "KFAC and natural gradients with the same data in their Fishers",
            _lazily("benzing2021", "fig2"),
            "holds for full batches only",
        ),
        Experiment(
            "benzing2021-fig3",
            PAPER_004,
            "Fig. 3, 7",
            "KFAC and layer-wise natural gradients",
            _lazily("benzing2021", "fig3"),
            "holds",
        ),
        Experiment(
            "benzing2021-fig4",
            PAPER_004,
            "Fig. 4, 8",
            "damping, KFAC's similarity to FOOF, and its loss",
            _lazily("benzing2021", "fig4"),
            "similarity holds, loss does not at laptop scale",
        ),
        Experiment(
            "benzing2021-fig5",
            PAPER_004,
            "Fig. 5",
            "FOOF against KFAC: time and loss",
            _lazily("benzing2021", "fig5"),
            "time holds, loss in part at laptop scale",
        ),
        Experiment(
            "benzing2021-fig9",
            PAPER_004,
            "Fig. 9, 10",
            "Fisher and gradient of the same batch or of two",
            _lazily("benzing2021", "fig9"),
            "holds",
        ),
        Experiment(
            "benzing2021-conv",
            PAPER_004,
            "section 4",
            "KFAC, natural gradients and FOOF on a convolutional network",
            _lazily("benzing2021", "conv"),
            "holds",
        ),
        Experiment(
            "benzing2021-laplace",
            PAPER_004,
            "appendix C",
            "Laplace's method with the input factor alone",
            _lazily("benzing2021_laplace", "input_factor"),
            "holds for draws, linearised but for AUROC",
        ),
        Experiment(
            "khan2023-fig1",
            PAPER_002,
            "Fig. 1",
            "Bayes moves away from a wall and prefers flat minima",
            _lazily("khan2023", "fig1"),
            "holds, for beliefs that begin wide",
        ),
        Experiment(
            "khan2023-multimodal",
            PAPER_002,
            "section 3.2",
            "components of a mixture finding separate minima",
            _lazily("khan2023_multimodal", "multimodal"),
            "holds",
        ),
        Experiment(
            "khan2023-svi",
            PAPER_002,
            "section 5.3",
            "topics of documents: streams and sweeps, held-out bound against time",
            _lazily("khan2023_svi", "topics"),
            "holds in part: streams draw level with sweeps",
        ),
        Experiment(
            "khan2023-table1",
            PAPER_002,
            "Table 1",
            "every algorithm of the table out of one step, beside others' code",
            _lazily("khan2023_table1", "table1"),
            "holds",
        ),
        Experiment(
            "khan2023-uncertainty",
            PAPER_002,
            "section 4.4",
            "variational rules beside Adam, dropout and ensembles",
            _lazily("khan2023", "uncertainty"),
            "holds on Fashion-MNIST, after 30 epochs only",
        ),
        Experiment(
            "khan2023-laplace-vs-variational",
            PAPER_002,
            "section 4.4",
            "Laplace's method against VOGN and IVON, trained as long",
            _lazily("khan2023_laplace", "against"),
            "NLL holds, ECE in part, AUROC does not",
        ),
        Experiment(
            "khan2023-binary",
            PAPER_002,
            "section 4.5",
            "binary networks: STE against BayesBiNN",
            _lazily("khan2023", "binary"),
            "does not hold at laptop scale",
        ),
        Experiment(
            "uci-regression",
            "No paper's; data as of Hernandez-Lobato and Adams, Probabilistic backpropagation",
            "",
            "MAP, Laplace's method and variational rules on six small regressions",
            _lazily("uci_regression", "regression"),
            "full matrix ahead of MAP on five of six",
        ),
        Experiment(
            "continual-mnist",
            PAPER_004,
            "appendices A.2 and C",
            "tasks one after the other: EWC with many Hessians, and chained beliefs",
            _lazily("continual", "continual"),
            "A.2 holds for exact Fishers, C nearly does",
        ),
        Experiment(
            "smith2018-fig1",
            PAPER_003,
            "Fig. 1",
            "iterates of Langevin dynamics and of minibatches beside Laplace's approximation",
            _lazily("smith2018_logistic", "fig1"),
            "holds roughly: damping narrows the flat direction",
        ),
        Experiment(
            "smith2018-fig2",
            PAPER_003,
            "Fig. 2",
            "the temperature of Langevin dynamics, logistic regression",
            _lazily("smith2018_logistic", "fig2"),
            "holds",
        ),
        Experiment(
            "smith2018-fig3",
            PAPER_003,
            "Fig. 3",
            "the temperature of minibatches, logistic regression",
            _lazily("smith2018_logistic", "fig3"),
            "holds",
        ),
        Experiment(
            "smith2018-fig4",
            PAPER_003,
            "Fig. 4",
            "the batch size of natural gradients, a perceptron",
            _lazily("smith2018", "fig4"),
            "holds, at twice the batch",
        ),
        Experiment(
            "smith2018-fig5",
            PAPER_003,
            "Fig. 5",
            "batch size and training set, a perceptron",
            _lazily("smith2018", "fig5"),
            "holds: a flat minimum",
        ),
        Experiment(
            "smith2018-fig6",
            PAPER_003,
            "Fig. 6",
            "learning rate and training set, a convolutional network",
            _lazily("smith2018", "fig6"),
            "holds in part: 0.2 diverges, 0.1 and 0.05 agree",
        ),
        Experiment(
            "smith2018-ablation",
            PAPER_003,
            "footnote 2",
            "damping, prior and the best temperature",
            _lazily("smith2018", "ablation"),
            "does not hold: it moves with both",
        ),
        Experiment(
            "sngd-jeffreys",
            PAPER_003,
            "section 5",
            "the corrected rule: known targets, and two parameterisations of one model",
            _lazily("smith2018_questions", "jeffreys"),
            "holds",
        ),
        Experiment(
            "ngd-kronecker",
            PAPER_003,
            "section 2",
            "temperature with a Kronecker metric",
            _lazily("smith2018_questions", "kronecker"),
            "holds in part: a shallow minimum",
        ),
    )
}
