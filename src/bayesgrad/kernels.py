"""Runs elementwise functions on flat tensors, compiled or eagerly, with the same results.

An elementwise update is a pure function

    function(scalars, weight, gradient, *state) -> (weight, *state)

of flat tensors of equal length and a sequence of scalars. A tuple of such tensors is a row; `run` applies the function
to any number of rows in place. A function with other outputs has an attribute `writes`: the indices of the tensors in
the row that its outputs replace. A function that needs positions (for noise) takes a place after the scalars: the two
integers of a noise key and the position of the row's first element.

For large models `torch.compile` turns the function into one pass over memory. For small ones it runs eagerly, in
chunks that fit the cache.

Why it is fast (all measured):

- Each compiled call has four rows, which amortises the cost of a call. Fewer rows are cut into four pieces.
- Sizes are symbolic, so one compilation serves every model. Scalars are passed in one vector of the compute dtype, so
  a learning rate that changes at every step needs no recompilation and no conversion inside the loop.
- Compilation uses dummy tensors, so a failure changes no state. The compiled graph is then called without
  torch.compile's checks of its inputs, because rows are flat, distinct and checked here.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from bayesgrad.warning import warn

Row = tuple[Tensor, ...]  # (weight, gradient, *state), each (n,)
Place = tuple[int, ...]  # (*key, position of the first element)

ROWS_PER_CALL = 4
CHUNK = 1 << 17  # elements of one eager pass: its temporaries fit the second-level cache
COMPILE_THRESHOLD = 1 << 18  # elements of a whole model below which eager steps are cheaper than compilation
SMALLEST_PIECE = 64  # the shortest row of a compiled kernel: sizes 0 and 1 would be specialised
LARGEST_PIECE = 1 << 30  # keeps 32-bit indices valid on accelerators

_compiled: dict[Hashable, Callable | None] = {}
_unusable: set[str] = set()  # device types whose compiler has failed once


@cache
def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the state and of the computation: float32 for half-precision weights."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def should_compile(device: torch.device, elements: int) -> bool:
    """Whether to compile the step of a model with this number of elements on this device."""
    return device.type in ("cpu", "cuda") and elements >= COMPILE_THRESHOLD


def sqrt(x: Tensor) -> Tensor:
    """The square root, bit for bit the same in eager and compiled mode (unlike torch.sqrt on the CPU)."""
    if x.dtype == torch.float64:
        return x * x.rsqrt()
    return x.sqrt() if torch.compiler.is_compiling() else x.double().sqrt().to(x.dtype)


def exp(x: Tensor) -> Tensor:
    """e^x for x <= 0, at least the smallest normal number; bit for bit the same in eager and compiled mode.

    x = k log 2 + r: a polynomial in r, and k added to the exponent bits. (torch.exp and torch.tanh differ between
    modes.)
    """
    wide = x.dtype == torch.float64
    whole, bits, bias = (torch.int64, 52, 1023) if wide else (torch.int32, 23, 127)
    x = x.clamp(min=-708.0 if wide else -87.0)
    k = (x * 1.4426950408889634).round()
    r = x - k * 0.693359375 - k * -2.12194440054690583e-4  # log 2 in two parts, the first with few bits
    y = torch.ones_like(r)
    for degree in range(13 if wide else 7, 0, -1):
        y = y * r * (1 / degree) + 1
    return y * ((k.to(whole) + bias) << bits).view(x.dtype)


def sech_square(x: Tensor) -> Tensor:
    """1 - tanh(x)^2, without cancellation."""
    t = exp(-2 * x.abs())
    return 4 * t / ((1 + t) * (1 + t))


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, bit for bit the same in eager and compiled mode."""
    t = exp(-2 * x.abs())
    y = (1 - t) / (1 + t)
    return torch.where(x < 0, -y, y)


def run(
    function: Callable,
    scalars: Sequence[float],
    rows: list[Row],
    fused: bool | None,
    elements: int = 0,
    places: list[Place] | None = None,
) -> None:
    """Applies `function` to each row in place: its results replace weight and state.

    Args:
        function: an elementwise function, hashable.
        scalars: its scalars.
        rows: tuples of flat tensors.
        fused: whether to compile it; None for large models on a device with a compiler.
        elements: of the whole model, for `fused=None`.
        places: a place for each row, if the function needs positions.
    """
    if not rows:
        return
    if fused is None:
        fused = should_compile(rows[0][0].device, elements)
    work = list(zip(rows, places or [()] * len(rows)))
    if fused:
        work = _run_positional(function, scalars, work) if places else _run_compiled(function, scalars, rows)
    for row, place in work:
        _run_eager(function, scalars, row, place)


