"""Laplace's method for BERT, GPT-2 and LoRA adapters, built from configurations: transcriptions and laplace-torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesgrad
from equations.test_laplace import dense

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
close = torch.testing.assert_close
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.func.vmap does not support"),
    pytest.mark.filterwarnings("ignore:structure='kron' does not support"),
]
PRIOR = 0.6
NAMES = ("bert", "gpt2", "bert adapters", "gpt2 adapters", "language", "language adapters")
Batch = dict[str, Tensor]
Output = Callable[[Any], Tensor]


def sequences() -> list[Batch]:
    """Of three lengths; padding is on the left, because laplace-torch takes the last position for the last token."""
    ids = torch.randint(1, 7, (8, 4), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(4) >= torch.arange(8)[:, None] % 3).long()
    labels = torch.arange(8) % 3
    return [{"input_ids": i * m, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels)]


def batches() -> list[Batch]:
    return list(DataLoader(sequences(), batch_size=3))  # pyright: ignore[reportArgumentType]


def make(name: str, trained: str = "all") -> nn.Module:
    """A model from its configuration; `trained="matrices"` freezes what laplace-torch has no Kronecker factors for."""
    torch.manual_seed(0)
    shared: dict[str, Any] = dict(vocab_size=7, num_labels=3, initializer_range=0.3, pad_token_id=0)
    if name.startswith("bert"):
        sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12)
        config = transformers.BertConfig(max_position_embeddings=8, **sizes, **shared)
        model, where = transformers.BertForSequenceClassification(config), ["query", "value"]
    else:
        config = transformers.GPT2Config(
            n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **shared
        )
        kind = transformers.GPT2ForSequenceClassification if name.startswith("gpt2") else transformers.GPT2LMHeadModel
        model, where = kind(config), ["c_attn", "c_fc"]
    if "adapters" in name:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=where, fan_in_fan_out="bert" not in name)
        )
        for key, p in model.named_parameters():
            if "lora_B" in key:  # zero before training, when the adapters A have no influence
                nn.init.normal_(p, std=0.3)
    for key, p in model.named_parameters():
        if trained == "matrices":
            p.requires_grad_("embeddings" not in key and "LayerNorm" not in key)
    return model.double().eval()


def prepared(name: str, batch: Batch) -> tuple[Batch, Tensor, Output]:
    """Inputs, labels, and the function to the outputs; the label of a position is the next token, unless padded."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if not name.startswith("language"):
        return inputs, batch["labels"], lambda found: found.logits
    labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    labels = labels[:, 1:].where(batch["attention_mask"][:, :-1] == 1, -100)
    return inputs, labels, lambda found: found.logits[:, :-1]


def fitted(name: str, structure: str, params: str | None = None, model: nn.Module | None = None, **options: Any) -> Any:
    """Batches are mappings with labels, or pairs where labels are shifted."""
    loader: list[Any] = batches()
    if name.startswith("language"):
        loader = [prepared(name, batch)[:2] for batch in loader]
        options["output"] = prepared(name, batches()[0])[2]
    kind = dict(likelihood="categorical", structure=structure, params=params, bias="separate", prior_precision=PRIOR)
    return bayesgrad.laplace(model or make(name), loader, **kind, **options)


# --- transcriptions ---


