"""Hugging Face's Trainer: one callback, and the stock Trainer trains with every optimizer of this package.

Trainer(model, arguments, optimizers=(optimizer, scheduler), callbacks=[BeliefTrainerCallback()], ...)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bayesgrad.integrations.automatic import Observed, attach, belief_optimizer
from bayesgrad.integrations.monitoring import Log, diagnostics
from bayesgrad.integrations.pruning import report

try:
    from transformers import TrainerCallback
except ImportError as error:  # pragma: no cover
    raise ImportError("bayesgrad.integrations.huggingface needs transformers: pip install transformers.") from error

POSTERIOR = "posterior.safetensors"  # in the folder of a checkpoint


class BeliefTrainerCallback(TrainerCallback):
    """Runs what an optimizer of this package needs beside gradients, in the stock Trainer.

    - Forward passes in training draw weights and are observed (`integrations.attach`), with the mask of the labels.
    - Checkpoints, and the model at the end of training, have the weights to evaluate with (`optimizer.eval()`);
      Trainer itself switches to them for an evaluation, and back for the next step. A resumed run continues bit for
      bit.
    - Diagnostics of the optimizer are added to the logs.

    Args:
        observed: as for `attach`; needed where Trainer keeps labels from the model, as for label smoothing, or if
            outputs are not logits.
        save_posterior: save `optimizer.posterior(model)` in the folder of each checkpoint, as posterior.safetensors.
        log: a function that takes diagnostics, as `log(values, step=step)`: `wandb.log`, `mlflow.log_metrics`,
            `accelerator.log`. They are in the logs of Trainer too, but only for callbacks after this one.

    Checked by: tests/contract/test_integrations.py.
    """

    def __init__(
        self, *, observed: Observed | None = None, save_posterior: bool = False, log: Log | None = None
    ) -> None:
        self.observed, self.save_posterior, self.log = observed, save_posterior, log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = belief_optimizer(kwargs["optimizer"])
        if own.needs.loss and args.world_size > 1 and args.average_tokens_across_devices:
            # Trainer multiplies the loss of the model by the number of processes, in place.
            raise ValueError(
                f"{type(own).__name__} needs second derivatives of the loss of each process, but Trainer multiplies it "
                "by the number of processes: use TrainingArguments(average_tokens_across_devices=False)."
            )
        attach(kwargs["optimizer"], kwargs["model"], observed=self.observed)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            belief_optimizer(kwargs["optimizer"]).eval()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.save_posterior and args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"save_posterior=True saves beside a checkpoint, but there is no {folder}: save "
                    "optimizer.posterior(model) after a hyperparameter search instead."
                )
            belief_optimizer(kwargs["optimizer"]).posterior(kwargs["model"]).save(folder / POSTERIOR)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            values = diagnostics(belief_optimizer(kwargs["optimizer"]))
            logs.update(values)
            state.log_history[-1].update(values)
            if self.log is not None and state.is_world_process_zero:
                self.log(values, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = belief_optimizer(kwargs["optimizer"])
        if own.attachment is not None:
            own.attachment.remove()
        params = [p for group in own.param_groups for p in group["params"]]
        loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = [p.detach().clone() for p in params] if loaded else []  # weights to evaluate with, as checkpoints have
        own.eval()
        with torch.no_grad():
            for p, value in zip(params, best):
                p.copy_(value)


class PruningTrainerCallback(TrainerCallback):
    """Reports a metric of each evaluation to an Optuna trial, and ends the run if the trial is pruned.

    Args:
        trial: `optuna.Trial`.
        monitor: the name of a metric of `Trainer.evaluate`, as "eval_loss".
    """

    def __init__(self, trial: Any, monitor: str = "eval_loss") -> None:
        self.trial, self.monitor = trial, monitor

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        report(self.trial, metrics, self.monitor, state.global_step)
