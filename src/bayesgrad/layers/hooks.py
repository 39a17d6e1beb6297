"""The hooks of a model that tell its recorder where a forward pass begins and ends, and the number of the pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bayesgrad.layers.recorder import LayerRecorder

MAX_DIMS = 6  # of outputs of a compiled model whose shape is noted
MAX_PASSES = 256  # forward passes whose shapes are kept until their backward pass


class PassNumber:
    """A number that compiled layers read: compiled code increments it in place, eager code puts another tensor there.

    A compiled backward pass may have saved the tensor, and read it after the next forward pass.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = np.array(number, dtype=np.int64)  # in the memory of the tensor, so that reading it is fast
        self.value = torch.from_numpy(self._number)

    def __int__(self) -> int:
        return int(self._number)

    def advance(self) -> bool:
        """Increments the number; returns False where that is not possible, and no layer is recorded."""
        if torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
            return False
        other = PassNumber(int(self) + 1)
        if type(other.value) is not Tensor:  # of another mode: FakeTensorMode
            return False
        self._number, self.value = other._number, other.value
        return True


def not_alone(function: Callable) -> None:
    """Lets torch.compile trace a function as a part of another one, but not compile it by itself.

    Where a graph breaks, or at the limit of recompilations, some functions of a forward pass are compiled and others
    are not. A hook that was compiled would tell recorders nothing, and layers that are not would ask them.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP  # of the function, and of what it calls
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    else:  # an earlier torch
        eval_frame.skip_code(function.__code__)


class Hook:
    """A hook of a recorder. A copy of the module that has it (deepcopy, pickle) gets a hook that does nothing."""

    def __init__(self, recorder: LayerRecorder | None = None) -> None:
        self.recorder = weakref.ref(recorder) if recorder is not None else lambda: None
        self.counter = PassNumber() if recorder is None else recorder.counter
        self.sizes = None if recorder is None else recorder.sizes

    def __reduce__(self) -> tuple:
        return type(self), ()


class PassCounter(Hook):
    """Counts the forward passes of a model."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            self.counter.value.add_(1)
        elif (recorder := self.recorder()) is not None:
            recorder.begin_pass()


class OutputHook(Hook):
    """Notes the shapes of the model's outputs."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        if torch.compiler.is_compiling():
            if self.sizes is not None and isinstance(output, Tensor) and output.dim() <= MAX_DIMS:
                number = self.counter.value.reshape(1)
                place = number % MAX_PASSES
                self.sizes[0].index_copy_(0, place, number)
                for dim in range(MAX_DIMS):
                    self.sizes[1 + dim].index_fill_(0, place, output.shape[dim] if dim < output.dim() else 0)
        elif (recorder := self.recorder()) is not None:
            recorder.end_pass(args, kwargs, output)


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


for _function in (PassCounter.__call__, OutputHook.__call__, InputHook.__call__, PassNumber.advance):
    not_alone(_function)