def _write(function: Callable, row: Row, values: Sequence[Tensor]) -> None:
    targets = getattr(function, "writes", (0, *range(2, len(row))))
    values = list(values)
    # A result that is itself an input must be cloned if that input is overwritten before the result is copied.
    for i, value in enumerate(values):
        for earlier in targets[:i]:
            if value is row[earlier]:
                values[i] = value.clone()
    for target, value in zip(targets, values):
        row[target].copy_(value)


def _run_eager(function: Callable, scalars: Sequence[float], row: Row, place: Place) -> None:
    chunk = CHUNK if row[0].device.type == "cpu" else row[0].numel()
    if row[0].numel() <= chunk:
        _write(function, row, function(scalars, *((place,) if place else ()), *row))
        return
    for start in range(0, row[0].numel(), max(chunk, 1)):
        piece = tuple(tensor[start : start + chunk] for tensor in row)
        here = ((*place[:-1], _wrapped(place[-1] + start)),) if place else ()
        _write(function, piece, function(scalars, *here, *piece))


def _wrapped(position: int) -> int:
    """A position modulo 2^32, as an int32."""
    return (position + 2**31) % 2**32 - 2**31


def _run_positional(
    function: Callable, scalars: Sequence[float], work: list[tuple[Row, Place]]
) -> list[tuple[Row, Place]]:
    """As `_run_compiled`, one row at a time because each has its own place."""
    left = []
    for row, place in work:
        weight = row[0]
        kernel = None
        if SMALLEST_PIECE <= weight.numel() <= LARGEST_PIECE:
            dtypes = tuple(tensor.dtype for tensor in row)
            kernel = _kernel(function, (len(scalars), len(place)), dtypes, weight.device)
        if kernel is None:
            left.append((row, place))
            continue
        vector = torch.tensor(scalars, dtype=compute_dtype(weight.dtype), device=weight.device)
        where = torch.tensor([_wrapped(word) for word in place], dtype=torch.int32, device=weight.device)
        kernel(vector, where, *row)
    return left


def _run_compiled(function: Callable, scalars: Sequence[float], rows: list[Row]) -> list[tuple[Row, Place]]:
    """Runs the rows that can be compiled and returns the others."""
    left = [row for row in rows if row[0].numel() < ROWS_PER_CALL * SMALLEST_PIECE]
    rows = [row for row in rows if row[0].numel() >= ROWS_PER_CALL * SMALLEST_PIECE]
    if not rows:
        return [(row, ()) for row in left]
    weight = rows[0][0]
    dtypes = tuple(tensor.dtype for tensor in rows[0])
    kernel = _kernel(function, (len(scalars), 0), dtypes, weight.device)
    if kernel is None:
        return [(row, ()) for row in left + rows]
    vector = torch.tensor(scalars, dtype=compute_dtype(weight.dtype), device=weight.device)
    for bundle in _bundles(rows):
        kernel(vector, *[tensor for row in bundle for tensor in row])
    return [(row, ()) for row in left]


