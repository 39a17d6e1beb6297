"""The forward pass of nn.LSTM, nn.GRU and nn.RNN, with their projections as recorded layers.

One layer in one direction is one autograd function. Its forward loops over time, and its backward collects the errors
of all time steps, so that each projection is one call with a row for each example and time step. Only what depends on
the previous step is computed in the loops. Sequences are (examples, time, features).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from bayesgrad.layers.call import SITE, SITES, Pair, Part, Site, is_recorded
from bayesgrad.layers.operations import LINEAR, parameter_gradients


class Errors(NamedTuple):
    """Derivatives of the loss by the outputs of projections and by the initial state.

    Args:
        inputs: by those of the input projection, W_ih x + b_ih.
        hidden: by those of the recurrent projection, W_hh h + b_hh.
        outputs: by the hidden states, which are outputs of W_hr if there is one.
        h, c: by the initial state.
    """

    inputs: Tensor
    hidden: Tensor
    outputs: Tensor
    h: Tensor
    c: Tensor | None = None


class Cell(NamedTuple):
    """A kind of recurrent layer.

    Args:
        run: (projected inputs, bias of the recurrent projection, its weight, W_hr, h, c) -> (saved tensors, final c);
            the first saved tensor has the hidden states (examples, 1 + time, size), from h on. It may overwrite the
            projected inputs. Its bias is added to the projected inputs if `folds`.
        errors: (saved tensors, its weight, W_hr, derivatives by all hidden states, by the final h and c) -> Errors.
        fused: torch's implementation.
        folds: whether both projections are only used as their sum.
    """

    run: Callable[..., tuple[list[Tensor], Tensor | None]]
    errors: Callable[..., Errors]
    fused: Callable[..., Any]
    folds: bool = True


# --- LSTM ---


def _run_lstm(
    gates: Tensor, bias: None, weight: Tensor, project: Tensor | None, h: Tensor, c: Tensor
) -> tuple[list[Tensor], Tensor]:
    """i, f, o = sigmoid(gates), g = tanh(gates); c_t = f c_{t-1} + i g; h_t = o tanh(c_t), times W_hr' if given."""
    size = c.shape[-1]
    hidden, cells = _states(h, gates), _states(c, gates)
    squashed = torch.empty_like(cells[:, 1:])  # tanh(c_t)
    for t in range(gates.shape[1]):
        now = gates[:, t].addmm_(hidden[:, t], weight.T)
        now[:, : 2 * size].sigmoid_()
        now[:, 2 * size : 3 * size].tanh_()
        now[:, 3 * size :].sigmoid_()
        i, f, g, o = now.chunk(4, -1)
        c = torch.mul(f, cells[:, t], out=cells[:, t + 1]).addcmul_(i, g)
        torch.tanh(c, out=squashed[:, t])
        if project is None:
            torch.mul(o, squashed[:, t], out=hidden[:, t + 1])
        else:
            torch.mm(o * squashed[:, t], project.T, out=hidden[:, t + 1])
    return [hidden, gates, cells, squashed], c.clone()


def _lstm_errors(
    saved: Sequence[Tensor], weight: Tensor, project: Tensor | None, slopes: Tensor, h: Tensor, c: Tensor
) -> Errors:
    _, gates, cells, squashed = saved
    (i, f, g, o), errors = gates.chunk(4, -1), torch.empty_like(gates)
    parts = errors.unflatten(-1, (4, -1))
    # Until they are multiplied: derivatives of c_t by the first three gates, and of o tanh(c_t) by the last one.
    product = i * g
    torch.addcmul(product, product, i, value=-1, out=parts[:, :, 0])  # i (1 - i) g
    torch.addcmul(i, product, g, value=-1, out=parts[:, :, 2])
    torch.mul(f, cells[:, :-1], out=product)
    torch.addcmul(product, product, f, value=-1, out=parts[:, :, 1])
    torch.mul(o, squashed, out=product)
    torch.addcmul(product, product, o, value=-1, out=parts[:, :, 3])
    by_cell = torch.addcmul(o, product, squashed, value=-1)
    outputs = torch.empty_like(slopes, memory_format=torch.contiguous_format)
    for t in reversed(range(gates.shape[1])):
        torch.add(slopes[:, t], h, out=outputs[:, t])
        h = outputs[:, t]
        h = h if project is None else h @ project
        c = torch.addcmul(c, h, by_cell[:, t])
        parts[:, t, :3] *= c[:, None]
        parts[:, t, 3] *= h
        c = c * f[:, t]
        h = errors[:, t] @ weight
    return Errors(errors, errors, outputs, h, c)


