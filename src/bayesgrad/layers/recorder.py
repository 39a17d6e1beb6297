"""Records what layers receive: their inputs, and the derivatives of the loss with respect to their outputs.

For a Linear layer, the gradient of example j's loss with respect to the weight is the outer product of two vectors: the
derivative of the loss with respect to the layer's output, here called the *error* e_j, and the layer's input a_j.
Autograd forms only the sum of these products over the batch. (The errors are those of the loss that is differentiated:
for a mean over B examples each contains the factor 1/B.) A `LayerRecorder` passes the pairs (a_j, e_j) to a function
of its owner, so that squares, inner products and Kronecker factors of per-example gradients can be computed without
forming the gradients themselves. How a layer's pair becomes gradients of its parameters is in `layers.modules`.

    >>> model = nn.Sequential(nn.Linear(3, 2))
    >>> calls = []
    >>> recorder = LayerRecorder(model, {"0": model[0]}, calls.append)
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> (call,) = calls
    >>> call.input.shape, call.error.shape  # five examples
    (torch.Size([5, 3]), torch.Size([5, 2]))
    >>> bool(torch.equal(call.error.T @ call.input, model[0].weight.grad))
    True
    >>> recorder.close()

**How.** The `forward` of each recorded module, of this instance alone, is replaced by a method that calls
`RecordedLayer`, an autograd function. It runs the operation of the layer, and its backward sees input and error
together. Nothing is stored beside what autograd stores. The layer may be followed by operations in place, run under
autocast, be checkpointed, or be called several times. In a compiled model (`torch.compile(model, fullgraph=True)`) the
part of the backward that calls recorders is an operator of its own, `bayesgrad::parameter_gradients`, which is not
traced.

**When.** `loss.backward()` records the layers to whose parameters it adds gradients. `torch.autograd.grad`, which adds
none, records nothing. `LayerRecorder.backpropagate(outputs, direction)` gives the errors of another loss, for example
with sampled labels, without weight gradients, and leaves the graph and `.grad` as they were. Optimizers and samplers
call it in `observe(outputs)`. Under the transforms of `torch.func`, and without gradients, layers run as if not
recorded.

One other file registers hooks of its own: `samplers.factors` (layer outputs inside `torch.func`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
import torch.compiler.config
from torch import Tensor, nn

from bayesgrad.layers.call import SITE, SITES, LayerCall, Pair, Site, forward
from bayesgrad.layers.gradients import GradientMarks


class Hook:
    """A hook of a recorder. A copy of the module that has it (deepcopy, pickle) gets a hook that does nothing."""

    def __init__(self, recorder: LayerRecorder | None = None) -> None:
        self.recorder = weakref.ref(recorder) if recorder is not None else lambda: None
        self.counter = torch.zeros((), dtype=torch.int64) if recorder is None else recorder.counter

    def __reduce__(self) -> tuple:
        return type(self), ()


class PassCounter(Hook):
    """Counts the forward passes of a model."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            self.counter.add_(1)
        elif (recorder := self.recorder()) is not None:
            recorder.forward_count += 1


