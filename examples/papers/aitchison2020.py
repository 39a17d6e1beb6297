"""Aitchison 2020: AdaBayes is Adam for strong gradients and SGD for weak ones.

Each weight gets gradients of one size. The learning rate that AdaBayes ends with is that of SGD for weights with weak
gradients, and Adam's, lr/rms(g), for weights with strong ones; between them it follows the fixed point of the filter
(Eq. 21).
"""

import matplotlib.pyplot as plt
import torch

from bayesgrad.optim import AdaBayes

rms = torch.logspace(-4, 1, 13)
weights = torch.nn.Parameter(torch.zeros(13))
optimizer = AdaBayes([weights], lr=1e-2, sgd_lr=0.1, batch_size=1, momentum=0.0)
for _ in range(5000):
    weights.grad = rms.clone()
    before = weights.detach().clone()
    optimizer.step()
measured = (before - weights.detach()).double() / rms

adam, sgd = 1e-2 / rms.double(), 0.1
curve = 1 / (1 / (2 * sgd) + (1 / (2 * sgd) ** 2 + 1 / adam**2).sqrt())
for size, rate, other in zip(rms[::3], measured[::3], adam[::3]):
    print(f"rms gradient {size:7.4f}: learning rate {rate:.4f}, Adam's {other:8.4f}, SGD's {sgd}")
print(f"largest distance from the fixed point: {100 * (measured / curve - 1).abs().max():.0f} %")

figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
axis.loglog(rms, adam, "--", color="#bbbbbb", label="Adam")
axis.axhline(sgd, ls=":", color="#bbbbbb", label="SGD")
axis.loglog(rms, curve, color="#4477aa", label="fixed point, Eq. 21")
axis.loglog(rms, measured, "o", color="#ee6677", label="AdaBayes")
axis.set(xlabel="root-mean-square gradient", ylabel="learning rate of a weight", ylim=(5e-4, 3))
axis.legend(frameon=False)