# --- GRU ---


def _run_gru(
    gates: Tensor, bias: Tensor | None, weight: Tensor, project: None, h: Tensor, c: None
) -> tuple[list[Tensor], None]:
    """r, z = sigmoid(gates + W h + b); n = tanh(gates_n + r (W h + b)_n); h_t = (1 - z) n + z h_{t-1}."""
    size = h.shape[-1]
    hidden, news = _states(h, gates), torch.empty_like(gates[..., :size])
    for t in range(gates.shape[1]):
        now, h = gates[:, t], hidden[:, t]
        by_hidden = F.linear(h, weight, bias)
        now[:, : 2 * size].add_(by_hidden[:, : 2 * size]).sigmoid_()
        r, z, n = now.chunk(3, -1)
        news[:, t] = by_hidden[:, 2 * size :]
        n.addcmul_(r, news[:, t]).tanh_()
        torch.lerp(n, h, z, out=hidden[:, t + 1])
    return [hidden, gates, news], None


def _gru_errors(saved: Sequence[Tensor], weight: Tensor, project: None, slopes: Tensor, h: Tensor, c: None) -> Errors:
    hidden, gates, news = saved
    (r, z, n), before = gates.chunk(3, -1), hidden[:, :-1]
    by_new = (1 - z) * (1 - n * n)
    errors = torch.cat([by_new * news * r * (1 - r), (before - n) * z * (1 - z), by_new * r], -1)
    parts = errors.unflatten(-1, (3, -1))  # derivatives by h_t, until they are multiplied
    outputs = torch.empty_like(slopes, memory_format=torch.contiguous_format)
    for t in reversed(range(gates.shape[1])):
        torch.add(slopes[:, t], h, out=outputs[:, t])
        parts[:, t] *= outputs[:, t, None]
        h = torch.addmm(outputs[:, t] * z[:, t], errors[:, t], weight)
    inputs = torch.cat([errors[..., : 2 * n.shape[-1]], by_new * outputs], -1)
    return Errors(inputs, errors, outputs, h)


# --- RNN ---


def _run_rnn(squash: Callable[[Tensor], Tensor]) -> Callable[..., tuple[list[Tensor], None]]:
    def run(sums: Tensor, bias: None, weight: Tensor, project: None, h: Tensor, c: None) -> tuple[list[Tensor], None]:
        hidden = _states(h, sums)
        for t in range(sums.shape[1]):
            hidden[:, t + 1] = squash(sums[:, t].addmm_(hidden[:, t], weight.T))
        return [hidden], None

    return run


def _rnn_errors(slope: Callable[[Tensor], Tensor]) -> Callable[..., Errors]:
    def errors(saved: Sequence[Tensor], weight: Tensor, project: None, slopes: Tensor, h: Tensor, c: None) -> Errors:
        found = slope(saved[0][:, 1:])
        outputs = torch.empty_like(slopes, memory_format=torch.contiguous_format)
        for t in reversed(range(slopes.shape[1])):
            torch.add(slopes[:, t], h, out=outputs[:, t])
            found[:, t] *= outputs[:, t]
            h = found[:, t] @ weight
        return Errors(found, found, outputs, h)

    return errors


CELLS = {
    "LSTM": Cell(_run_lstm, _lstm_errors, _VF.lstm),
    "GRU": Cell(_run_gru, _gru_errors, _VF.gru, folds=False),
    "RNN_TANH": Cell(_run_rnn(torch.tanh), _rnn_errors(lambda h: 1 - h * h), _VF.rnn_tanh),
    "RNN_RELU": Cell(_run_rnn(torch.relu), _rnn_errors(lambda h: (h > 0).to(h.dtype)), _VF.rnn_relu),
}


def _states(first: Tensor, like: Tensor) -> Tensor:
    """A tensor for the states of all time steps, with the first one filled in, (examples, 1 + time, size)."""
    states = like.new_empty(len(like), 1 + like.shape[1], first.shape[-1])
    states[:, 0] = first
    return states