def _bundles(rows: list[Row]) -> list[list[Row]]:
    """Groups of four rows; the longest rows of the last group are cut until it has four."""
    rows = [piece for row in rows for piece in _cut(row, -(-row[0].numel() // LARGEST_PIECE))]
    bundles = [rows[i : i + ROWS_PER_CALL] for i in range(0, len(rows), ROWS_PER_CALL)]
    last = bundles[-1]
    while len(last) < ROWS_PER_CALL:
        longest = max(range(len(last)), key=lambda i: last[i][0].numel())
        last += _cut(last.pop(longest), 2)
    return bundles


def _cut(row: Row, pieces: int) -> list[Row]:
    if pieces == 1:
        return [row]
    length = -(-row[0].numel() // pieces)
    length += -length % SMALLEST_PIECE if length > SMALLEST_PIECE else 0
    return list(zip(*(tensor.split(length) for tensor in row)))


def _kernel(
    function: Callable, counts: tuple[int, int], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Callable | None:
    """The compiled `function` for rows of these dtypes, or None if compilation is not available on this device.

    Args:
        counts: the number of scalars, and the number of integers of a place (0 if the function needs no positions).
    """
    if device.type in _unusable:
        return None
    key = (function, counts, dtypes, device)
    if key not in _compiled:
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # deprecation warnings of the compiler itself
                _compiled[key] = _compile(function, counts, dtypes, device)
        except Exception as error:  # compiler failures have many types; none may stop training
            _unusable.add(device.type)
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            warn(
                f"compiling the optimizer step for {device.type} failed ({reason.strip()}); running it in eager mode, "
                "which gives the same numbers more slowly. Pass fused=False to use eager mode from the start.",
                RuntimeWarning,
            )
            _compiled[key] = None
    return _compiled[key]


def _compile(
    function: Callable, counts: tuple[int, int], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Callable:
    """Compiles a call with four rows (one row, if it has a place) and returns a function that calls the graph.

    torch.compile checks at every call that its inputs have the dtypes and layouts it was compiled for. This holds by
    construction here, and the checks would cost as much as a step of a small model. So the backend stores the compiled
    graph, which is then called directly, with tensors and sizes in the order of the graph's inputs.
    """
    from torch._inductor.compile_fx import compile_fx

    width = len(dtypes)
    vector = torch.ones(counts[0], dtype=compute_dtype(dtypes[0]), device=device)
    place = [torch.ones(counts[1], dtype=torch.int32, device=device)] if counts[1] else []
    count, placed = (1, 1) if place else (ROWS_PER_CALL, 0)
    # Equal sizes would share a symbol; small ones would compile to loops that are not parallel.
    sizes = [(1 << 16) + 16 * i + 8 for i in range(count)]
    dummies = [torch.ones(size, dtype=dtype, device=device) for size in sizes for dtype in dtypes]
    graphs: list[tuple[Callable, list[Callable[[Sequence[Tensor]], Any]]]] = []

    def bundle(vector: Tensor, *tensors: Tensor) -> None:
        scalars = vector.unbind()
        here, tensors = [words.unbind() for words in tensors[:placed]], tensors[placed:]
        for i in range(count):
            row = tensors[i * width : (i + 1) * width]
            # An input that is returned unchanged must become a new value, or it would be copied after it is
            # overwritten; a clone would be optimised away.
            values = [x.neg().neg() if any(x is y for y in row) else x for x in function(scalars, *here, *row)]
            _write(function, row, values)

    def backend(graph: Any, inputs: Sequence[Any]) -> Callable:
        compiled: Any = compile_fx(graph, inputs, config_patches=_options(device))  # pyright: ignore[reportArgumentType]
        where = {tensor.data_ptr(): itemgetter(i) for i, tensor in enumerate((vector, *place, *dummies))}
        length = {size: partial(_length, 1 + placed + i * width) for i, size in enumerate(sizes)}
        graphs.append((compiled, [where[x.data_ptr()] if isinstance(x, Tensor) else length[int(x)] for x in inputs]))
        return compiled

    # torch counts recompilations per code object, so each kernel has its own copy.
    code = bundle.__code__.replace(co_name="step")
    isolated = types.FunctionType(code, bundle.__globals__, "step", None, bundle.__closure__)
    with torch._dynamo.config.patch(specialize_float=True):  # module constants are not inputs of the graph
        torch.compile(isolated, dynamic=True, fullgraph=True, backend=backend)(vector, *place, *dummies)
    ((compiled, arguments),) = graphs

    def kernel(*tensors: Tensor) -> None:
        compiled(*[argument(tensors) for argument in arguments])

    return kernel


def _length(index: int, tensors: Sequence[Tensor]) -> int:
    return tensors[index].shape[0]


def _options(device: torch.device) -> dict[str, Any]:
    import torch._inductor.config as inductor

    wanted: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
    if device.type == "cpu":
        wanted["cpp.vec_isa_ok"] = True  # skips a trial compilation: half the time of the first step
    return {name: value for name, value in wanted.items() if name in inductor.get_config_copy()}
