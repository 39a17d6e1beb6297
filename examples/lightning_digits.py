"""Lightning: a module without a line for the optimizer, and a callback; accumulation, clipping and checkpoints."""

from __future__ import annotations

import tempfile

import pytorch_lightning as pl
import torch
from digits import accuracy, loaders, network, small
from torch.nn.functional import cross_entropy

from bayesgrad.integrations import build_optimizer
from bayesgrad.integrations.lightning import BeliefLightningCallback
from bayesgrad.optim import VOGN, KalmanMomentum, KroneckerFilterFP


class Digits(pl.LightningModule):
    def __init__(self, kind: type, options: dict) -> None:
        super().__init__()
        self.net, self.kind, self.options = network(), kind, options

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.kind, self.net, loaders(25)[0], accumulate=2, **self.options)


def main(epochs: int) -> dict[str, float]:
    found = {}
    rules = [
        (KroneckerFilterFP, {"lr": 1e-3, "weight_decay": 0.01, "seed": 0}),
        (KalmanMomentum, {"lr": 3e-3}),
        (VOGN, {"lr": 0.3, "prior_precision": 10.0, "seed": 0}),
    ]
    for kind, options in rules:
        train, test = loaders(25)
        module = Digits(kind, options)
        trainer = pl.Trainer(
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            callbacks=[BeliefLightningCallback()],
            default_root_dir=tempfile.mkdtemp(),
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, train, test)  # which ends with the weights to evaluate with
        found[kind.__name__] = accuracy(module.net, test)
        print(
            kind.__name__, f"accuracy {found[kind.__name__]:.3f}, val_loss {trainer.callback_metrics['val_loss']:.3f}"
        )
    return found


if __name__ == "__main__":
    main(epochs=3 if small() else 15)
