"""Draws docs/first-page.png, the figure of the README: python docs/first_page.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import bayesgrad
from bayesgrad.plots import PALETTE, add_legend, new_figure, save_figure


def regression(axis) -> None:
    """A trained network, and the band of `laplace`, which opens where there are no data."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(100, 1) - 2, torch.rand(100, 1) + 1])
    y = torch.sin(2 * x) + 0.1 * torch.randn(200, 1)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(1000):
        adam.zero_grad()
        mse_loss(model(x), y).backward()
        adam.step()
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood="gaussian").tune_prior()
    grid = torch.linspace(-3.2, 3.2, 200)[:, None]
    lower, upper = posterior.interval(grid, level=0.9)
    band = (part.detach().flatten().numpy() for part in (grid, lower, upper))
    axis.fill_between(*band, color=PALETTE[0], alpha=0.3, lw=0, label="90 % interval of laplace()")
    axis.plot(grid, model(grid).detach(), color=PALETTE[0], label="trained network")
    axis.plot(x, y, ".", color=PALETTE[7], ms=3, alpha=0.6, label="data")
    axis.set(title="network and posterior", xlabel="x", ylabel="y", ylim=(-3, 3))


def classifier(kind: str, x: Tensor, y: Tensor, ground: Tensor) -> Tensor:
    """The probability of the second class, by AdamW's network or averaged over IVON's posterior."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    options = {"lr": 0.1, "num_data": len(x), "betas": (0.9, 0.995), "hess_init": 0.1}
    ivon = bayesgrad.optim.IVON(model.parameters(), **options)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(1000):
        rows = torch.randint(len(x), (50,))
        if kind == "IVON":
            with ivon.sampled():
                ivon.zero_grad()
                cross_entropy(model(x[rows]), y[rows]).backward()
            ivon.step()
        else:
            adamw.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            adamw.step()
    flat = ground.reshape(-1, 2)
    p = ivon.posterior(model).predict(flat, samples=64) if kind == "IVON" else model(flat).softmax(-1)
    return p[:, 1].reshape(ground.shape[:-1]).detach()


def main() -> None:
    figure, (first, *others) = new_figure(3, 3.0, columns=3)
    regression(first)
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = (x.prod(dim=1) + 0.5 * torch.randn(200) > 0).long()
    side = torch.linspace(-5, 5, 101)
    ground = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    drawn = None
    for axis, kind, words in zip(others, ("AdamW", "IVON"), ("AdamW", "IVON, averaged")):
        values = classifier(kind, x, y, ground)
        drawn = axis.pcolormesh(side, side, values, cmap="RdBu_r", vmin=0, vmax=1, shading="gouraud", rasterized=True)
        axis.contour(side, side, values, levels=[0.5], colors="black", linewidths=1)
        for label, mark, colour in ((0, "o", PALETTE[0]), (1, "^", PALETTE[1])):
            axis.plot(*x[y == label].T, mark, ms=4, color=colour, mec="white", mew=0.5, label=f"class {label}")
        axis.set(title=words, xlabel="first input", ylabel="second input")
        axis.grid(visible=False)
    add_legend(figure, [first, *others], columns=3)
    figure.colorbar(drawn, ax=others[-1], label="probability of class 1")
    save_figure(figure, Path(__file__).with_name("first-page.png"))


if __name__ == "__main__":
    main()
