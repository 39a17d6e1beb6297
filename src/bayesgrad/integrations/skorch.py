"""skorch: estimators whose `optimizer` may be any class of `bayesgrad.optim`, with its options as `optimizer__...`.

BeliefClassifier(module, criterion=nn.CrossEntropyLoss, optimizer=IVON, lr=0.1).fit(X, y)
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from bayesgrad.integrations.automatic import attach
from bayesgrad.integrations.pruning import report

try:
    from skorch import NeuralNet, NeuralNetClassifier, NeuralNetRegressor
    from skorch.callbacks import Callback
except ImportError as error:  # pragma: no cover
    raise ImportError("bayesgrad.integrations.skorch needs skorch: pip install skorch.") from error


class BeliefNetMixin(NeuralNet):
    """A base class of nets that train with the optimizers of this package.

    - Optimizers that take the model get it. `num_data` is the number of training examples of the first `fit`, and
      `batch_size` that of the training iterator, at most `num_data`, unless given (`optimizer__num_data=1000`).
    - Training steps draw weights and are observed (`integrations.attach`).
    - Validation, prediction and saved parameters have the weights to evaluate with (`optimizer.eval()`).

    Write it before the net: `class Net(BeliefNetMixin, NeuralNetBinaryClassifier)`.

    Checked by: tests/contract/test_integrations.py.
    """

    optimizer_: Any
    uncounted_: tuple[str, ...] = ()  # options that are still to be set: num_data, batch_size

    def initialize_optimizer(self, triggered_directly: Any = None) -> Any:
        (groups, *_), options = self.get_params_for_optimizer("optimizer", self.get_all_learnable_params())
        kind: Any = self.optimizer
        known = inspect.signature(kind).parameters
        self.uncounted_ = tuple(n for n in ("num_data", "batch_size") if n in known and n not in options)
        if "num_data" in self.uncounted_:
            if options.get("prior") is not None:
                raise ValueError("optimizer__prior needs the number of training examples: pass optimizer__num_data.")
            options["num_data"] = 1.0
        if "batch_size" in self.uncounted_:
            options["batch_size"] = max(1, self._batch_size())  # -1: all examples
        takes_model = getattr(kind, "takes_model", False)
        self.optimizer_ = kind(self.module_, params=groups, **options) if takes_model else kind(groups, **options)
        if self.optimizer_.needs.outputs and isinstance(self.criterion_, nn.NLLLoss):
            raise ValueError(
                f"{kind.__name__} draws labels from logits, but outputs for NLLLoss are probabilities: pass "
                "criterion=nn.CrossEntropyLoss, and a module without softmax."
            )
        return self

    def _batch_size(self) -> int:
        """That of the training iterator; -1 for all examples."""
        return self.get_params_for("iterator_train").get("batch_size", self.batch_size)

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        super().on_train_begin(net, X, y, **kwargs)
        attach(self.optimizer_, self.module_)

    def on_epoch_begin(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **kwargs: Any) -> None:
        super().on_epoch_begin(net, dataset_train, dataset_valid, **kwargs)
        if self.uncounted_ and not self.optimizer_.state:
            number, size = len(dataset_train), self._batch_size()
            found = {"num_data": number, "batch_size": number if size == -1 else min(size, number)}
            for group in self.optimizer_.param_groups:
                # Groups of `optimizer__param_groups` may have their own.
                group |= {n: found[n] for n in self.uncounted_ if group[n] == self.optimizer_.defaults[n]}
        self.uncounted_ = ()

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        self.optimizer_.train()
        return super().train_step(batch, **fit_params)

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, training: bool = False, **kwargs: Any) -> Any:
        loss = super().get_loss(y_pred, y_true, *args, training=training, **kwargs)
        if training and self.optimizer_.needs.loss:
            self.optimizer_.observe(y_pred, loss=loss)
        return loss

    def validation_step(self, batch: Any, **fit_params: Any) -> Any:
        self.optimizer_.eval()
        return super().validation_step(batch, **fit_params)

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        self.optimizer_.eval()
        return super().evaluation_step(batch, training=training)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        super().on_train_end(net, X, y, **kwargs)
        if self.optimizer_.attachment is not None:
            self.optimizer_.attachment.remove()
        self.optimizer_.eval()

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer_.train()
        return super().load_params(*args, **kwargs)


class BeliefClassifier(BeliefNetMixin, NeuralNetClassifier):
    """`skorch.NeuralNetClassifier` for the optimizers of this package."""


class BeliefRegressor(BeliefNetMixin, NeuralNetRegressor):
    """`skorch.NeuralNetRegressor` for the optimizers of this package."""


class PruningSkorchCallback(Callback):
    """Reports a number of the history after each epoch to an Optuna trial, and ends the run if the trial is pruned.

    Args:
        trial: `optuna.Trial`.
        monitor: the name of a number in the history, as "valid_loss".
    """

    def __init__(self, trial: Any, monitor: str = "valid_loss") -> None:
        self.trial, self.monitor = trial, monitor

    def on_epoch_end(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **kwargs: Any) -> None:
        report(self.trial, net.history[-1], self.monitor, len(net.history))
