"""Smith et al. 2018: minibatch natural gradients draw samples from the posterior, if the batch size is right.

A logistic regression with two weights and 1,000 examples. The noise of minibatches takes the place of that of
Langevin dynamics. At B = lr N/(2 + lr), where the temperature is 1, the weights have the variance of the posterior; a
batch of a quarter of this size multiplies it by about four.
"""

import warnings

import torch
from torch.nn.functional import cross_entropy

from bayesgrad import samplers

torch.manual_seed(0)
N, lr = 1000, 0.1
x = torch.randn(N, 2)
y = (torch.rand(N) < torch.sigmoid(2 * x[:, 0] - x[:, 1])).long()
model = torch.nn.Linear(2, 2, bias=False)
right = round(samplers.batch_size(1.0, lr, N))
warnings.filterwarnings("ignore", "lr=.* samples at temperature 4")  # the second batch size is wrong on purpose
for batch_size in (right, right // 4):
    options = {"num_data": N, "batch_size": batch_size, "prior_precision": 1.0, "metric": "fisher", "damping": 1e-3}
    sampler = samplers.SNGD(model, lr, **options, seed=0)
    draws = []
    for step in range(2000):
        sampler.zero_grad()
        if step % 10 == 0:
            sampler.observe(model(x))  # the Fisher matrix of all examples
        rows = torch.randperm(N)[:batch_size]
        cross_entropy(model(x[rows]), y[rows]).backward()
        sampler.step()
        draws.append((model.weight[1] - model.weight[0]).detach().clone())
    found = torch.stack(draws[500:])
    p = torch.sigmoid(x @ found.mean(0))
    posterior = torch.linalg.inv(x.T @ (x * (p * (1 - p))[:, None]) + torch.eye(2) / 2)  # Laplace's approximation
    ratio = found.var(0) / posterior.diagonal()
    print(
        f"batches of {batch_size}: T = {sampler.temperature():.2f}, variance {ratio.mean():.1f} times the posterior's"
    )
