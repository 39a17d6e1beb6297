"""Aitchison 2018: a Kalman filter normalises gradients, as RMSProp does.

Three weights get gradients of very different size. The filter's posterior variance is its learning rate, and in the
steady state it is inversely proportional to the size of the gradients. So all weights take steps of about the same
size, without a rule that says so. SGD's steps are as different as the gradients.
"""

import torch

from bayesgrad.optim import KalmanMomentum

sizes = torch.tensor([0.1, 1.0, 10.0])
weights = torch.nn.Parameter(torch.zeros(3))
optimizer = KalmanMomentum([weights], lr=1e-2, batch_size=1, momentum_decay=0.9)
generator = torch.Generator().manual_seed(0)
squares = torch.zeros(3)
for step in range(3000):
    weights.grad = sizes * torch.randn(3, generator=generator)
    before = weights.detach().clone()
    optimizer.step()
    squares += (weights.detach() - before) ** 2 * (step >= 1000)

for size, move in zip(sizes, (squares / 2000).sqrt()):
    print(f"gradients of size {size:4.1f}: steps of {1e2 * move:.2f} lr, SGD's would be {size:.1f} lr")
