"""SpectralFOOF against transcriptions of its equation by singular values, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad.optim import SpectralFOOF

D = torch.float64
PLAIN: dict[str, Any] = {"stats_every": 1, "update_every": 1}


def polar(matrix: np.ndarray) -> np.ndarray:
    """U f(S) V', with f three odd polynomials of S over the eighth root of the sum of its eighth powers."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / (values**8).sum() ** (1 / 8)
    for a, b, c in [(8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)]:
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


def root(moment: np.ndarray, damping: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(moment / (np.trace(moment) / len(moment)))
    return vectors @ np.diag((values + damping) ** -0.5) @ vectors.T


def joint(layer: nn.Module, gradient: bool = False) -> np.ndarray:
    """[W b], or its gradient."""
    weight, bias = ((p.grad if gradient else p.detach()) for p in (layer.weight, layer.bias))
    return np.concatenate([weight.flatten(1).numpy(), bias[:, None].numpy()], 1)


def features(layer: nn.Module, x: torch.Tensor) -> np.ndarray:
    """Rows of inputs, with a one appended to each."""
    rows = F.unfold(x, layer.kernel_size, padding=layer.padding).mT if isinstance(layer, nn.Conv2d) else x
    rows = rows.reshape(-1, rows.shape[-1]).detach().numpy()
    return np.concatenate([rows, np.ones((len(rows), 1))], 1)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_steps_of_a_convolution_and_two_linear_layers_against_numpy(momentum: float) -> None:
    torch.manual_seed(0)
    conv, wide, out = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 6), nn.Linear(6, 9)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), wide, nn.Tanh(), out).to(D)
    lr, damping, ema, decay = 0.1, 0.3, 0.8, 0.2
    options = dict(lr=lr, damping=damping, ema=ema, momentum=momentum, weight_decay=decay)
    optimizer = SpectralFOOF(model, **PLAIN, **options)
    layers = [conv, wide, out]
    W = [joint(layer) for layer in layers]
    A, M = [np.zeros((w.shape[1],) * 2) for w in W], [np.zeros_like(w) for w in W]
    for _ in range(5):
        x, y = torch.randn(9, 2, 4, 4, dtype=D), torch.randint(0, 9, (9,))
        optimizer.zero_grad()
        inputs: list[np.ndarray] = []
        keep = inputs.append
        hooks = [m.register_forward_pre_hook(lambda m, a, keep=keep: keep(features(m, a[0]))) for m in layers]
        F.cross_entropy(model(x), y).backward()
        for hook in hooks:
            hook.remove()
        for i, (layer, a) in enumerate(zip(layers, inputs)):
            A[i] = ema * A[i] + (1 - ema) * a.T @ a / len(x)  # debiasing cancels
            G = joint(layer, gradient=True)
            M[i] = momentum * M[i] + (1 - momentum) * G
            R = root(A[i], damping)
            step = polar(((1 - momentum) * G + momentum * M[i]) @ R) @ R
            W[i] = (1 - lr * decay) * W[i] - lr * max(1, W[i].shape[0] / W[i].shape[1]) ** 0.5 * step
        optimizer.step()
        for layer, w in zip(layers, W):
            np.testing.assert_allclose(joint(layer), w, rtol=1e-8, atol=1e-10)


def one_step(scale: float = 1.0, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4).to(D)
    before = layer.weight.detach().clone()
    optimizer = SpectralFOOF(layer, lr=0.1, **PLAIN, **options)
    (scale * F.cross_entropy(layer(torch.randn(30, 5, dtype=D)), torch.randint(4, (30,)))).backward()
    optimizer.step()
    return layer.weight.detach() - before


def test_steps_do_not_depend_on_the_scale_of_the_loss() -> None:
    torch.testing.assert_close(one_step(1e6), one_step(), rtol=1e-9, atol=1e-12)


def test_for_large_damping_steps_are_those_of_muon() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4).to(D)
    F.cross_entropy(layer(torch.randn(30, 5, dtype=D)), torch.randint(4, (30,))).backward()
    expected = torch.from_numpy(polar(joint(layer, gradient=True)))[:, :-1]
    torch.testing.assert_close(1e4 * one_step(damping=1e8), -0.1 * expected, rtol=1e-6, atol=1e-8)


def test_the_change_of_outputs_has_equal_singular_values_where_inputs_are_white() -> None:
    """D A^(1/2) for lambda = 0 is U V': directions of outputs change as fast, up to the range of the polynomials."""
    torch.manual_seed(0)
    layer, x = (
        nn.Linear(5, 4, bias=False).to(D),
        torch.randn(30, 5, dtype=D) * torch.tensor([10, 1, 1, 1, 0.1], dtype=D),
    )
    before = layer.weight.detach().clone()
    optimizer = SpectralFOOF(layer, lr=0.1, damping=0.0, **PLAIN)
    F.cross_entropy(layer(x), torch.randint(4, (30,))).backward()
    optimizer.step()
    values, vectors = torch.linalg.eigh(x.T @ x / (x.square().sum() / 5))
    change = (layer.weight.detach() - before) @ (vectors * values.sqrt()) @ vectors.T / 0.1
    found = torch.linalg.svdvals(change)
    rank = 3  # gradients of a softmax sum to zero over classes
    assert found[:rank].min() > 0.729
    assert found[:rank].max() < 1.27
    assert found[rank] < 1e-6


