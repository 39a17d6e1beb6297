"""Invalid arguments and gradients raise an error of one sentence and change nothing."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from bayesgrad import optim, samplers
from cases import Case, backward, drawn, elementwise_case, every_case, same, small_model, states, train, weights


@every_case
def test_bad_arguments_get_one_sentence(case: Case) -> None:
    for options, message in case.bad:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            case.of(nn.Linear(2, 2), **options)
    with pytest.raises(ValueError, match="empty parameter list"):
        case.of(nn.ReLU())
    model = nn.Linear(2, 2)
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    some = {"params": [model.weight]}
    optimizer = case(model, params=[some]) if case.layers else case([some])
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got -1"):
        optimizer.add_param_group({"params": [model.bias], "lr": -1})
    with pytest.raises(ValueError, match="complex64: complex weights are not supported"):
        optimizer.add_param_group({"params": [model.wave]})
    assert len(optimizer.param_groups) == 1


OTHER = {  # of options that are read in the first group alone
    "samples": 3,
    "seed": 99,
    "likelihood": "gaussian",
    "hessian": "exact",
    "probes": 7,
    "losses_per_example": 3,
    "blocks": "layer",
    "update_every": 7,
    "step_size": "quadratic",
    "adapt_damping": True,
    "batch_size": 33,
    "fisher": "exact",
    "ema": 0.3,
    "limit_step": True,
    "damping_noise": True,
}


@every_case
def test_options_of_the_whole_optimizer_are_those_of_the_first_group(case: Case) -> None:
    def built(first: dict, second: dict) -> torch.optim.Optimizer:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": list(layer.parameters()), **own} for layer, own in zip(model, (first, second))]
        return case(model, params=groups) if case.layers else case(groups)

    plain = built({}, {})
    for name in set(plain.of_all_groups) & set(plain.param_groups[0]):
        usual, other = plain.param_groups[0][name], OTHER[name]
        if name == "fisher" and usual == other:
            other = "sampled"
        elif usual == other:
            other = not other if isinstance(other, bool) else "full" if name == "blocks" else 8
        with pytest.raises(ValueError, match=f"^{name} must be the same in all groups, got .* beside"):
            built({}, {name: other})
        optimizer = built({name: other}, {})
        assert [group[name] for group in optimizer.param_groups] == [other, other]
        assert len(built({name: other}, {name: other}).param_groups) == 2


@every_case
def test_sparse_gradients_are_refused_before_anything_changes(case: Case) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True))
    optimizer = case.of(model)
    before = weights(model)
    with drawn(optimizer):
        (model[0](torch.ones(1, 2)).sum() + model[1](torch.tensor([1])).sum()).backward()
    with pytest.raises(
        RuntimeError, match=r"needs dense gradients, but that of parameter '1.weight' is sparse: .*sparse=False"
    ):
        optimizer.step()
    assert same(before, weights(model))


@every_case
def test_labels_are_not_sampled_from_outputs_without_classes(case: Case) -> None:
    """Outputs of a regression under the default likelihood: one class, or as many classes as examples."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = case.of(model)
    if not optimizer.needs.outputs:
        return
    for outputs in (model(torch.ones(5, 3)), model(torch.ones(5, 3))[:, 0]):
        needs = "a categorical likelihood needs logits of at least two classes"
        with pytest.raises(ValueError, match=needs), drawn(optimizer):
            optimizer.observe(outputs, loss=outputs.square().mean())


@every_case
def test_nonfinite_gradients(case: Case) -> None:
    for value in (float("nan"), float("inf")):
        for option in ("ignore", "raise", "skip"):
            model = small_model()
            optimizer = case.of(model, nonfinite=option)
            train(model, optimizer, range(2))
            optimizer.zero_grad()
            backward(model, 2, optimizer)
            model.out.weight.grad[1, 2] = value
            before, known = weights(model), states(optimizer)
            if option == "raise":
                with pytest.raises(FloatingPointError, match=r"parameter 'out.weight' has 1 entries of 3000"):
                    optimizer.step()
            else:
                optimizer.step()
            if option == "ignore":
                assert not same(before, weights(model))
            else:
                assert same(before, weights(model))
                assert same(known, states(optimizer))


@elementwise_case
def test_empty_gradients_and_large_ones_are_finite(case: Case) -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = case([empty], nonfinite="skip")
    with drawn(optimizer):
        empty.grad = torch.zeros(0, 3)
    optimizer.step()
    model = small_model()  # large but finite gradients are accepted
    optimizer = case(model.parameters(), nonfinite="raise")
    with drawn(optimizer):
        for p in model.parameters():
            p.grad = torch.full_like(p, 3e38)
    optimizer.step()
    assert all(bool(torch.isfinite(value).all()) for value in (*weights(model).values(), *states(optimizer).values()))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optim.DenseFilter, {"batch_size": 8}),
        (samplers.Langevin, {"num_data": 8}),
        (samplers.SNGD, {"num_data": 80, "batch_size": 4}),
    ],
    ids=["DenseFilter", "Langevin", "SNGD"],
)
def test_a_step_for_an_empty_batch_alone_is_refused_as_such(make: type, options: dict[str, int]) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(model, **options)
    outputs = model(torch.zeros(0, 3))
    optimizer.observe(outputs)
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match=r"before step\(\), and take no step for an empty batch\. "):
        optimizer.step()
