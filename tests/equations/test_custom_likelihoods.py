"""Likelihoods that users define, against built-in ones and explicit Jacobians; Gaussian data with a noise output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import bayesgrad
from bayesgrad.custom_likelihoods import CustomLikelihood, HeteroscedasticGaussian
from bayesgrad.likelihoods import Likelihood, named
from bayesgrad.posterior import load
from bayesgrad.predictions import Decomposed, NoisyMoments

close = torch.testing.assert_close
D = torch.float64


class OwnCategorical(CustomLikelihood):
    """The softmax likelihood, from its loss and Hessian alone."""

    kind = "own_categorical"

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    def hessian(self, outputs: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]

    def link(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)


@dataclass(frozen=True)
class StudentT(CustomLikelihood):
    """Student's t: the expected Hessian is (d + 1)/((d + 3) s^2)."""

    kind = "student"
    degrees: float
    scale: float = 1.0

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -torch.distributions.StudentT(self.degrees, outputs, self.scale).log_prob(labels).flatten(1).sum(1)

    def hessian(self, outputs: Tensor) -> Tensor:
        value = (self.degrees + 1) / (self.degrees + 3) / self.scale**2
        return value * torch.eye(outputs[0].numel()).to(outputs).expand(len(outputs), -1, -1)

    def link(self, outputs: Tensor) -> Tensor:
        return outputs


def data(outputs: int, seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double(), torch.randn(8, 3, dtype=D)


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "subsampled"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_defined_softmax_is_the_built_in_one(structure: str, fisher: str) -> None:
    model, x = data(3)
    y = torch.arange(8) % 3
    options: dict[str, Any] = dict(structure=structure, fisher=fisher, prior_precision=2.0)
    ours = bayesgrad.laplace(model, [(x, y)], likelihood=OwnCategorical(), **options)
    built_in = bayesgrad.laplace(model, [(x, y)], likelihood="categorical", **options)
    for name, variance in built_in.variance().items():
        close(ours.variance()[name], variance, rtol=1e-9, atol=1e-12)
    close(ours.log_marginal_likelihood(), built_in.log_marginal_likelihood(), rtol=1e-10, atol=1e-10)
    close(ours.predict(x, 7), built_in.predict(x, 7, link="mc"), rtol=1e-9, atol=1e-12)
    weights = built_in.sample(3)
    close(ours.log_prob(weights), built_in.log_prob(weights), rtol=1e-9, atol=1e-9)
    if structure != "subsampled":  # whose samples use the roots of the Hessian, which are not unique
        close(ours.predict(x, 7, "mc"), built_in.predict(x, 7, "mc"), rtol=1e-9, atol=1e-12)
        bounds = [p.elbo([(x, y)], prior_precision=2.0, samples=3) for p in (ours, built_in)]
        assert bounds[0].value == pytest.approx(bounds[1].value, rel=1e-9)


def test_derivatives_follow_from_the_definition() -> None:
    own, built_in = OwnCategorical(), named("categorical")
    outputs, v = torch.randn(5, 3, dtype=D), torch.randn(2, 5, 3, dtype=D)
    labels = torch.tensor([0, 1, 2, 0, 1])
    close(own.residual(outputs, labels), built_in.residual(outputs, labels))
    close(own.hessian_product(outputs, v), built_in.hessian_product(outputs, v))
    close(own.third_product(outputs, v), built_in.third_product(outputs, v))
    close(sum_of_roots(own, outputs), sum_of_roots(built_in, outputs))


def sum_of_roots(kind: Likelihood, outputs: Tensor) -> Tensor:
    return sum((r[:, :, None] * r[:, None] for r in kind.hessian_roots(outputs)), torch.zeros(()))


def test_what_a_definition_lacks_is_named() -> None:
    model, x = data(3)
    y = torch.arange(8) % 3
    with pytest.raises(TypeError, match="own_categorical must define sample"):
        bayesgrad.laplace(model, [(x, y)], likelihood=OwnCategorical(), fisher="sampled")
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood=OwnCategorical())
    with pytest.raises(TypeError, match="own_categorical must define aleatoric"):
        posterior.predict(x, decompose=True)

    class Negative(OwnCategorical):
        kind = "negative"

        def hessian(self, outputs: Tensor) -> Tensor:
            return -super().hessian(outputs)

    class Wrong(OwnCategorical):
        kind = "wrong"

        def hessian(self, outputs: Tensor) -> Tensor:
            return super().hessian(outputs)[0]

    with pytest.raises(ValueError, match="positive semi-definite: return the Hessian expected over labels"):
        bayesgrad.laplace(model, [(x, y)], likelihood=Negative())

    class Lopsided(OwnCategorical):
        kind = "lopsided"

        def hessian(self, outputs: Tensor) -> Tensor:
            return super().hessian(outputs).tril()

    with pytest.raises(ValueError, match=r"hessian\(\) must return shape \(8, 3, 3\)"):
        bayesgrad.laplace(model, [(x, y)], likelihood=Wrong())
    with pytest.raises(ValueError, match=r"hessian\(\) must be finite and symmetric"):
        bayesgrad.laplace(model, [(x, y)], likelihood=Lopsided())
    with pytest.raises(ValueError, match=r"likelihood 'own_categorical' has no noise: leave noise_scale out, got 0\.3"):
        bayesgrad.laplace(model, [(x, y)], likelihood=OwnCategorical(), noise_scale=0.3)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_that_are_not_one_for_each_example_are_refused(reduction: str, fisher: str) -> None:
    """The evidence, and the empirical Fisher of a mean, would be those of other data without a word."""

    class Reduced(OwnCategorical):
        kind = "reduced"

        def hessian(self, outputs: Tensor) -> Tensor:
            return torch.eye(2, dtype=outputs.dtype).expand(len(outputs), 2, 2)

        def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
            each = (outputs - labels).square() / 2
            return each if reduction == "none" else getattr(each, reduction)()

    model, x = data(2)
    loader = [(x, torch.zeros(8, 2, dtype=x.dtype))]
    with pytest.raises(ValueError, match=r"reduced.loss must return one number for each of 8 examples.*got shape"):
        bayesgrad.laplace(model, loader, likelihood=Reduced(), fisher=fisher)
    posterior = bayesgrad.laplace(model, loader, likelihood="gaussian", noise_scale=1.0)
    with pytest.raises(ValueError, match=r"reduced.loss must return one number for each of 8 examples"):
        posterior.elbo(loader, prior_precision=1.0, likelihood=Reduced(), samples=2)


