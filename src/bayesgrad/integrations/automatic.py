"""`attach`: the passes of a model draw weights and observe outputs by themselves, whichever loop runs them.

A training loop that was written for torch.optim calls the model, `loss.backward()` and `optimizer.step()`, and nothing
else. An attached optimizer does the rest of its loop in hooks of the model:

| in the loop of `BeliefOptimizer` | done by |
|---|---|
| `with optimizer.sampled():` begins | the beginning of a forward pass in training mode, with gradients |
| `optimizer.observe(outputs, loss=loss)` | the end of that forward pass |
| the context ends | the end of the backward pass that adds to `.grad`; else, whatever needs the mean of the weights |

So the wrappers that other packages put around an optimizer do not matter: nothing is called through them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesgrad.distributed import after_averaging
from bayesgrad.integrations.outputs import has_several_labels, observation
from bayesgrad.optimizer import BeliefOptimizer

Observed = Callable[[tuple, dict, Any], Mapping[str, Any]]


def attach(optimizer: Any, model: nn.Module | None = None, *, observed: Observed | None = None) -> Attachment:
    """Lets forward and backward passes of a model draw weights and observe outputs, as far as its optimizer needs it.

    Training loops then need neither `sampled()` nor `observe()`. Each forward pass in training mode (`model.training`,
    with gradients) begins with a draw, and the end of its backward pass restores the mean of the weights. Several
    forward passes before one backward pass share a draw, and one forward pass has one backward pass. Closures,
    accumulation, clipping, `GradScaler` and DistributedDataParallel work as in any loop. A copy of the model is not
    attached. An optimizer is attached once; attaching it again replaces the former attachment. A rule that needs the
    loss (`needs.loss`) gets it from a model that returns it; else call `optimizer.observe(loss=loss)` in the loop.

    Args:
        optimizer: of this package, or a wrapper with one in its attribute `optimizer`, as accelerate's.
        model: whose forward passes the loop runs; None for the model that was given to the optimizer.
        observed: positional arguments, keyword arguments and outputs of a forward pass -> the arguments of
            `observe`. By default outputs may be a tensor, a dict or ModelOutput with `logits` and `loss`, or a tuple
            of these, and labels of -100 do not count.

    Returns:
        A handle; `remove()` ends it.

    Example:
        >>> from bayesgrad.optim import IVON
        >>> model = nn.Linear(3, 2)
        >>> optimizer = IVON(model, num_data=100)
        >>> handle = attach(optimizer, model)
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.draws
        1

    Checked by: tests/contract/test_attach.py.
    """
    own = belief_optimizer(optimizer)
    refuse_scaler(own, getattr(optimizer, "scaler", None), "use mixed_precision='bf16' or 'no' (bf16=True of Trainer)")
    model = own.model if model is None else model
    if model is None:
        raise TypeError(
            f"this {type(own).__name__} was built from parameters: pass the model, attach(optimizer, model)."
        )
    if own.attachment is not None:
        own.attachment.remove()
    own.attachment = Attachment(own, model, observed)
    return own.attachment


def refuse_scaler(optimizer: BeliefOptimizer, scaler: Any, remedy: str) -> None:
    """Raises if the loss that a training loop shows to its optimizer has the scale of a `GradScaler`.

    Args:
        optimizer: that may need the loss.
        scaler: of the loop; None without one.
        remedy: how this loop trains without it.
    """
    if optimizer.needs.loss and scaler is not None and scaler.is_enabled():
        raise ValueError(
            f"{type(optimizer).__name__} needs second derivatives of the loss, whose weight is not known behind the "
            f"GradScaler of this training loop: {remedy}."
        )


def belief_optimizer(optimizer: Any) -> BeliefOptimizer:
    """The optimizer inside of wrappers that have it in their attribute `optimizer`."""
    inner = optimizer
    while not isinstance(inner, BeliefOptimizer) or isinstance(getattr(inner, "optimizer", None), BeliefOptimizer):
        if (inner := getattr(inner, "optimizer", None)) is None:
            raise TypeError(f"expected an optimizer of bayesgrad, or a wrapper of one, got {type(optimizer).__name__}.")
    return inner


class Attachment:
    """What `attach` returns.

    Attributes:
        optimizer, model: which are attached.
        observed: reads the arguments of `observe` from a forward pass.
    """

    def __init__(self, optimizer: BeliefOptimizer, model: nn.Module, observed: Observed | None) -> None:
        self.optimizer: BeliefOptimizer = weakref.proxy(optimizer)
        self.model, self.observed, self._given = model, observed or observation(model), observed is not None
        self._draw: Any = None  # the context of the current draw
        self._accumulated = False  # whether gradients were added in it
        self._marked: dict[Tensor, Any] = {}  # handles of hooks of parameters
        self._last: Any = None  # handle of the hook that observes, the last one of the model
        self._handles: list[Any] = []
        self._calls: list[Callable[[], Any]] = []
        if any(optimizer.needs[:3]) or self._counts_losses():
            self._handles.append(model.register_forward_pre_hook(_Hook(self, "begin"), prepend=True))
            self._handles.append(model.register_state_dict_pre_hook(_Hook(self, "leave")))

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Called before a forward pass of the model."""
        if not (module.training and torch.is_grad_enabled()):
            self.leave()
            return
        if self.optimizer.needs.draws and not self.optimizer.sampling:
            for p in (p for group in self.optimizer.param_groups for p in group["params"]):
                if p.requires_grad and p not in self._marked:
                    self._marked[p] = p.register_post_accumulate_grad_hook(_Hook(self, "accumulated"))
            self._accumulated, draw = False, self.optimizer.sampled()
            draw.__enter__()
            self._draw = draw
        if self._last is not None:
            self._last.remove()
        # Registered in each pass, it is called after the hooks by which optimizers note the shapes of outputs.
        self._last = module.register_forward_hook(_Hook(self, "end"), with_kwargs=True, always_call=True)

    def end(self, module: nn.Module, args: tuple, kwargs: dict, outputs: Any) -> None:
        """Called after a forward pass in training, also after one that raised (with None for its outputs)."""
        if self._last is not None:
            self._last.remove()
            self._last = None
        needs = self.optimizer.needs
        needed, seen = needs.outputs or needs.loss, {}
        if any(t.requires_grad for t in _tensors(outputs)):
            if needed or (self._counts_losses() and (self._given or has_several_labels(kwargs))):
                seen = self.observed(args, kwargs, outputs)
            if not needed and seen.get("labels") is None and seen.get("weights") is None:
                seen = {}  # all losses count
        if seen and not (needs.loss and seen.get("loss") is None):  # else the loop, which has the loss, observes it
            self.optimizer.observe(**seen)
        self.follow(outputs)

    def _counts_losses(self) -> bool:
        """Whether the optimizer, which may not need outputs, would know from labels which losses count."""
        parts = (*self.optimizer.sources, self.optimizer.preconditioner)
        return any(part is not None and part.counts_losses for part in parts)

    def follow(self, outputs: Any) -> None:
        """Lets the backward pass of these outputs end the current draw; ends it now if they have none."""
        found = _tensors(outputs)
        if not found and outputs is not None and self._draw is not None:
            self.leave()
            raise TypeError(
                f"the model returned {type(outputs).__name__}, in which no tensor was found: return tensors, a dict or "
                "a tuple of them, or write `with optimizer.sampled():` in the loop."
            )
        tensors = [t for t in found if t.requires_grad]
        if not tensors:
            self.leave()
        for t in tensors if self._draw is not None else ():
            t.register_hook(_Hook(self, "differentiated"))

    def accumulated(self, p: Tensor) -> None:
        """Called when a backward pass has added to the gradient of a parameter."""
        self._accumulated = True

    def differentiated(self, gradient: Tensor) -> None:
        """Called at the beginning of a backward pass of outputs; those of `torch.autograd.grad` add no gradients."""
        after_averaging(_Hook(self, "finished"))

    def finished(self) -> None:
        """Called at the end of that backward pass."""
        if self._accumulated:
            self.leave()

    def leave(self, *_: Any) -> None:
        """Ends the current draw: weights are their mean again."""
        draw, self._draw = self._draw, None
        if draw is not None:
            draw.__exit__(None, None, None)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """A context for the passes of a closure, which draw by themselves."""
        try:
            yield
        finally:
            self.leave()

    def on_removal(self, call: Callable[[], Any]) -> None:
        """Calls a function when the attachment is removed."""
        self._calls.append(call)

    def remove(self) -> None:
        """Ends the current draw and removes all hooks."""
        self.leave()
        for handle in (*self._handles, *self._marked.values(), *([self._last] if self._last else ())):
            handle.remove()
        for call in self._calls:
            call()
        self._handles, self._marked, self._last, self._calls = [], {}, None, []
        if self.optimizer.attachment is self:
            self.optimizer.attachment = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _tensors(outputs: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


class _Hook:
    """A method of an attachment as a hook. A copy of the model (deepcopy, pickle) gets hooks that do nothing."""

    def __init__(self, owner: Attachment | None = None, name: str = "") -> None:
        self.owner = weakref.ref(owner) if owner is not None else lambda: None
        self.name = name

    def __call__(self, *args: Any) -> None:
        if (owner := self.owner()) is not None:
            getattr(owner, self.name)(*args)

    # torch.compile must call this function and not trace it. torch's own decorator would import the compiler.
    __call__._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]

    def __reduce__(self) -> tuple:
        return type(self), ()