class InputHook(Hook):
    """Stores the arguments of the model's last call."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        recorder = self.recorder()
        if recorder is None or not isinstance(output, Tensor) or not torch.is_grad_enabled():
            return
        if not torch._C._functorch.is_functorch_wrapped_tensor(output):  # pyright: ignore[reportAttributeAccessIssue]
            recorder.last_call = weakref.ref(output), args, kwargs

    # torch.compile must call this function and not trace it. torch's own decorator would import the compiler.
    __call__._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


def check_graph(outputs: Tensor) -> None:
    """Raises unless gradients can be propagated back from the outputs."""
    if outputs.grad_fn is None:
        raise RuntimeError(
            "the outputs have no autograd graph: compute them with this model and with gradients enabled."
        )


class LayerRecorder:
    """Records inputs and errors of some layers of a model; see the module docstring.

    Args:
        model: whose forward passes are counted.
        layers: name -> module to record.
        receive: called with each call of a layer in a backward pass that adds to the gradients of its parameters. It
            may return the gradients of weight and bias that autograd shall use instead of their own.
        marks: what follows the gradients of the parameters.
        record_arguments: whether to keep the arguments of the model's last call, which `arguments` needs.

    Attributes:
        capture: what receives calls instead, during `backpropagate`.
        captures: minus the number of its calls.
        close: restores the modules; called when the recorder is garbage collected.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        receive: Callable[[LayerCall], Pair | None] | None = None,
        marks: GradientMarks | None = None,
        *,
        record_arguments: bool = False,
    ) -> None:
        _allow_two_passes()
        self.layers, self.receive, self.marks = dict(layers), receive, marks
        self.capture: Callable[[LayerCall], Any] | None = None
        self.captures = 0
        self.forward_count = 0
        self.counter = torch.zeros((), dtype=torch.int64)
        self.last_call: tuple[Any, tuple, dict] | None = None
        handles = [model.register_forward_pre_hook(PassCounter(self))]
        if record_arguments:
            handles.append(model.register_forward_hook(InputHook(self), with_kwargs=True))
        added = []
        for name, module in self.layers.items():
            if (site := module.__dict__.get(SITE)) is None or site.module() is not module:
                site = Site(module)
                SITES[site.handle] = site
                module.__dict__.update({SITE: site, "forward": MethodType(forward, module)})
            site.counter = self.counter
            entry = (weakref.ref(self), name)
            site.recorders.append(entry)
            added.append((site, entry))
        self.close = weakref.finalize(self, _remove, handles, added)

    def received(self, call: LayerCall) -> Pair | None:
        return None if self.receive is None else self.receive(call)

    def arguments(self, outputs: Tensor) -> tuple[tuple, dict]:
        """The arguments of the model's last call, which must have returned exactly these outputs."""
        if self.last_call is None or self.last_call[0]() is not outputs:
            raise RuntimeError(
                "observe() must receive the tensor that the model's last forward pass returned: call observe(outputs) "
                "with that very tensor, before the model is called again."
            )
        return self.last_call[1:]

    def backpropagate(
        self, outputs: Tensor, direction: Tensor, receive: Callable[[LayerCall], Any] | None = None
    ) -> list[LayerCall]:
        """The layer calls, with the errors of the loss (direction * outputs).sum().

        Computes no weight gradients. Leaves the graph and `.grad` unchanged.

        Args:
            outputs: of the model, with their graph.
            direction: as `grad_outputs` of torch.autograd.grad: the derivative of some loss by the outputs.
            receive: called with each call as its error arrives; the result is then empty.
        """
        check_graph(outputs)
        calls: list[LayerCall] = []
        self.captures -= 1
        params = {p: None for m in self.layers.values() for p in m.parameters(recurse=False) if p.requires_grad}
        self.capture = calls.append if receive is None else receive
        try:
            torch.autograd.grad(outputs, list(params), direction, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "donated buffers" in str(error):
                raise RuntimeError(
                    "the model was compiled in a way that allows only one backward pass: build the optimizer before "
                    "torch.compile."
                ) from error
            if "backward through the graph a second time" in str(error):
                raise RuntimeError(
                    "a backward pass has freed the graph of these outputs: call observe() before loss.backward()."
                ) from error
            raise
        finally:
            self.capture = None
        return calls

    def trace(self, outputs: Tensor) -> Trace:
        """Finds out which parameters the autograd graph of some outputs reads."""
        check_graph(outputs)
        trace = Trace(self, outputs)
        sites = {site.handle: site for m in self.layers.values() if (site := m.__dict__.get(SITE)) is not None}
        nodes: list[Any] = [outputs.grad_fn]
        seen = {outputs.grad_fn}
        while nodes:
            node = nodes.pop()
            if node.name() == "CheckpointFunctionBackward":
                raise RuntimeError(
                    "reentrant activation checkpointing hides layers from observe(): "
                    "pass use_reentrant=False to torch.utils.checkpoint."
                )
            site = sites.get(getattr(node, "handle", -1))
            recorded = site is not None and site.has_own(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if hasattr(following, "variable"):
                    trace.read_counts[id(following.variable)] += 1
                    trace.recorded_counts[id(following.variable)] += recorded
                elif following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return trace


def _allow_two_passes() -> None:
    """Lets compiled backward passes run twice, for `backpropagate` and for the loss: else they overwrite their inputs.

    The key of torch's cache of compiled graphs does not contain this setting (2.13), so it gets a mark of its own.
    """
    if torch._functorch.config.donated_buffer:
        torch._functorch.config.donated_buffer = False
        torch.compiler.config.cache_key_tag += "two-passes"


def _remove(handles: list[Any], added: list[tuple[Site, Any]]) -> None:
    for handle in handles:
        handle.remove()
    for site, entry in added:
        site.recorders.remove(entry)
        module = site.module()
        if not site.recorders and module is not None and module.__dict__.get(SITE) is site:
            del module.__dict__[SITE], module.__dict__["forward"]


class Trace:
    """The parameters that the autograd graph of some outputs reads.

    Attributes:
        read_counts: id of a parameter -> how many operations of the graph read it.
        recorded_counts: the same for the operations of recorded layers.
    """

    def __init__(self, recorder: LayerRecorder, outputs: Tensor) -> None:
        self.recorder, self.outputs = recorder, outputs
        self.read_counts: Counter[int] = Counter()
        self.recorded_counts: Counter[int] = Counter()

    def backpropagate(self, direction: Tensor) -> list[LayerCall]:
        return self.recorder.backpropagate(self.outputs, direction)

    def used_elsewhere(self) -> set[int]:
        """The ids of parameters of these layers that other operations of the graph read as well."""
        return {key for key, number in self.recorded_counts.items() if 0 < number != self.read_counts[key]}
