"""`integrations.attach`: passes of a model that draw and observe by themselves, and what a loop may do between them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from bayesgrad import optim
from bayesgrad.integrations import attach
from cases import same, states, weights
from training_loops import RULES, SIZE, Classifier, examples, network

x, y = (some[:SIZE] for some in examples().tensors)


def explicit(name: str, net: nn.Module, steps: int = 3) -> tuple[nn.Module, Any]:
    """The loop of the design page."""
    own = RULES[name](net)
    for _ in range(steps):
        with own.sampled():
            own.zero_grad()
            outputs = net(x)
            loss = cross_entropy(outputs, y)
            own.observe(outputs, loss=loss)
            loss.backward()
        own.step()
    return net, own


def equal(a: tuple[nn.Module, Any], b: tuple[nn.Module, Any]) -> bool:
    return same({**weights(a[0]), **states(a[1])}, {**weights(b[0]), **states(b[1])}) and a[1].draws == b[1].draws


def step(net: Callable[..., Any], own: Any) -> None:
    own.zero_grad()
    cross_entropy(net(x), y).backward()
    own.step()


@pytest.fixture
def ivon() -> tuple[nn.Module, Any]:
    net = network()
    own = RULES["IVON"](net)
    attach(own, net)
    return net, own


class Deep(nn.Module):
    """Three layers, of which two are recomputed in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(a, b).double() for a, b in ((5, 6), (6, 6), (6, 3)))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.reentrant is None:
            return self.third(self.second(hidden).tanh())
        hidden = checkpoint(lambda h: self.second(h).tanh(), hidden, use_reentrant=self.reentrant)
        return checkpoint(self.third, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_draw_lasts_until_recomputed_layers_are_differentiated(reentrant: bool) -> None:
    """A reentrant checkpoint runs backward passes inside of the backward pass."""
    net = Deep(reentrant)
    own = RULES["IVON"](net)
    attach(own, net)
    for _ in range(3):
        step(net, own)
    assert equal((net, own), explicit("IVON", Deep(None)))


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["IVON", "KFAC"])
@pytest.mark.parametrize("outer", [True, False])
def test_compiled_models(name: str, outer: bool) -> None:
    torch._dynamo.reset()
    net = network()
    own = RULES[name](net)
    compiled: Any = torch.compile(net, backend="aot_eager")
    attach(own, compiled if outer else net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for _ in range(3):
            step(compiled, own)
    expected, other = explicit(name, network())
    assert own.draws == other.draws
    for key, value in weights(expected).items():
        torch.testing.assert_close(weights(net)[key], value, rtol=1e-12, atol=1e-14)


def test_weights_are_a_sample_between_forward_and_backward_pass_only(ivon: Any) -> None:
    net, _ = ivon
    mean = weights(net)
    loss = cross_entropy(net(x), y)
    assert not same(weights(net), mean)
    torch.autograd.grad(loss, net[0].weight, retain_graph=True)  # adds no gradient: not the end of the pass
    assert not same(weights(net), mean)
    loss.backward()
    assert same(weights(net), mean)


def test_evaluation_is_at_the_mean(ivon: Any) -> None:
    net, own = ivon
    expected = network()(x)
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    net.eval()
    assert torch.equal(net(x), expected)
    assert own.draws == 0


@pytest.mark.parametrize("what", ["state_dict", "model", "eval", "posterior", "copy", "evaluation", "step"])
def test_a_forward_pass_that_was_given_up_leaves_no_sample(what: str, ivon: Any) -> None:
    net, own = ivon
    step(net, own)
    mean = weights(net)
    net(x)
    assert not same(weights(net), mean)
    if what == "model":
        assert same(net.state_dict(), mean)
    elif what == "evaluation":
        net.eval()
        net(x)
    elif what == "step":
        with pytest.raises(RuntimeError, match="was not computed at sampled weights"):
            own.step()
    else:
        {"copy": copy.deepcopy, "posterior": lambda o: o.posterior(net)}.get(what, lambda o: getattr(o, what)())(own)
    assert same(weights(net), mean)


def test_an_error_in_a_forward_pass_leaves_no_sample(ivon: Any) -> None:
    net, own = ivon
    mean = weights(net)
    with pytest.raises(RuntimeError):
        net(x[:, :2])
    assert same(weights(net), mean)
    step(net, own)


def test_several_forward_passes_share_a_draw(ivon: Any) -> None:
    net, own = ivon
    (cross_entropy(net(x), y) + cross_entropy(net(x), y)).backward()
    assert own.draws == 1
    own.step()


@pytest.mark.parametrize("samples", [1, 3])
def test_closures(samples: int) -> None:
    runs = []
    for attached in (True, False):
        net = network()
        own = optim.IVON(net.parameters(), 0.1, num_data=100, seed=0, samples=samples)
        if attached:
            attach(own, net)

        def closure(net: nn.Module = net, own: Any = own) -> Tensor:
            own.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            return loss

        losses = [own.step(closure).item() for _ in range(3)]
        runs.append((net, own, losses))
    assert runs[0][1].draws == 3 * samples
    assert runs[0][2] == runs[1][2]
    assert equal(runs[0][:2], runs[1][:2])


def test_sampled_may_be_written_all_the_same(ivon: Any) -> None:
    net, own = ivon
    for _ in range(3):
        with own.sampled():
            own.zero_grad()
            cross_entropy(net(x), y).backward()
        own.step()
    assert equal((net, own), explicit("IVON", network()))


def test_a_second_backward_pass_of_one_forward_pass_is_refused(ivon: Any) -> None:
    net, _ = ivon
    loss = cross_entropy(net(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_the_model_is_not_attached(clone: Any, ivon: Any) -> None:
    net, own = ivon
    other = clone(net)
    other(x).sum().backward()
    assert own.draws == 0
    assert same(weights(other), weights(net))


def test_attaching_again_replaces_and_removing_ends(ivon: Any) -> None:
    net, own = ivon
    handle = attach(own, net)
    step(net, own)
    assert own.draws == 1
    handle.remove()
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
    assert not net._state_dict_pre_hooks
    with pytest.raises(RuntimeError, match=r"call bayesgrad.integrations.attach\(optimizer, model\)"):
        step(net, own)


def test_parameters_of_new_groups_are_drawn() -> None:
    net = network()
    own = optim.IVON(net[0].parameters(), 0.1, num_data=100, seed=0)
    attach(own, net)
    step(net, own)
    own.add_param_group({"params": list(net[2].parameters())})
    before = weights(net)
    net(x)
    assert not any(torch.equal(value, before[key]) for key, value in weights(net).items())
    own.attachment.leave()
    assert same(weights(net), before)


def test_observations_survive_a_loaded_state() -> None:
    """Loading registers the hooks of the layers anew, after those of the attachment."""
    net = network()
    own = RULES["KroneckerFilterFP"](net)
    attach(own)
    step(net, own)
    own.load_state_dict(own.state_dict())
    step(net, own)
    assert equal((net, own), explicit("KroneckerFilterFP", network(), 2))


def test_a_model_without_a_loss_leaves_it_to_the_loop() -> None:
    net = network()
    own = RULES["Newton"](net)
    attach(own, net)
    loss = cross_entropy(net(x), y)
    own.observe(loss=loss)
    loss.backward()
    own.step()
    with pytest.raises(RuntimeError, match=r"observe\(loss=loss\)"):
        step(net, own)


class Sequences(nn.Module):
    """Logits for each of five tokens; the loss is that of the next token, or of the token itself."""

    def __init__(self, following: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.following = nn.Linear(3, 4).double(), following

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(x)
        first, second = (logits[:, :-1], labels[:, 1:]) if self.following else (logits, labels)
        return cross_entropy(first.flatten(0, 1), second.flatten()), logits


@pytest.mark.parametrize("following", [False, True])
def test_tokens_without_a_loss_do_not_count(following: bool) -> None:
    """Language models shift labels inside; padding has the label -100."""
    torch.manual_seed(1)
    tokens = torch.randn(6, 5, 3, dtype=torch.float64)
    labels = torch.randint(4, (6, 5))
    labels[2:, 3:] = -100
    counted = labels != -100
    if following:
        counted = torch.cat([counted[:, 1:], torch.zeros(6, 1, dtype=torch.bool)], 1)
    runs = []
    for automatic in (True, False):
        model = Sequences(following)
        own = optim.KFAC(model, 0.1, seed=0)
        if automatic:
            attach(own)
        for _ in range(3):
            own.zero_grad()
            loss, logits = model(tokens, labels=labels)
            if not automatic:
                own.observe(logits, weights=counted)
            loss.backward()
            own.step()
        runs.append((model, own))
    assert equal(*runs)


def test_outputs_whose_losses_are_not_known_are_refused() -> None:
    model = Sequences(True)
    tokens, labels = torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(4, (6, 5))
    own = optim.KFAC(model.net, 0.1, seed=0)
    attach(own)
    with pytest.raises(ValueError, match=r"outputs of shape \(6, 5, 4\) have several losses .* pass labels= to the"):
        model(tokens, labels=labels)
    attach(own, model)
    model.forward = lambda x, labels: (cross_entropy(model.net(x).flatten(0, 1), labels.flatten()) + 1, model.net(x))
    with pytest.raises(ValueError, match=r"loss of the model is not the cross entropy of its logits"):
        model(tokens, labels=labels)
    attach(own, model, observed=lambda args, kwargs, outputs: {"outputs": outputs[1]})
    model(tokens, labels=labels)[0].backward()
    own.step()
    attach(own, Several(model.net))
    with pytest.raises(ValueError, match=r"outputs \['end', 'start'\] have no 'logits': pass observed= to attach"):
        own.attachment.model(tokens[:, 0])


class Several(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"start": self.net(x), "end": self.net(x)}


def test_arguments() -> None:
    net = network()
    with pytest.raises(TypeError, match=r"this IVON was built from parameters: pass the model"):
        attach(RULES["IVON"](net))
    with pytest.raises(TypeError, match=r"expected an optimizer of bayesgrad, or a wrapper of one, got SGD"):
        attach(torch.optim.SGD(net.parameters()), net)
    own = RULES["IVON"](net)
    net.forward = lambda x: "text"
    attach(own, net)
    with pytest.raises(TypeError, match=r"the model returned str, in which no tensor was found"):
        net(x)
    assert not own.sampling


def test_a_model_with_the_loss_inside() -> None:
    net = network()
    own = RULES["VON"](net)
    model = Classifier(net)
    with attach(own, model):
        for _ in range(3):
            own.zero_grad()
            model(x, labels=y)["loss"].backward()
            own.step()
    assert equal((net, own), explicit("VON", network()))
    assert own.attachment is None