def test_parameters_of_a_definition_are_saved(tmp_path: Path) -> None:
    model, x = data(1)
    posterior = bayesgrad.laplace(model, [(x, torch.randn(8, 1, dtype=D))], likelihood=StudentT(5.0, scale=0.3))
    assert posterior.likelihood == StudentT(5.0, 0.3)
    assert "likelihood=student(degrees=5.0, scale=0.3)" in repr(posterior)
    posterior.save(tmp_path / "posterior")
    again = load(tmp_path / "posterior", model)
    assert named(again.likelihood) == StudentT(5.0, 0.3)
    assert posterior.to(D).likelihood == StudentT(5.0, 0.3)
    close(again.predict(x), posterior.predict(x))
    assert named("student(degrees=4.0)") == StudentT(4.0)


def test_a_student_likelihood_has_the_gauss_newton_matrix_of_its_definition() -> None:
    model, x = data(1)
    y = torch.randn(8, 1, dtype=D)
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood=StudentT(5.0, 0.5), structure="full", prior_precision=1.0)
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(posterior.mean)
    J = torch.cat([part.flatten(2) for part in jacobian.values()], 2)[:, 0]
    (belief,) = posterior.beliefs.values()
    close(belief.precision.to_dense(), 6 / 8 / 0.25 * J.T @ J + torch.eye(J.shape[1], dtype=D), rtol=1e-8, atol=1e-8)


def test_densities_of_held_out_labels_are_averages_over_outputs() -> None:
    """Against quadrature for one output; 256 draws have a relative error of a few percent."""
    kind, mean, variance = StudentT(5.0), torch.tensor([[0.3], [-1.0]], dtype=D), torch.tensor([[0.5], [0.1]], dtype=D)
    labels = torch.tensor([[1.0], [0.5]], dtype=D)
    nodes = torch.linspace(-8, 8, 2001, dtype=D)
    weights = (-nodes.square() / 2).softmax(0)
    f = mean + variance.sqrt() * nodes
    density = (torch.distributions.StudentT(5.0, f).log_prob(labels).exp() * weights).sum(1)
    close(kind.log_density(mean, variance, labels), density.log(), rtol=0.0, atol=0.1)


# --- heteroscedastic Gaussian data ---


