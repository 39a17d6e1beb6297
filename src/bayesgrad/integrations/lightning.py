"""Lightning: one callback, or one base class of a module, for every optimizer of this package.

Trainer(callbacks=[BeliefLightningCallback()])                     # the callback, or
class Classifier(BeliefModuleMixin, LightningModule): ... # a module that brings it
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from bayesgrad.integrations.automatic import Observed, attach, belief_optimizer, refuse_scaler
from bayesgrad.integrations.monitoring import diagnostics
from bayesgrad.integrations.pruning import report
from bayesgrad.optimizer import BeliefOptimizer


def _package() -> Any:
    """`pytorch_lightning` or `lightning.pytorch`: the one that is imported, else the one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("bayesgrad.integrations.lightning needs Lightning: pip install lightning.")


Callback: Any = _package().Callback
UNSCALED = "use precision='bf16-mixed' or '32-true'"


class BeliefLightningCallback(Callback):
    """Runs what optimizers of this package need beside gradients, in automatic and in manual optimisation.

    - Forward passes in training draw weights and are observed (`integrations.attach`), each micro-batch of
      `accumulate_grad_batches` too. They are those of the smallest module that has all parameters of an optimizer; if
      this is the LightningModule itself, `training_step` draws.
    - Validation, checkpoints and the model at the end of training have the weights to evaluate with
      (`optimizer.eval()`). A resumed run continues bit for bit.
    - Diagnostics go to the loggers of the Trainer, every `log_every_n_steps`.

    Args:
        observed: as for `attach`.
        save_posterior: save `optimizer.posterior(module).state_dict()` in checkpoints, under "posterior", for
            `bayesgrad.Posterior.from_state_dict`. Needs a single optimizer.

    Checked by: tests/contract/test_integrations.py.
    """

    def __init__(self, *, observed: Observed | None = None, save_posterior: bool = False) -> None:
        super().__init__()
        self.observed, self.save_posterior = observed, save_posterior

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _Saving.end(pl_module)
        pl_module.on_save_checkpoint = _Saving(self, trainer, pl_module)
        for own in _optimizers(trainer):
            # `on_before_backward` gets the loss times the scale.
            refuse_scaler(own, getattr(trainer.precision_plugin, "scaler", None), UNSCALED)
            own.train()
            model = _smallest(pl_module, own)
            attachment = attach(own, model, observed=self.observed)
            if model is pl_module and own.needs.draws and pl_module.automatic_optimization:
                self._draw_in_training_step(pl_module, attachment)

    @staticmethod
    def _draw_in_training_step(pl_module: Any, attachment: Any) -> None:
        """Its layers may be called one by one, in which case no forward pass of the module begins."""
        step = pl_module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            attachment.begin(pl_module)
            outputs = step(*args, **kwargs)
            attachment.follow(outputs)
            return outputs

        pl_module.training_step = training_step
        attachment.on_removal(lambda: pl_module.__dict__.pop("training_step", None))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        for own in _optimizers(trainer):
            if own.needs.loss and not own.needs.outputs:
                own.observe(loss=loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        every = trainer.log_every_n_steps
        if trainer.loggers and every and trainer.global_step % every == 0:
            for index, own in enumerate(_optimizers(trainer)):
                prefix = "" if len(trainer.optimizers) == 1 else f"{index}/"
                pl_module.log_dict({f"{prefix}{name}": value for name, value in diagnostics(own).items()})

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        for own in _optimizers(trainer):
            own.eval()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for own in _optimizers(trainer) if trainer.state.fn == "fit" else ():
            own.train()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Replaces weights and states of optimizers by those of evaluation mode, where they differ."""
        owns = list(_optimizers(trainer))
        before = [own.training for own in owns]
        if any(own.training and own.evaluation_weights() for own in owns):
            for own in owns:
                own.eval()
            now = trainer.strategy.lightning_module_state_dict()  # which shares memory with the weights
            checkpoint["state_dict"] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in now.items()}
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
        if self.save_posterior:
            (own,) = owns
            checkpoint["posterior"] = own.posterior(pl_module).state_dict()
        for own, training in zip(owns, before):
            if training:
                own.train()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _Saving.end(pl_module)
        for own in _optimizers(trainer):
            if own.attachment is not None:
                own.attachment.remove()
            own.eval()


class _Saving:
    """The hook of a module for checkpoints: with `save_weights_only=True` Lightning calls it, and none of callbacks."""

    def __init__(self, callback: BeliefLightningCallback, trainer: Any, pl_module: Any) -> None:
        self.callback, self.trainer, self.pl_module = callback, trainer, pl_module
        self.former, self.patched = pl_module.on_save_checkpoint, "on_save_checkpoint" in vars(pl_module)

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        if "optimizer_states" not in checkpoint:
            self.callback.on_save_checkpoint(self.trainer, self.pl_module, checkpoint)
        self.former(checkpoint)

    @staticmethod
    def end(pl_module: Any) -> None:
        """Restores the hook that the module had, also after a run that was interrupted."""
        if isinstance(own := vars(pl_module).get("on_save_checkpoint"), _Saving):
            del pl_module.on_save_checkpoint
            if own.patched:
                pl_module.on_save_checkpoint = own.former


class BeliefModuleMixin:
    """A LightningModule with this base class brings a `BeliefLightningCallback`, so that a stock Trainer trains it."""

    def configure_callbacks(self) -> list[Any]:
        """Adds the callback to those of the module."""
        others: Any = super().configure_callbacks()  # pyright: ignore[reportAttributeAccessIssue]
        return [*([others] if isinstance(others, Callback) else others), BeliefLightningCallback()]


class PruningLightningCallback(Callback):
    """Reports a logged metric after each validation to an Optuna trial, and ends the run if the trial is pruned.

    Args:
        trial: `optuna.Trial`.
        monitor: the name of a metric that the module logs, as "val_loss".
    """

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        super().__init__()
        self.trial, self.monitor = trial, monitor

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            report(self.trial, trainer.callback_metrics, self.monitor, trainer.global_step)


def _optimizers(trainer: Any) -> Iterator[BeliefOptimizer]:
    """Those of this package among the optimizers of a Trainer."""
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, BeliefOptimizer):
            yield belief_optimizer(optimizer)


def _smallest(pl_module: nn.Module, own: BeliefOptimizer) -> nn.Module:
    """The smallest module inside of a LightningModule that has all parameters of an optimizer."""
    wanted = {id(p) for group in own.param_groups for p in group["params"]}
    found = [module for module in pl_module.modules() if wanted <= {id(p) for p in module.parameters()}]
    return found[-1] if found else pl_module