class RecordedRecurrence(torch.autograd.Function):
    """One layer of a recurrent module in one direction, whose backward passes on what its projections received.

    Tensors: the input, weight and bias of the input projection, those of the recurrent projection, W_hr, and the
    initial h and c. Further arguments: the name of the cell, an identifier of the forward pass, and the handles of the
    sites of the three projections, -1 for those that are not recorded.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        tensors, (ctx.kind, ctx.forward_id, ctx.handles) = given[:8], given[8:]
        x, w_ih, b_ih, w_hh, b_hh, w_hr, h, c = tensors
        ctx.handle = max(ctx.handles)
        ctx.call_ids = [next(Site.calls) for _ in ctx.handles]  # the same in all backward passes of this graph
        ctx.present = [tensor is not None for tensor in tensors]
        cell = CELLS[ctx.kind]
        gates = F.linear(x, w_ih, b_ih + b_hh if cell.folds and b_ih is not None else b_ih)
        cast = [None if t is None else t.to(gates.dtype) for t in (b_hh, w_hh, w_hr, h, c)]  # for autocast
        with torch.autocast(gates.device.type, enabled=False):
            saved, c_last = cell.run(gates, *cast)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        return saved[0][:, 1:].clone(), saved[0][:, -1].clone(), c_last

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple:
        saved = ctx.saved_tensors  # read once, as checkpointing requires
        tensors, saved = saved[:8], saved[8:]
        if torch.is_grad_enabled():
            return *_differentiable(ctx, tensors, slopes), None, None, None
        x, w_ih, b_ih, w_hh, b_hh, w_hr, _, c = tensors
        dtype, needs = saved[0].dtype, ctx.needs_input_grad
        by_outputs, by_h, by_c = slopes
        if by_outputs is None:
            by_outputs = saved[0].new_zeros(()).expand_as(saved[0][:, 1:])
        by_h = torch.zeros_like(saved[0][:, 0]) if by_h is None else by_h
        by_c = torch.zeros_like(c, dtype=dtype) if by_c is None and c is not None else by_c
        inner = [None if w is None else w.to(dtype) for w in (w_hh, w_hr)]
        found = CELLS[ctx.kind].errors(saved, *inner, by_outputs, by_h, by_c)
        nodes = iter([node for node, _ in ctx.next_functions])
        nodes = [next(nodes) if present else None for present in ctx.present]
        gradients: list[Tensor | None] = [None] * 8
        calls = [(1, x.to(dtype), w_ih, b_ih, found.inputs), (3, saved[0][:, :-1], w_hh, b_hh, found.hidden)]
        if w_hr is not None:
            _, gates, _, squashed = saved
            calls.append((5, gates.chunk(4, -1)[3] * squashed, w_hr, None, found.outputs))
        for handle, call_id, (place, inputs, weight, bias, errors) in zip(ctx.handles, ctx.call_ids, calls):
            needed = needs[place], bias is not None and needs[place + 1]
            own = nodes[place : place + 1 + (bias is not None)]
            volatile = place == 1 and x.is_leaf and x.dtype == dtype
            ids = ctx.forward_id, call_id
            pair = _gradients(handle, errors, inputs, weight.to(dtype), needed, ids, volatile, own)
            for i, gradient in enumerate(pair):
                if gradient is not None:
                    gradients[place + i] = gradient.to(weight.dtype)
        if needs[0]:
            gradients[0] = (found.inputs @ w_ih.to(dtype)).to(x.dtype)
        for place, gradient in ((6, found.h), (7, found.c)):
            gradients[place] = gradient.to(tensors[place].dtype) if gradient is not None and needs[place] else None
        return *gradients, None, None, None


def _gradients(
    handle: int,
    errors: Tensor,
    inputs: Tensor,
    weight: Tensor,
    needs: tuple[bool, bool],
    ids: tuple[int, int],
    volatile: bool,
    nodes: Sequence[Any],
) -> Pair:
    site = SITES.get(handle)
    if site is None or not any(needs):
        return parameter_gradients((LINEAR,), errors, inputs, weight, needs)
    forward_id, call_id = ids
    return site.gradients(
        (LINEAR,), errors, inputs, weight, needs, forward_id, volatile, site.own_nodes(nodes), call_id
    )


def _differentiable(ctx: Any, tensors: Sequence[Any], slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients with a graph, for second derivatives, by torch's implementation. Nothing is recorded."""
    pairs = [(output, slope) for output, slope in zip(_fused(ctx.kind, *tensors), slopes) if slope is not None]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:8]) if needed]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        [tensors[i] for i in wanted],
        [slope for _, slope in pairs],
        create_graph=True,
        allow_unused=True,
    )
    gradients: list[Tensor | None] = [None] * 8
    for i, gradient in zip(wanted, found):
        gradients[i] = gradient
    return gradients