def test_without_damping_directions_without_data_do_not_move() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 4, bias=False).to(D), torch.randn(30, 5, dtype=D)
    x[:, 4] = x[:, 3]  # no data in the difference of the last two inputs
    before = layer.weight.detach().clone()
    optimizer = SpectralFOOF(layer, lr=0.1, damping=0.0, **PLAIN)
    F.cross_entropy(layer(x), torch.randint(4, (30,))).backward()
    optimizer.step()
    moved = layer.weight.detach() - before
    assert 0.01 < moved.norm() < 1
    torch.testing.assert_close(moved[:, 4], moved[:, 3], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("damping", [0.0, 1e-6, 1e-5, 1e-4])
def test_damping_below_rounding_does_not_move_directions_without_data(damping: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 200, bias=False), nn.Linear(200, 10))
    x, y = torch.randn(1024, 64) @ (torch.randn(64, 256) / 8), torch.randint(10, (1024,))
    before = model[0].weight.detach().clone()
    optimizer = SpectralFOOF(model, lr=0.1, damping=damping, **PLAIN)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    moved = (model[0].weight.detach() - before).double()
    rows = torch.linalg.svd(x.double(), full_matrices=False)[2][:64]
    assert (moved - moved @ rows.T @ rows).norm() < 0.05 * moved.norm()


@pytest.mark.parametrize("damping", [4e-4, 1e-3, 1e-2])
def test_small_damping_of_correlated_inputs_and_more_outputs_than_inputs_in_float32(damping: float) -> None:
    """Singular values of D R^-1 were up to 4.7, and steps of twice the length in wrong directions."""
    torch.manual_seed(0)
    layer, turn = nn.Linear(64, 200, bias=False), torch.linalg.qr(torch.randn(64, 64))[0]
    x = torch.randn(1024, 64) @ (torch.logspace(0, -4, 64)[:, None] * turn)
    before = layer.weight.detach().clone()
    optimizer = SpectralFOOF(layer, lr=1.0, damping=damping, **PLAIN)
    (layer(x) - torch.randn(1024, 200)).square().mean().backward()
    optimizer.step()
    rows = x.double().numpy()
    R = root(rows.T @ rows, damping)
    expected = -((200 / 64) ** 0.5) * polar(layer.weight.grad.double().numpy() @ R) @ R
    moved = (layer.weight.detach() - before).double().numpy()
    assert np.linalg.norm(moved - expected) < 0.003 * np.linalg.norm(expected)


def test_a_layer_without_a_gradient_does_not_move_while_its_average_decays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = SpectralFOOF(model, momentum=0.8)
    for used in (True, False, False, True):
        before = [p.detach().clone() for p in model.parameters()]
        average = optimizer.state[model[0].weight].get("gradient_average", torch.zeros(())).clone()
        optimizer.zero_grad()
        model(torch.randn(32, 6)).square().mean().backward()
        for p in () if used else model[0].parameters():
            p.grad.zero_()
        optimizer.step()
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before)]
        assert moved == [used, used, True, True]
        if not used:
            torch.testing.assert_close(optimizer.state[model[0].weight]["gradient_average"], 0.8 * average)


def test_weight_and_bias_have_one_momentum_and_their_own_lr() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4).to(D)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.2}]
    optimizer = SpectralFOOF(layer, lr=0.1, params=groups, **PLAIN)
    F.cross_entropy(layer(torch.randn(30, 5, dtype=D)), torch.randint(4, (30,))).backward()
    optimizer.step()
    both = one_step()
    torch.testing.assert_close(layer.weight.detach() - before["weight"], both)
    optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(ValueError, match="are preconditioned together and need the same momentum"):
        optimizer.step()


def test_embeddings_and_layers_of_which_both_sides_are_large_follow_adam() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match="0.weight, 1.weight, 1.bias by Adam with learning rate fallback_lr"):
        optimizer = SpectralFOOF(model, lr=0.1, fallback_lr=1e-3, max_factor=4)
    model(torch.randint(7, (8,))).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    used = model[0].weight.grad != 0
    optimizer.step()
    moved = [(p.detach() - old).abs() for p, old in zip(model.parameters(), before)]
    torch.testing.assert_close(moved[0][used], torch.full_like(moved[0][used], 1e-3), rtol=1e-2, atol=0)
    torch.testing.assert_close(moved[1], torch.full_like(moved[1], 1e-3), rtol=1e-2, atol=0)
    assert moved[3].max() > 0.01


def test_a_state_of_a_layer_with_other_outputs_is_refused() -> None:
    torch.manual_seed(0)
    saved = SpectralFOOF(one := nn.Linear(3, 1))
    one(torch.randn(8, 3)).square().mean().backward()
    saved.step()
    with pytest.raises(ValueError, match=r"gradient_average of layer .* has shape \(1, 1, 4\) in the saved state"):
        SpectralFOOF(nn.Linear(3, 7)).load_state_dict(saved.state_dict())
