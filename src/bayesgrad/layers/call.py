"""One call of a layer, and the autograd function that passes it to recorders.

See `layers.recorder` for how it works.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bayesgrad.layers.hooks import PassNumber
from bayesgrad.layers.layout import RowLayout
from bayesgrad.layers.operations import LINEAR, Operation, input_gradient, operation, parameter_gradients, prepare, run
from bayesgrad.shards import owner

if TYPE_CHECKING:
    from bayesgrad.layers.recorder import LayerRecorder

SITE = "_bayesgrad_site"  # the attribute of a recorded module
COMPILED = 1 << 40  # added to the ids of the forward passes of compiled models
Pair = tuple[Tensor | None, Tensor | None]
CallId = int | tuple[int, int]  # of a compiled model: the execution of a graph, and a call in it
CallKey = tuple[tuple[int, int], CallId]


def loss_id(pass_id: tuple[int, int]) -> tuple[int, int]:
    """Identifies the losses of a pass, which may have several backward passes."""
    return min(pass_id[0], 0), pass_id[1]


@dataclass(eq=False, slots=True)
class LayerCall:
    """One call of a layer: its input, and the derivative of the loss with respect to its output.

    Args:
        module: the layer.
        input: what the weight is applied to, see `layers.operations.prepare`.
        error: the derivative with respect to the output, in the output's shape.
        backward_id: identifies the backward pass; negative for calls from `LayerRecorder.backpropagate`.
        forward_id: identifies the forward pass. Calls with the same one have the same examples.
        name: of the layer.
        volatile: whether the input is a tensor of the caller, who may overwrite it in place.
        layout: which rows belong to which example, if it was found out; else the first dimension is that of examples.
        call_id: identifies the call in its forward pass, whose graph may be differentiated by several backward passes;
            None if it is not known, or for calls from `backpropagate`.
    """

    module: nn.Module
    input: Tensor
    error: Tensor
    backward_id: int
    forward_id: int = 0
    name: str = ""
    volatile: bool = False
    layout: RowLayout | None = None
    call_id: CallId | None = None

    @property
    def pass_id(self) -> tuple[int, int]:
        """Calls with the same one have the same loss, perhaps in several terms.

        It is that of one forward pass, or, if they are from `backpropagate`, of outputs that may have been computed in
        several (and concatenated).
        """
        if self.backward_id < 0:
            return self.backward_id, 0
        return 0 if self.call_id is not None else self.backward_id, self.forward_id

    @property
    def loss_id(self) -> tuple[int, int]:
        """As `pass_id`, but the same for all backward passes of a forward pass."""
        return loss_id(self.pass_id)

    @property
    def key(self) -> CallKey | None:
        """The same for calls that bring errors of several terms of a loss, in several backward passes."""
        return None if self.call_id is None else (self.pass_id, self.call_id)

    def kept(self) -> LayerCall:
        """The same call, safe to keep until the next step."""
        return replace(self, input=self.input.clone(), volatile=False) if self.volatile else self


class Site:
    """The recorders of one module. A copy of the module (deepcopy, pickle) has none."""

    handles = count()
    calls = count()

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = weakref.ref(module) if module is not None else lambda: None
        self.recorders: list[tuple[Callable[[], LayerRecorder | None], str]] = []
        self.parts: Mapping[str, nn.Module] = {}  # see `layers.composite`
        self.handle = next(Site.handles)
        # For compiled models, which would be compiled again for other integers: the handle, and a count of passes.
        self.key = torch.tensor(self.handle)
        self.counter = PassNumber()
        # The latest backward pass, and the calls that it has differentiated by execution of a compiled graph.
        self.latest: tuple[int, Counter[int]] = -1, Counter()
        self.called = 0  # the latest forward pass with a call that is not compiled

    def __reduce__(self) -> tuple:
        return Site, ()

    def own_nodes(self, nodes: Sequence[Any]) -> list[Any]:
        """Those that add to gradients of the module's parameters, and not of tensors in their place."""
        module = self.module()
        own = [] if module is None else [p for p in module._parameters.values() if p is not None]
        ids = set(map(id, own))
        if all(id(getattr(node, "variable", None)) in ids for node in nodes):
            return list(nodes)
        ids = {id(owner(p)) for p in own}  # of parameters that `fully_shard` has gathered, in the pass or now
        return [node for node in nodes if id(owner(getattr(node, "variable", None))) in ids]

    def nodes_of(self, function: Any) -> list[Any] | None:
        """The nodes that add to gradients, if a call has the module's parameters and no others (functional_call).

        Args:
            function: the node of the call in the autograd graph.
        """
        nodes = [node for node, _ in function.next_functions[1:3] if node is not None]
        return nodes if len(self.own_nodes(nodes)) == len(nodes) else None

    def forward_id(self) -> int:
        for ref, _ in self.recorders:
            if (recorder := ref()) is not None:
                return recorder.begun if recorder.inside else recorder.forward_id
        return 0

    def begin_call(self) -> int:
        """The forward pass of a call that begins."""
        self.called = self.forward_id()
        return self.called

    def compiled_id(self, number: int) -> int:
        """As `forward_id`, of a compiled call that has read this number of a pass."""
        for ref, _ in self.recorders:
            if (recorder := ref()) is not None and recorder.counter is self.counter:
                repeated = number == recorder.repeated[0] and recorder.backward_id == torch._C._current_graph_task_id()
                return recorder.repeated[1] if repeated else recorder.numbers.get(number, COMPILED + number)
        return COMPILED + number

    def note_hidden(self) -> None:
        """Called without gradients: perhaps inside of a checkpoint, which will call the module again with them."""
        for ref, _ in self.recorders:
            if (recorder := ref()) is not None:
                recorder.hidden = True

    def gradients(
        self,
        op: Operation,
        error: Tensor,
        x: Tensor,
        weight: Tensor,
        needs: tuple[bool, bool],
        forward_id: int,
        volatile: bool = False,
        nodes: Sequence[Any] | None = None,
        call_id: CallId | None = None,
    ) -> Pair:
        """Passes input and error to the recorders, and returns the gradients of weight and bias.

        Args:
            op, error, x, weight, needs: as in `operations.parameter_gradients`.
            forward_id, volatile, call_id: of the call.
            nodes: which add to the gradients of weight and bias; None in a compiled model, where they are not known.
        """
        module = self.module()
        alive = [(recorder, name) for ref, name in self.recorders if (recorder := ref()) is not None]
        if module is None or not alive:
            return parameter_gradients(op, error, x, weight, needs)
        seen = x.detach(), error.detach()
        for recorder, name in alive:
            if recorder.marks is not None and torch.is_grad_enabled():
                recorder.marks.differentiable(module)
            if recorder.capture is not None:
                # A compiled model gives zeros to layers that the observed ones of its outputs do not depend on.
                if x.numel() and (nodes is not None or bool(error.any())):
                    with torch.no_grad():
                        recorder.capture(LayerCall(module, *seen, recorder.captures, forward_id, name, volatile))
                return None, None
        if nodes is None:
            nodes = [_node(p) for p in module._parameters.values() if p is not None and p.requires_grad]
        if not any(map(_is_executed, nodes)):
            return parameter_gradients(op, error, x, weight, needs)
        task = torch._C._current_graph_task_id()
        with torch.no_grad():
            found = [
                recorder.received(LayerCall(module, *seen, task, forward_id, name, volatile, None, call_id))
                for recorder, name in (alive if x.numel() else ())  # an empty batch is not recorded
            ]
        given = [one for one in found if one is not None]
        if given and len(alive) > 1:
            _refuse_conflict(module, [(recorder, one) for (recorder, _), one in zip(alive, found)])
        first, second = (next((one[side] for one in given if one[side] is not None), None) for side in (0, 1))
        missing = needs[0] and first is None, needs[1] and second is None
        if any(missing):  # a parameter that none of them has, or all of them leave as it is
            own = parameter_gradients(op, error, x, weight, missing)
            first, second = own[0] if missing[0] else first, own[1] if missing[1] else second
        pair = first, second
        for recorder, _ in alive:
            if recorder.marks is not None:
                recorder.marks.returned(module, pair, task)
        return pair

    def turn(self) -> tuple[int, int]:
        """Identifies a call in an execution of a compiled graph, whose calls are all differentiated, in one order."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()  # pyright: ignore
        execution = -1 if node is None else node.metadata.setdefault(SITE, next(Site.calls))  # pyright: ignore
        self.latest = self.latest if self.latest[0] == task else (task, Counter())
        self.latest[1][execution] += 1
        return execution, self.latest[1][execution]


def _refuse_conflict(module: nn.Module, found: Iterable[tuple[Any, Pair | None]]) -> None:
    """Raises if a gradient is replaced by one of several optimizers that have the parameter."""
    marks = [(recorder.marks, one) for recorder, one in found if recorder.marks is not None]
    for side, name in enumerate(("weight", "bias")):
        p = module._parameters.get(name)
        having = [one for own, one in marks if any(p is q for q in own.params)]
        if len(having) > 1 and any(one is not None and one[side] is not None for one in having):
            raise RuntimeError(
                f"two optimizers have the {name} of a {type(module).__name__} layer, and one of them preconditions its "
                "gradient in the backward pass: use precondition='step', or delete the optimizer that is not used any "
                "more, and schedulers that refer to it."
            )


SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()


@torch.library.custom_op("bayesgrad::parameter_gradients", mutates_args=())
def _compiled_gradients(
    error: Tensor, x: Tensor, weight: Tensor, forward_id: Tensor, key: Tensor, needs_weight: bool, bias_shape: list[int]
) -> tuple[Tensor, Tensor]:
    # Tensors of a compiled graph are overwritten after the call, so recorders get copies.
    needs_bias = bias_shape != [0]
    site, needs = SITES[int(key)], (needs_weight, needs_bias)
    module = site.module()
    assert module is not None
    x, error = x.clone(), error.clone()
    number = int(forward_id)
    pass_id = site.compiled_id(number)
    call_id = site.turn() if number and pass_id >= 0 else None  # calls outside of the model cannot be told apart
    weight_gradient, bias_gradient = site.gradients(
        operation(module), error, x, weight, needs, pass_id, call_id=call_id
    )
    if weight_gradient is None:
        weight_gradient = torch.zeros_like(weight) if needs_weight else weight.new_empty(0)
    if bias_gradient is None:
        bias_gradient = weight.new_zeros(bias_shape)
    return weight_gradient.contiguous(), bias_gradient.contiguous()


@_compiled_gradients.register_fake
def _(
    error: Tensor, x: Tensor, weight: Tensor, forward_id: Tensor, key: Tensor, needs_weight: bool, bias_shape: list[int]
) -> tuple[Tensor, Tensor]:
    by_weight = weight.new_empty(weight.shape) if needs_weight else weight.new_empty(0)
    return by_weight, weight.new_empty(bias_shape)


@torch.library.custom_op("bayesgrad::copy_of", mutates_args=())
def _copy_of(counter: Tensor) -> Tensor:
    # The compiler would save the counter itself for the backward pass, although the next forward pass changes it.
    return counter.clone()


@_copy_of.register_fake
def _(counter: Tensor) -> Tensor:
    return torch.empty_like(counter)


class RecordedLayer(torch.autograd.Function):
    """The operation of a layer, whose backward passes input and error to the recorders of the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        ctx.op, forward_id, handle = rest
        compiled = isinstance(handle, Tensor)
        ctx.save_for_backward(x, weight, *((forward_id, handle) if compiled else ()))
        ctx.forward_id, ctx.handle = (0, 0) if compiled else (forward_id, handle)
        ctx.call_id = None if compiled else next(Site.calls)  # the address of a node that was freed is used again
        # A tensor of the caller, or a view of one: a parameter, for example, which changes before the step.
        ctx.volatile = not compiled and (x if x._base is None else x._base).is_leaf
        ctx.bias_shape = [0] if bias is None else list(bias.shape)
        ctx.set_materialize_grads(False)
        return run(ctx.op, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple:
        (error,) = grad_outputs
        if error is None:
            return (None,) * 6
        x, weight, *compiled = ctx.saved_tensors
        needs_input, *needs = ctx.needs_input_grad[:3]
        # Under autocast the output has another dtype than weight and input.
        a = x.to(error.dtype) if x.is_floating_point() else x
        w = weight.to(error.dtype)
        by_input = input_gradient(ctx.op, error, a, w).to(x.dtype) if needs_input else None
        by_weight = by_bias = None
        if compiled:
            by_weight, by_bias = _compiled_gradients(
                error, a, w, *compiled, needs[0], ctx.bias_shape if needs[1] else [0]
            )
            by_weight, by_bias = (g if n else None for g, n in zip((by_weight, by_bias), needs))
        elif (site := SITES.get(ctx.handle)) is not None and (nodes := site.nodes_of(ctx)) is not None:
            by_weight, by_bias = site.gradients(
                ctx.op, error, a, w, tuple(needs), ctx.forward_id, ctx.volatile, nodes, ctx.call_id
            )
        else:
            by_weight, by_bias = parameter_gradients(ctx.op, error, a, w, needs)
        by_weight, by_bias = (None if g is None else g.to(weight.dtype) for g in (by_weight, by_bias))
        return by_input, by_weight, by_bias, None, None, None


def forward(self: nn.Module, input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """The forward pass of a recorded module. A call with further arguments is not recorded."""
    weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
    plain = weight is None or rest or options or is_derived(self, "weight", "bias")  # as one that is pruned later
    plain = plain or getattr(self, "sparse", False)  # an embedding with sparse gradients
    if plain or not is_recorded(self, weight, bias):
        return type(self).forward(self, input, *rest, **options)
    x = input if isinstance(self, nn.Linear) else prepare(self, input)
    return applied(self, x, weight, bias)  # pyright: ignore[reportArgumentType]


def is_derived(module: nn.Module, *names: str) -> bool:
    """Whether a module computes with another tensor than its parameter of a name: one that is pruned or parametrised.

    No attribute is read, because a parametrisation may change its state when it is.
    """
    given, kind = (module.__dict__, module._buffers), type(module)
    return any(any(isinstance(some.get(name), Tensor) for some in given) or hasattr(kind, name) for name in names)


def is_recorded(module: nn.Module, *params: Tensor | None) -> bool:
    """Whether a call of this module with these parameters is recorded."""
    site = module.__dict__.get(SITE)
    if site is None or not site.recorders:
        return False
    if not torch.is_grad_enabled():
        if not torch.compiler.is_compiling():
            site.note_hidden()
        return False
    if not any(p is not None and p.requires_grad for p in params):
        return False
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore


def applied(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operation of a recorded module with these parameters."""
    site: Site = getattr(module, SITE)
    compiling = torch.compiler.is_compiling()
    ids = (_copy_of(site.counter.value), site.key) if compiling else (site.begin_call(), site.handle)
    op = (LINEAR,) if isinstance(module, nn.Linear) else operation(module)
    return RecordedLayer.apply(x, weight, bias, op, *ids)  # pyright: ignore[reportReturnType]


class Part(NamedTuple):
    """A layer inside of a module that does not call it (`layers.composite`), with its parameters in this call."""

    module: nn.Module
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if is_recorded(self.module, self.weight, self.bias):
            return applied(self.module, x, self.weight, self.bias)
        return run(operation(self.module), x, self.weight, self.bias)


class Through:
    """A hook of a parameter that is part of the model: a mask of its weight, which gradients pass through."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def __call__(self, gradient: Tensor) -> Tensor:
        return (gradient * self.factor).to(gradient.dtype)


@contextmanager
def without_hooks(params: Iterable[Tensor], but: type | tuple[type, ...] = ()) -> Iterator[None]:
    """A context in which hooks of parameters (`Tensor.register_hook`) have no effect: they are for gradients of steps.

    Args:
        but: hooks to keep.
    """
    hooks = [(found, dict(found)) for p in params if (found := p._backward_hooks)]
    for found, every in hooks:
        found.clear()
        found.update({key: hook for key, hook in every.items() if isinstance(hook, but)})
    try:
        yield
    finally:
        for found, every in hooks:
            found.clear()
            found.update(every)


def adds_to_gradient(p: Tensor) -> bool:
    """Whether the running backward pass adds to the gradient of a parameter."""
    return _is_executed(_node(p))


def _is_executed(node: Any) -> bool:
    """Whether the running backward pass runs a node, which adds to the gradient of a parameter."""
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # raised inside torch.autograd.grad(), which never adds to .grad
        return False


def _node(p: Tensor) -> Any:
    # An operator runs without autograd, which has the node of the parameter.
    key = torch._C.DispatchKey.AutogradFunctionality  # pyright: ignore[reportAttributeAccessIssue]
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):  # pyright: ignore
        return get_gradient_edge(p).node