def _fused(name: str, x: Tensor, w_ih: Tensor, b_ih: Any, w_hh: Tensor, b_hh: Any, w_hr: Any, h: Tensor, c: Any) -> Any:
    """As `RecordedRecurrence`, by torch's implementation."""
    weights = [t for t in (w_ih, w_hh, b_ih, b_hh, w_hr) if t is not None]
    first = h[None] if c is None else (h[None], c[None])
    outputs, *states = CELLS[name].fused(x, first, weights, b_ih is not None, 1, 0.0, True, False, True)
    return outputs, *(state[0] for state in states)


def recur(
    module: nn.RNNBase, parts: Mapping[str, Part], input: Tensor | PackedSequence, hx: Any = None
) -> tuple[Tensor, Any] | None:
    """Outputs and final state as the module returns them; None for a PackedSequence."""
    if isinstance(input, PackedSequence) or input.dim() not in (2, 3) or not input.numel():
        return None
    batched = input.dim() == 3
    x = input[None] if not batched else input if module.batch_first else input.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    layers, width = module.num_layers * directions, module.proj_size or module.hidden_size
    if hx is None:
        hx = tuple(x.new_zeros(layers, len(x), size) for size in (width, module.hidden_size))
        hx = hx if module.mode == "LSTM" else hx[0]
    elif not batched:
        hx = tuple(state[:, None] for state in hx) if module.mode == "LSTM" else hx[:, None]
    module.check_forward_args(x if module.batch_first else x.transpose(0, 1), hx, None)  # pyright: ignore
    h, c = hx if module.mode == "LSTM" else (hx, [None] * layers)
    name = f"RNN_{module.nonlinearity.upper()}" if isinstance(module, nn.RNN) else module.mode
    final = []
    for layer in range(module.num_layers):
        found = []
        for d, end in enumerate(("", "_reverse")[:directions]):
            ih, hh, hr = (parts.get(f"{side}_l{layer}{end}") for side in ("ih", "hh", "hr"))
            assert ih is not None
            assert hh is not None
            k = layer * directions + d
            outputs, *state = _recurrence(name, x.flip(1) if d else x, ih, hh, hr, h[k], c[k])
            found.append(outputs.flip(1) if d else outputs)
            final.append(state)
        x = torch.cat(found, -1) if directions > 1 else found[0]
        if module.dropout and module.training and layer < module.num_layers - 1:
            # With time first, as torch draws it.
            x = F.dropout(x.transpose(0, 1).contiguous(), module.dropout).transpose(0, 1)
    states = [torch.stack([state[i] for state in final]) for i in range(2 if module.mode == "LSTM" else 1)]
    states = states if batched else [state[:, 0] for state in states]
    # Contiguous as torch's, because models may call view().
    outputs = x[0] if not batched else x if module.batch_first else x.transpose(0, 1).contiguous()
    return outputs, tuple(states) if module.mode == "LSTM" else states[0]


recur._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]  # torch.compile does not trace RNNs


def _recurrence(
    name: str, x: Tensor, ih: Part, hh: Part, hr: Part | None, h: Tensor, c: Tensor | None
) -> tuple[Tensor, ...]:
    given = [part for part in (ih, hh, hr) if part is not None]
    sites = [part.module.__dict__[SITE] if is_recorded(part.module, part.weight, part.bias) else None for part in given]
    tensors = x, ih.weight, ih.bias, hh.weight, hh.bias, hr and hr.weight, h, c
    alive = [site for site in sites if site is not None]
    if not alive:
        return _fused(name, *tensors)
    handles = tuple(-1 if site is None else site.handle for site in sites)
    forward_id, *_ = [site.begin_call() for site in alive]
    return RecordedRecurrence.apply(*tensors, name, forward_id, handles)  # pyright: ignore[reportReturnType]
