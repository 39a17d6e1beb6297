"""accelerate: the usual loop, one line for the optimizer, and a posterior at the end."""

from __future__ import annotations

import tempfile

from accelerate import Accelerator
from digits import accuracy, loaders, network, small, tensors
from torch.nn.functional import cross_entropy

from bayesgrad.integrations import attach, build_optimizer, diagnostics
from bayesgrad.metrics import classification
from bayesgrad.optim import IVON


def main(epochs: int) -> float:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train, test = loaders(25)
    model = network()
    own = build_optimizer(IVON, model, train, accumulate=2, lr=0.2, seed=0, betas=(0.9, 0.995))
    model, optimizer, train = accelerator.prepare(model, own, train)
    attach(optimizer, model)

    for _ in range(epochs):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)

    found = accuracy(model, test)
    x_test, y_test = tensors()[2:]
    scores = classification(own.posterior(model).predict(x_test, samples=32).log(), y_test)
    print(f"accuracy {found:.3f} at the mean; averaged over the posterior: {scores}")
    print(diagnostics(own))
    return found


if __name__ == "__main__":
    main(epochs=4 if small() else 30)
