"""Khan and Rue 2023: one rule, and the family of distributions decides which algorithm it is.

The loss has a wall at the left of its minimum. With a point (a Gaussian of fixed width, and the delta method) the
rule is gradient descent and ends in the minimum. With a Gaussian it is variational Newton: it averages over its width
and stays away from the wall, by exactly 1/4 here.
"""

import matplotlib.pyplot as plt
import torch

from bayesgrad.families import FixedGaussian, Gaussian
from bayesgrad.inference import Delta, GaussHermite, Node, minimize


def loss(x):
    return (torch.exp(-4 * x) + 2 * x).sum()


zero, one = torch.zeros(1).double(), torch.eye(1).double()
point = Node(FixedGaussian(one), FixedGaussian(one).of(zero))
minimize(loss, point, expectation=Delta(), rho=0.05, steps=500)
wide = Node(Gaussian(), Gaussian().of(zero, one))
minimize(loss, wide, expectation=GaussHermite(32), rho=0.5, steps=500)
mean, deviation = wide.moments[0].item(), wide.moments[1].sqrt().item()
minimum = point.moments[0].item()
print(f"gradient descent ends at {minimum:.3f}, the minimum is log(2)/4 = 0.173")
print(f"variational Newton: mean {mean:.3f}, deviation {deviation:.3f}, {mean - minimum:.3f} further from the wall")

x = torch.linspace(-0.4, 1.6, 200).double()
figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
axis.plot(x, torch.exp(-4 * x) + 2 * x, color="#000000", label="loss")
density = torch.distributions.Normal(mean, deviation).log_prob(x).exp()
axis.fill_between(x, density, color="#4477aa", alpha=0.3, lw=0, label="Gaussian")
axis.axvline(mean, color="#4477aa", label="its mean")
axis.axvline(minimum, color="#ee6677", ls="--", label="gradient descent")
axis.set(xlabel="weight", ylabel="loss, density", ylim=(0, 4.5))
axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