def gauss_newton(model: nn.Module, name: str, names: list[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The Gauss-Newton matrix, and A ⊗ E for the weight of each layer, by a backward pass for each direction.

    A is the mean of aa' over positions of all examples, E the sum of ee' over these and over all directions.
    """
    params = dict(model.named_parameters())
    for key in names:  # the last layer is frozen beside adapters
        params[key].requires_grad_()
    layers = (nn.Linear, nn.Embedding, transformers.pytorch_utils.Conv1D)
    owners = {key.removesuffix(".weight"): key for key in names if key.endswith(".weight")}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for key, module in model.named_modules():
        if key in owners and isinstance(module, layers):
            module.register_forward_hook(lambda _, args, out, key=key: seen.update({key: (args[0], out)}))
    total: Any = 0
    A: dict[str, Any] = {}
    E: dict[str, Any] = {}
    rows: dict[str, int] = {}
    kept: dict[str, Any] = {}  # rows whose error is part of a gradient: not those of a padding index
    for batch in batches():
        inputs, labels, output = prepared(name, batch)
        outputs = output(model(**inputs))
        p = outputs.detach().softmax(-1)
        values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
        roots = vectors * (values.clamp(min=0).sqrt() * (labels != -100)[..., None])[..., None, :]
        for key, (x, _) in seen.items():
            module = model.get_submodule(key)
            a = nn.functional.one_hot(x, module.num_embeddings) if isinstance(module, nn.Embedding) else x
            a = a.detach().double().flatten(0, -2)
            kept[key] = x.flatten() != padding if (padding := getattr(module, "padding_idx", None)) is not None else ...
            a = a[kept[key]]
            A[key], rows[key] = A.get(key, 0) + a.T @ a, rows.get(key, 0) + len(a)
        for f, root in zip(outputs, roots):
            for value in (f[..., :, None] * root).sum(-2).flatten():
                sources = [*(params[key] for key in names), *(out for _, out in seen.values())]
                found = torch.autograd.grad(value, sources, retain_graph=True, allow_unused=True)
                filled = [torch.zeros_like(s) if g is None else g for g, s in zip(found, sources)]
                flat = torch.cat([g.flatten() for g in filled[: len(names)]])
                total = total + torch.outer(flat, flat)
                for key, e in zip(seen, filled[len(names) :]):
                    e = e.flatten(0, -2)[kept[key]]
                    E[key] = E.get(key, 0) + e.T @ e
    upright = {key: isinstance(model.get_submodule(key), nn.Linear) for key in seen}
    pairs = {key: (E[key], A[key] / rows[key]) if upright[key] else (A[key] / rows[key], E[key]) for key in seen}
    return total, {owners[key]: torch.kron(*pair) for key, pair in pairs.items()}


DIAGONAL = ("position_embeddings", "wpe", "LayerNorm", "ln_")  # one table or vector for all examples, norms


def expected_precision(name: str, structure: str, names: list[str]) -> Tensor:
    model = make(name)
    total, factors = gauss_newton(model, name, names)
    found, start = torch.zeros_like(total), 0
    for key in names:
        part = slice(start, start := start + dict(model.named_parameters())[key].numel())
        tied = name.startswith("language") and "wte" in key
        if structure == "diag" or tied or any(word in key for word in DIAGONAL):
            found[part, part] = torch.diag(total.diagonal()[part])
        else:  # biases have their own Gauss-Newton matrix
            found[part, part] = total[part, part] if key.endswith("bias") else factors[key]
    return found + PRIOR * torch.eye(len(found), dtype=torch.float64)


@pytest.mark.parametrize("params", [None, "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("name", NAMES)
def test_precision(name: str, structure: str, params: str | None) -> None:
    mine = fitted(name, structure, params)
    names = list(mine.mean)
    trainable = [key for key, p in make(name).named_parameters() if p.requires_grad]
    if params is None:
        assert names == trainable
        assert ("adapters" not in name) or all("lora" in key for key in names)
    else:
        assert {key.split(".")[-2] for key in names} == {
            "classifier" if "bert" in name else "score" if "gpt2" in name else "wte"
        }
    close(dense(mine), expected_precision(name, structure, names), rtol=1e-9, atol=1e-10)


# --- laplace-torch ---


class Logits(nn.Module):
    """A model as laplace-torch calls it; positions of a language model that have a label are examples."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, batch: Batch) -> Tensor:
        inputs, labels, output = prepared(self.name, batch)
        outputs = output(self.model(**inputs))
        return outputs[labels != -100] if self.name.startswith("language") else outputs


def peer(name: str, structure: str, trained: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace = pytest.importorskip("laplace")

    def collate(some: list[Batch]) -> Batch:
        batch = torch.utils.data.default_collate(some)
        labels = prepared(name, batch)[1]
        return {**batch, "labels": labels[labels != -100]}

    kind: dict[str, Any] = dict(hessian_structure=structure, backend=laplace.curvature.CurvlinopsGGN)
    kind |= dict(subset_of_weights="last_layer" if trained == "last_layer" else "all")
    if trained == "last_layer" and name == "gpt2":  # which applies its last layer to all positions
        kind["feature_reduction"] = "pick_last"
    found = laplace.Laplace(Logits(make(name, trained), name), "classification", prior_precision=PRIOR, **kind)
    found.fit(DataLoader(sequences(), batch_size=3, collate_fn=collate))  # pyright: ignore[reportArgumentType]
    return found


EQUAL = [
    *((name, "diag", "all") for name in NAMES),
    *((name, structure, "last_layer") for name in ("bert", "gpt2") for structure in ("diag", "kron")),
    ("bert adapters", "kron", "all"),
    ("gpt2 adapters", "kron", "all"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "structure", "trained"), EQUAL)
def test_laplace_torch(name: str, structure: str, trained: str) -> None:
    """Precision, evidence, and predictions of the linearised network."""
    params = "last_layer" if trained == "last_layer" else None
    theirs, mine = peer(name, structure, trained), fitted(name, structure, params, make(name, trained))
    precision = theirs.posterior_precision
    close(dense(mine), torch.diag(precision) if structure == "diag" else precision.to_matrix(), rtol=1e-9, atol=1e-10)
    close(mine.log_marginal_likelihood(), theirs.log_marginal_likelihood(), rtol=1e-9, atol=0.0)
    batch = batches()[0]
    inputs, labels, _ = prepared(name, batch)
    chosen = labels != -100 if name.startswith("language") else ...
    _, covariance = theirs._glm_predictive_distribution(batch)
    close(mine.functional_variance(inputs)[chosen], covariance.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-12)
    close(mine.predict(inputs)[chosen], theirs(batch, link_approx="probit"), rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_biases_have_their_own_gauss_newton_matrix() -> None:
    """laplace-torch has their errors squared at each position, and not summed over the positions of an example."""
    theirs, mine = peer("bert", "kron", "matrices"), fitted("bert", "kron", model=make("bert", "matrices"))
    found, expected, start = dense(mine), theirs.posterior_precision.to_matrix(), 0
    total, _ = gauss_newton(make("bert", "matrices"), "bert", list(mine.mean))
    for key, value in mine.mean.items():
        part = slice(start, start := start + value.numel())
        if key.endswith("self.value.bias"):
            assert (found - expected)[part, part].abs().max() > 0.01
            expected[part, part] = total[part, part] + PRIOR * torch.eye(value.numel(), dtype=torch.float64)
        elif key.endswith("self.key.bias"):  # which has no influence on the outputs
            assert (expected[part, part] - PRIOR * torch.eye(value.numel())).abs().max() > 1e-3
            expected[part, part] = PRIOR * torch.eye(value.numel(), dtype=torch.float64)
    close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "gpt2", "language"])
def test_laplace_torch_has_no_factors_of_all_layers(name: str) -> None:
    """Of embeddings, normalisation and Conv1D: docs/posteriors.md says so."""
    with pytest.raises(NotImplementedError, match="un-supported layers"):
        peer(name, "kron", "all")
