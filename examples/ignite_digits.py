"""Ignite: the stock trainer with VOGN, which draws weights and uses per-example gradients."""

from __future__ import annotations

from digits import accuracy, loaders, network, small
from ignite.engine import Events, create_supervised_trainer
from torch.nn.functional import cross_entropy

from bayesgrad.integrations import attach, build_optimizer, diagnostics
from bayesgrad.optim import VOGN


def main(epochs: int) -> float:
    train, test = loaders()
    model = network()
    optimizer = build_optimizer(VOGN, model, train, lr=0.3, prior_precision=(10.0, 1.0), seed=0)
    attach(optimizer, model)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)

    @trainer.on(Events.EPOCH_COMPLETED)
    def show() -> None:
        print(trainer.state.epoch, f"accuracy {accuracy(model, test):.3f}", diagnostics(optimizer))

    trainer.run(train, max_epochs=epochs)
    return accuracy(model, test)


if __name__ == "__main__":
    main(epochs=3 if small() else 20)
