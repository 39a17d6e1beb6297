"""Batches that are mappings, models that return objects or tuples, and models that torch.func.vmap does not support."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesgrad
from bayesgrad.layers.functional import _WARNED
from bayesgrad.posterior import DropoutPosterior, SampledPosterior
from bayesgrad.posterior.units import Units

close = torch.testing.assert_close
D = torch.float64


class Core(nn.Module):
    """Two arguments, one of which has a default."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5, dtype=D), nn.Linear(5, 3, dtype=D)

    def outputs(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return self.last(scale * self.first(x if mask is None else x * mask).tanh())

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        return self.outputs(x, mask, scale)


class Output(NamedTuple):
    logits: Tensor
    features: Tensor


class Object(Core):
    """Returns an object with logits, as transformers do."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        return Output(self.outputs(x, mask, scale), x)


class Pair(Core):
    """Returns logits and a state that is no tensor, as recurrent layers do."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        return self.outputs(x, mask, scale), {"state": x}


class Both(Core):
    """Returns two tensors, of which none is the obvious one."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        logits = self.outputs(x, mask, scale)
        return logits, logits.exp()


X, MASK = torch.randn(9, 4, dtype=D, generator=torch.Generator().manual_seed(1)), torch.ones(9, 4, dtype=D)
MASK[:, 1] = 0
Y = torch.arange(9) % 3


@pytest.mark.parametrize("kind", [Core, Object, Pair])
@pytest.mark.parametrize("structure", ["diag", "kron", "full", "subsampled"])
def test_mappings_and_objects_give_the_posterior_of_tensors(kind: type[Core], structure: str) -> None:
    options: dict[str, Any] = dict(likelihood="categorical", structure=structure, prior_precision=2.0)
    options |= {"subsample": 6} if structure == "subsampled" else {}
    plain, model = Core(), kind()
    expected = bayesgrad.laplace(plain, [((X, MASK), Y)], **options)
    named = {"x": X, "mask": MASK, "scale": 1.0, "labels": Y}
    batches = [named, (dict(x=X, mask=MASK), Y), ((X, MASK), Y)]
    want = expected.predict((X, MASK))
    for batch in batches:
        found = bayesgrad.laplace(model, [batch], **options)
        assert list(found.mean) == list(expected.mean)
        for name, variance in expected.variance().items():
            assert torch.equal(found.variance()[name], variance)
        for inputs in (named, OrderedDict(mask=MASK, x=X), (X, MASK)):
            close(found.predict(inputs), want, rtol=1e-10, atol=1e-12)
        close(found.predict(named, 3, "mc", chunk=4), expected.predict((X, MASK), 3, "mc"), rtol=1e-10, atol=1e-12)
        close(found.functional_variance(named), expected.functional_variance((X, MASK)), rtol=1e-10, atol=1e-12)
        assert found.elbo([batch], prior_precision=2.0, samples=2) == expected.elbo(
            [((X, MASK), Y)], prior_precision=2.0, samples=2
        )
        found.tune_prior(method="heldout", heldout=[batch], steps=3)


@pytest.mark.parametrize("kind", [Core, Object, Pair])
def test_fisher_of_mappings(kind: type[Core]) -> None:
    v = torch.randn(43, dtype=D, generator=torch.Generator().manual_seed(2))
    named = {"x": X, "mask": MASK, "labels": Y}
    for fisher in ("sampled", "exact", "empirical"):
        given: Any = Y if fisher == "empirical" else None
        expected = bayesgrad.SubsampledFisher(Core(), (X, MASK), fisher=fisher, labels=given)
        close(bayesgrad.SubsampledFisher(kind(), named, fisher=fisher).matvec(v), expected.matvec(v))
    with pytest.raises(ValueError, match="fisher='empirical' needs labels="):
        bayesgrad.SubsampledFisher(kind(), {"x": X}, fisher="empirical")


def test_callables_choose_the_call_and_the_output() -> None:
    expected = bayesgrad.laplace(Core(), [(X, Y)], likelihood="categorical")
    with pytest.raises(TypeError, match="the model returned a tuple of Tensor, Tensor: pass output="):
        bayesgrad.laplace(Both(), [(X, Y)], likelihood="categorical")
    found = bayesgrad.laplace(
        Both(),
        [{"features": X, "labels": Y}],
        likelihood="categorical",
        forward=lambda model, batch: model(batch["features"]),
        output=lambda found: found[0],
    )
    close(found.predict({"features": X}), expected.predict(X))
    close(found.to(D).predict({"features": X}), expected.predict(X))
    fisher = bayesgrad.SubsampledFisher(Both(), X, fisher="exact", output=lambda found: found[0])
    close(fisher.dense(), bayesgrad.SubsampledFisher(Core(), X, fisher="exact").dense())
    bag = SampledPosterior([found.mean], Both())
    bag.output = lambda found: found[0]
    close(bag.predict(X), expected.predict(X, method="mean"))
    with pytest.raises(TypeError, match="output= returned a tuple"):
        bayesgrad.laplace(Both(), [(X, Y)], likelihood="categorical", output=lambda found: found)


def test_batches_that_cannot_be_read_are_refused() -> None:
    for batch, words in (
        ({"x": X}, "needs the key 'labels', got the keys .'x'."),
        ((X, Y, Y), "pairs .inputs, labels. of tensors, or mappings"),
        ((X, [0, 1]), "labels of type list"),
        ({"scale": 1.0, "labels": Y}, "a mapping with tensors"),
    ):
        with pytest.raises(TypeError, match=words):
            bayesgrad.laplace(Core(), [batch], likelihood="categorical")


def test_subsamples_of_different_lengths_are_refused() -> None:
    class Sums(Core):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
            return self.outputs(x.sum(1))

    batches = [(torch.randn(4, t, 4, dtype=D), torch.arange(4) % 3) for t in (2, 3)]
    bayesgrad.laplace(Sums(), batches, likelihood="categorical")
    with pytest.raises(ValueError, match="subsample= needs examples of one shape"):
        bayesgrad.laplace(Sums(), batches, likelihood="categorical", subsample=3)


# --- transformers ---


def tokens(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(1, 11, (5, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[:2, 4:], ids[:2, 4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 0, 1])}


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
            max_position_embeddings=8, num_labels=3, initializer_range=0.3,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config).double().eval()
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0, initializer_range=0.3
    )
    kind = transformers.GPT2ForSequenceClassification if name == "gpt2" else transformers.GPT2LMHeadModel
    return kind(config).double().eval()


def explicit_rows(model: nn.Module, batch: Mapping[str, Tensor], output: Any) -> tuple[Tensor, Tensor]:
    """Outputs and their Jacobian (examples, outputs, weights), by one backward pass for each output."""
    outputs = output(model(**{key: value for key, value in batch.items() if key != "labels"}))
    rows = [
        [torch.autograd.grad(v, list(model.parameters()), retain_graph=True, allow_unused=True) for v in one.flatten()]
        for one in outputs
    ]
    sizes = list(model.parameters())
    flat = [
        [
            torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(row, sizes)])
            for row in one
        ]
        for one in rows
    ]
    return outputs.detach(), torch.stack([torch.stack(one) for one in flat])


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:torch.func.vmap does not support")
def test_transformers_have_the_posterior_of_explicit_jacobians(name: str, padded: bool) -> None:
    model, batch = transformer(name), tokens(padded)
    posterior = bayesgrad.laplace(model, [batch], likelihood="categorical", structure="full", prior_precision=3.0)
    outputs, J = explicit_rows(model, batch, lambda found: found.logits)
    p = outputs.softmax(-1)
    H = torch.einsum("nip,nij,njq->pq", J, torch.diag_embed(p) - p[:, :, None] * p[:, None], J)
    S = torch.linalg.inv(H + 3 * torch.eye(len(H), dtype=D))
    variance = torch.einsum("nip,pq,niq->ni", J, S, J)
    close(posterior.functional_variance(batch), variance, rtol=1e-7, atol=1e-9)
    close(posterior.predict(batch), (outputs / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1), rtol=1e-7, atol=1e-9)
    draw = posterior.sample(1, seed=0)
    change = torch.cat([(draw[n][0] - m).flatten() for n, m in posterior.mean.items()])
    close(posterior.functional_samples(batch, 1)[0], outputs + J @ change, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore:torch.func.vmap does not support")
def test_language_models_that_shift_labels_are_noticed() -> None:
    """GPT-2 compares outputs with the next token; without the shift, the Hessian would be that of another task."""
    model, batch = transformer("language"), tokens(False)
    batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    with pytest.raises(
        ValueError, match=r"the model's own loss of a batch is .*o.logits\[:, :-1\] and labels\[:, 1:\]"
    ):
        bayesgrad.laplace(model, [batch], likelihood="categorical", structure="diag")
    posterior = bayesgrad.laplace(
        model,
        [({"input_ids": batch["input_ids"]}, batch["labels"][:, 1:])],
        likelihood="categorical",
        structure="diag",
        output=lambda found: found.logits[:, :-1],
    )
    assert posterior.predict({"input_ids": batch["input_ids"]}).shape == (5, 5, 11)
    own = float(model(**batch).loss.detach())
    assert posterior.fit.loss / 25 == pytest.approx(own, rel=1e-6)


# --- models that vmap does not support ---


class Branches(nn.Module):
    """Control flow that depends on data, around a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5, dtype=D), nn.Linear(5, 3, dtype=D)
        self.gain = nn.Parameter(torch.randn(5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.gain
        return self.last(torch.stack([row if row.detach().sum() > 0 else 2 * row for row in h]).tanh())


class Buffers(Branches):
    """Buffers that the forward pass changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=D))
        self.register_buffer("latest", torch.zeros(5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.gain
        self.seen += len(x)
        self.latest.copy_(h.detach()[0])
        return self.last(h.tanh())


@pytest.mark.parametrize("kind", [Branches, Buffers])
def test_a_loop_replaces_vmap_with_one_warning(kind: type[Branches]) -> None:
    model = kind()
    with pytest.warns(UserWarning, match="vmap does not support this model.*one example at a time") as seen:
        posterior = bayesgrad.laplace(model, [(X, Y), (X, Y)], likelihood="categorical", structure="full")
    assert len(seen) == 1
    variance = posterior.functional_variance(X)  # without another warning
    outputs, J = explicit_rows(model, {"x": X}, lambda found: found)
    p = outputs.softmax(-1)
    H = 2 * torch.einsum("nip,nij,njq->pq", J, torch.diag_embed(p) - p[:, :, None] * p[:, None], J)
    names = [name for name, _ in model.named_parameters()]
    assert names == list(posterior.mean)
    S = torch.linalg.inv(H + torch.eye(len(H), dtype=D))
    close(variance, torch.einsum("nip,pq,niq->ni", J, S, J), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [Branches, Buffers])
def test_linearised_dropout_without_vmap(kind: type[Branches]) -> None:
    model = kind()
    weight = model.last.weight.detach()
    keep = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9], dtype=D)
    posterior = DropoutPosterior({"last.weight": weight}, {"last.weight": keep}, {"last.weight": Units(1)}, model)
    with pytest.warns(UserWarning, match="vmap does not support this model"):
        found = posterior.functional_variance(X)
    _, J = explicit_rows(model, {"x": X}, lambda found: found)
    start = 5 + 4 * 5 + 5  # gain, first layer
    slopes = (J[:, :, start : start + 15].unflatten(2, (3, 5)) * weight).sum(2)  # by the masks
    mean = {"last.weight": weight * keep}
    assert functional_call(model, mean, (X,)).shape == (9, 3)
    close(found, (slopes.square() * keep * (1 - keep)).sum(-1), rtol=1e-9, atol=1e-12)
    assert model in _WARNED


def test_predictions_leave_buffers_as_they_were() -> None:
    model = Buffers()
    bag = SampledPosterior([{n: p.detach() for n, p in model.named_parameters()}], model)
    bag.predict(X)
    assert float(model.seen) == 0
