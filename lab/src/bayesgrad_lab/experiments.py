"""Experiments that measure the claims of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bayesgrad_lab.context import Context
from bayesgrad_lab.report import NO_VERDICT, UNRESOLVED, Report


@dataclass(frozen=True)
class Experiment:
    """A claim of a paper and the function that measures it.

    Args:
        status: the verdict of the recorded laptop run, in a few words; its page is docs/results/<name>.md.
        unresolved: why a laptop run cannot decide the claim, in one sentence without its first capital and its full
            stop. It replaces the status in lists and the verdict in reports, until the experiment is changed.
    """

    name: str
    paper: str
    figure: str
    about: str
    run: Callable[[Context], Report]
    status: str = ""
    unresolved: str = ""

    @property
    def outcome(self) -> str:
        """The recorded outcome, for lists."""
        return f"{UNRESOLVED}: {self.unresolved}" if self.unresolved else self.status

    def report(self, context: Context) -> Report:
        """Runs the experiment. The report has a verdict only where a run of this scale can carry one."""
        report = self.run(context)
        if context.scale == "smoke":
            report.verdict = NO_VERDICT
        elif context.scale == "laptop" and self.unresolved:
            report.verdict = f"{UNRESOLVED.capitalize()}: {self.unresolved}."
        return report


def _lazily(module: str, function: str) -> Callable[[Context], Report]:
    def run(context: Context) -> Report:
        from importlib import import_module

        return getattr(import_module(f"bayesgrad_lab.{module}"), function)(context)

    return run


AITCHISON_2018 = "Aitchison, A unified theory of adaptive stochastic gradient descent as Bayesian filtering"
AITCHISON_2020 = "Aitchison, Bayesian filtering unifies adaptive and non-adaptive neural network optimization methods"
KHAN_2023 = "Khan and Rue, The Bayesian learning rule"
SMITH_2018 = "Smith et al., Stochastic natural gradient descent draws posterior samples in function space"
BENZING_2021 = "Benzing, Kronecker-factored second-order optimizers perform first-order descent on neurons"
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "aitchison2018-momentum",
            AITCHISON_2018,
            "Eq. 15-21",
            "where the filter is Adam, RMSProp, or neither",
            _lazily("aitchison2018", "momentum"),
            "Adam on 22 % of the map, RMSProp on 12 %",
        ),
        Experiment(
            "aitchison2018-kronecker",
            AITCHISON_2018,
            "section 2.1",
            "the limits of Kronecker factors",
            _lazily("aitchison2018", "kronecker"),
            "holds",
        ),
        Experiment(
            "aitchison2018-convergence",
            AITCHISON_2018,
            "section 2.2.3",
            "Reddi et al.'s counter-examples to Adam",
            _lazily("aitchison2018_convergence", "convergence"),
            "holds in part",
        ),
        Experiment(
            "aitchison2018-open-questions",
            AITCHISON_2018,
            "section 2.2",
            "each suggestion against its plain counterpart",
            _lazily("aitchison2018_questions", "open_questions"),
            unresolved="the 1/k correction shrinks the step as well as the evidence, and KalmanMomentum was scored "
            "at its predicted weights instead of its posterior mean",
        ),
        Experiment(
            "aitchison2020-fig1",
            AITCHISON_2020,
            "Fig. 1",
            "the optimum of one weight drifts while the others are trained",
            _lazily("aitchison2020", "fig1"),
            "holds",
        ),
        Experiment(
            "aitchison2020-fig3",
            AITCHISON_2020,
            "Fig. 3",
            "measured learning rates against the fixed-point curve",
            _lazily("aitchison2020", "fig3"),
            "holds",
        ),
        Experiment(
            "aitchison2020-table1",
            AITCHISON_2020,
            "Table 1, Fig. 4, A1-A5",
            "ten optimizers on a ResNet and a DenseNet",
            _lazily("aitchison2020", "table1"),
            unresolved="sgd_lr was searched at 100 lr only, weight decay was an L2 penalty for some methods and "
            "decoupled for others, and 18 of 20 learning rates are at the edge of the grid",
        ),
        Experiment(
            "benzing2021-fig1",
            BENZING_2021,
            "Fig. 1",
            "exact natural gradients: time of a step, and loss beside KFAC's",
            _lazily("benzing2021", "fig1"),
            "holds",
        ),
        Experiment(
            "benzing2021-fig2",
            BENZING_2021,
            "Fig. 2, 6",
            "KFAC and natural gradients with the same data in their Fishers",
            _lazily("benzing2021", "fig2"),
            unresolved="KFAC of one batch diverged for one of three seeds in parts A and B, and KFAC's damping is "
            "the lowest of its grid in every part",
        ),
        Experiment(
            "benzing2021-fig3",
            BENZING_2021,
            "Fig. 3, 7",
            "KFAC and layer-wise natural gradients",
            _lazily("benzing2021", "fig3"),
            "holds",
        ),
        Experiment(
            "benzing2021-fig4",
            BENZING_2021,
            "Fig. 4, 8",
            "damping, KFAC's similarity to FOOF, and its loss",
            _lazily("benzing2021", "fig4"),
            unresolved="the dampings of KFAC end at 0.1, where its similarity to FOOF still rises, and the rule "
            "compares the losses at the two ends of this grid",
        ),
        Experiment(
            "benzing2021-fig5",
            BENZING_2021,
            "Fig. 5",
            "FOOF against KFAC: time and loss",
            _lazily("benzing2021", "fig5"),
            "time holds, loss in part at laptop scale",
        ),
        Experiment(
            "benzing2021-fig9",
            BENZING_2021,
            "Fig. 9, 10",
            "Fisher and gradient from the same batch or from two",
            _lazily("benzing2021", "fig9"),
            "holds",
        ),
        Experiment(
            "benzing2021-conv",
            BENZING_2021,
            "section 4",
            "KFAC, natural gradients and FOOF on a convolutional network",
            _lazily("benzing2021", "conv"),
            "holds",
        ),
        Experiment(
            "benzing2021-laplace",
            BENZING_2021,
            "appendix C",
            "Laplace's method with the input factor alone",
            _lazily("benzing2021_laplace", "input_factor"),
            "holds for draws; linearised, except in AUROC",
        ),
        Experiment(
            "khan2023-fig1",
            KHAN_2023,
            "Fig. 1",
            "the solution near a wall, and at sharp and flat minima",
            _lazily("khan2023", "fig1"),
            "holds for beliefs that start wide",
        ),
        Experiment(
            "khan2023-multimodal",
            KHAN_2023,
            "section 3.2",
            "components of a mixture in separate minima",
            _lazily("khan2023_multimodal", "multimodal"),
            "holds",
        ),
        Experiment(
            "khan2023-svi",
            KHAN_2023,
            "section 5.3",
            "topics of documents: time of streams and of sweeps",
            _lazily("khan2023_svi", "topics"),
            "holds in part: streams equal sweeps",
        ),
        Experiment(
            "khan2023-table1",
            KHAN_2023,
            "Table 1",
            "every algorithm of the table as one step, beside other code",
            _lazily("khan2023_table1", "table1"),
            "holds",
        ),
        Experiment(
            "khan2023-uncertainty",
            KHAN_2023,
            "section 4.4",
            "variational rules, Adam, dropout and ensembles",
            _lazily("khan2023", "uncertainty"),
            "holds on Fashion-MNIST, after 30 epochs only",
        ),
        Experiment(
            "khan2023-laplace-vs-variational",
            KHAN_2023,
            "section 4.4",
            "Laplace's method against VOGN and IVON, with equal training",
            _lazily("khan2023_laplace", "against"),
            "NLL holds, ECE in part, AUROC does not",
        ),
        Experiment(
            "khan2023-binary",
            KHAN_2023,
            "section 4.5",
            "binary networks: STE against BayesBiNN",
            _lazily("khan2023", "binary"),
            unresolved="small networks (two hidden layers of 64 or 128 units) were trained for 600 and 1,000 steps, "
            "whereas Meng et al. train larger ones for hundreds of epochs",
        ),
        Experiment(
            "uci-regression",
            "No paper; data of Hernandez-Lobato and Adams, Probabilistic backpropagation",
            "",
            "MAP, Laplace's method and variational rules on six small regressions",
            _lazily("uci", "regression"),
            "full matrix ahead of MAP on five of six",
        ),
        Experiment(
            "continual-mnist",
            BENZING_2021,
            "appendices A.2 and C",
            "a sequence of tasks: EWC and chained beliefs",
            _lazily("continual", "continual"),
            "A.2 holds for exact Fishers, C nearly holds",
        ),
        Experiment(
            "smith2018-fig1",
            SMITH_2018,
            "Fig. 1",
            "samples of Langevin dynamics and of minibatches",
            _lazily("smith2018_logistic", "fig1"),
            "holds roughly: damping narrows a flat direction",
        ),
        Experiment(
            "smith2018-fig2",
            SMITH_2018,
            "Fig. 2",
            "the temperature of Langevin dynamics, logistic regression",
            _lazily("smith2018_logistic", "fig2"),
            "holds",
        ),
        Experiment(
            "smith2018-fig3",
            SMITH_2018,
            "Fig. 3",
            "the temperature of minibatches, logistic regression",
            _lazily("smith2018_logistic", "fig3"),
            "holds",
        ),
        Experiment(
            "smith2018-fig4",
            SMITH_2018,
            "Fig. 4",
            "the batch size of natural gradients, a perceptron",
            _lazily("smith2018", "fig4"),
            unresolved="the rule accepts three of the five batch sizes tried, and the best batch size, 128, is the "
            "largest that it accepts",
        ),
        Experiment(
            "smith2018-fig5",
            SMITH_2018,
            "Fig. 5",
            "batch size and training set, a perceptron",
            _lazily("smith2018", "fig5"),
            "holds: a flat minimum",
        ),
        Experiment(
            "smith2018-fig6",
            SMITH_2018,
            "Fig. 6",
            "learning rate and training set, a convolutional network",
            _lazily("smith2018", "fig6"),
            unresolved="one seed was run",
        ),
        Experiment(
            "smith2018-ablation",
            SMITH_2018,
            "footnote 2",
            "damping, prior and the best temperature",
            _lazily("smith2018", "ablation"),
            unresolved="the temperatures tried span a factor of 5, hardly more than the factor of 4 that the rule "
            "allows, and three of five minima are at the edge of the grid",
        ),
        Experiment(
            "sngd-jeffreys",
            SMITH_2018,
            "section 5",
            "the corrected rule: known targets, two parameterisations",
            _lazily("smith2018_questions", "jeffreys"),
            "holds",
        ),
        Experiment(
            "ngd-kronecker",
            SMITH_2018,
            "section 2",
            "temperature with a Kronecker metric",
            _lazily("smith2018_questions", "kronecker"),
            "holds in part: a shallow minimum",
        ),
    )
}