def heteroscedastic(K: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = data(2 * K)
    return model, x, torch.randn(8, K, dtype=D)


def test_its_loss_is_torchs_and_its_hessian_is_the_expected_one() -> None:
    _, _, y = heteroscedastic()
    kind, outputs = HeteroscedasticGaussian(), torch.randn(8, 4, dtype=D)
    mean, variance = outputs[:, :2], outputs[:, 2:].exp()
    expected = nn.functional.gaussian_nll_loss(mean, y, variance, full=True, reduction="none").sum(1)
    close(kind.loss(outputs, y), expected)
    close(kind.loss(outputs, y), -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(1))
    close(kind.residual(outputs, y), vmap(jacrev(lambda f, y: kind.loss(f[None], y[None])[0]))(outputs, y))
    # The loss is quadratic in y, so the labels mean +- deviation have the expected Hessian.
    root = variance.sqrt()
    signs = [torch.tensor([i, j], dtype=D) for i in (-1, 1) for j in (-1, 1)]
    each = [vmap(jacrev(jacrev(lambda f, y: kind.loss(f[None], y[None])[0])))(outputs, mean + s * root) for s in signs]
    close(kind.hessian(outputs), torch.stack(each).mean(0))
    close(sum_of_roots(kind, outputs), kind.hessian(outputs))
    v = torch.randn(8, 4, dtype=D)
    close(kind.hessian_product(outputs, v), (kind.hessian(outputs) @ v[..., None])[..., 0])
    drawn = kind.sample(outputs[:1].expand(4000, -1), torch.Generator().manual_seed(0))
    close(drawn.var(0) / variance[0], torch.ones(2, dtype=D), rtol=0, atol=5 * (2 / 4000) ** 0.5)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_its_posterior_is_that_of_explicit_jacobians(structure: str) -> None:
    model, x, y = heteroscedastic()
    kind = HeteroscedasticGaussian()
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood=kind, structure=structure, prior_precision=0.7)
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(posterior.mean)
    J = torch.cat([part.flatten(2) for part in jacobian.values()], 2)
    H = torch.einsum("nip,nij,njq->pq", J, kind.hessian(model(x).detach()), J)
    P = 0.7 * torch.eye(len(H), dtype=D) + (H if structure == "full" else torch.diag(H.diagonal()))
    S = torch.linalg.inv(P)
    outputs, spread = model(x).detach(), torch.einsum("nip,pq,niq->ni", J, S, J)
    found = posterior.predict(x)
    assert isinstance(found, NoisyMoments)
    close(found.mean, outputs[:, :2])
    close(found.variance, spread[:, :2], rtol=1e-9, atol=1e-12)
    close(found.noise, (outputs[:, 2:] + spread[:, 2:] / 2).exp(), rtol=1e-9, atol=1e-12)
    parts = posterior.predict(x, decompose=True)
    assert isinstance(parts, Decomposed)
    close(parts.total, found.variance + found.noise)
    log_loss = float(kind.loss(outputs, y).sum())
    weights = torch.cat([w.flatten() for w in posterior.mean.values()])
    evidence = -log_loss - 0.35 * weights.square().sum() - torch.linalg.slogdet(P / 0.7)[1] / 2
    close(posterior.log_marginal_likelihood(), evidence, rtol=1e-9, atol=1e-9)


def test_its_averages_over_samples_and_its_densities() -> None:
    model, x, y = heteroscedastic(1)
    kind = HeteroscedasticGaussian()
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood=kind, structure="full", prior_precision=5.0)
    draws = posterior.predictive_samples(x, 50)
    found = posterior.predict(x, 50, "mc")
    assert isinstance(found, NoisyMoments)
    close(found.mean, draws[..., :1].mean(0))
    close(found.variance, draws[..., :1].var(0, correction=0))
    close(found.noise, draws[..., 1:].exp().mean(0))
    mean, variance = torch.tensor([[0.2, -0.5]], dtype=D), torch.tensor([[0.4, 0.3]], dtype=D)
    s = -0.5 + 0.3**0.5 * torch.linspace(-8, 8, 4001, dtype=D)
    weights = (-torch.linspace(-8, 8, 4001, dtype=D).square() / 2).softmax(0)
    label = torch.tensor([[1.1]], dtype=D)
    density = (torch.distributions.Normal(0.2, (0.4 + s.exp()).sqrt()).log_prob(label[0]).exp() * weights).sum()
    close(kind.log_density(mean, variance, label), density.log()[None], rtol=1e-6, atol=1e-6)
    before = posterior._log_density([(x, y)])
    posterior.tune_prior(method="heldout", heldout=[(x, y)], steps=20)
    assert posterior._log_density([(x, y)]) >= before


def test_wrong_shapes_are_refused() -> None:
    kind = HeteroscedasticGaussian()
    with pytest.raises(ValueError, match=r"needs outputs \(N, ..., 2 K\).*got shape \(8, 3\)"):
        kind.loss(torch.zeros(8, 3), torch.zeros(8, 1))
    with pytest.raises(ValueError, match=r"shape \(8, 1\) of means, got \(8,\)"):
        kind.loss(torch.zeros(8, 2), torch.zeros(8))
