"""The forward pass of nn.LSTM, nn.GRU and nn.RNN, with their projections as recorded layers.

One layer in one direction is one autograd function. Its forward loops over time, and its backward collects the errors
of all time steps, so that each projection is one call with a row for each example and time step. Only what depends on
the previous step is computed in the loops. Sequences are (time, examples, features), and rows, which recorders receive,
are (examples, time, features).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from bayesgrad.layers.call import SITE, SITES, Pair, Part, Site, is_recorded
from bayesgrad.layers.hooks import not_alone
from bayesgrad.layers.operations import RECURRENT, parameter_gradients
from bayesgrad.products import mm


class Errors(NamedTuple):
    """Derivatives of the loss by the outputs of projections and by the initial state.

    Args:
        inputs: by those of the input projection, W_ih x + b_ih, as (examples, time, size), as all three.
        hidden: by those of the recurrent projection, W_hh h + b_hh.
        outputs: by those of W_hr, None without one.
        h, c: by the initial state.
    """

    inputs: Tensor
    hidden: Tensor
    outputs: Tensor | None
    h: Tensor
    c: Tensor | None = None


class Cell(NamedTuple):
    """A kind of recurrent layer.

    Args:
        gates: the number of matrices in its weight.
        run: (projected inputs, bias of the recurrent projection, its weight, W_hr, h, c) -> (saved tensors, final c);
            the first saved tensor has the hidden states (time, examples, size). Projected inputs are (gates, time,
            examples, size) and may be overwritten. Its bias is added to them if `folds`.
        errors: (saved tensors, its weight, W_hr, initial h, derivatives by all hidden states, by the final h and c) ->
            Errors.
        fused: torch's implementation.
        folds: whether both projections are only used as their sum.
    """

    gates: int
    run: Callable[..., tuple[list[Tensor], Tensor | None]]
    errors: Callable[..., Errors]
    fused: Callable[..., Any]
    folds: bool = True


# Derivatives through y = sigmoid(x) and y = tanh(x): (derivative by y, y, grad_input=derivative by x)
through_sigmoid = torch.ops.aten.sigmoid_backward.grad_input
through_tanh = torch.ops.aten.tanh_backward.grad_input


# --- LSTM ---


def _run_lstm(
    gates: Tensor, bias: None, weight: Tensor, project: Tensor | None, h: Tensor, c: Tensor
) -> tuple[list[Tensor], Tensor]:
    """i, f, o = sigmoid(gates), g = tanh(gates); c_t = f c_{t-1} + i g; h_t = o tanh(c_t), times W_hr' if given."""
    weights = _by_gate(weight, 4)
    hidden = gates.new_empty(*gates.shape[1:3], h.shape[-1])
    squashed = torch.empty_like(gates[0])  # tanh(c_t)
    cells = gates.new_empty(1 + len(hidden), *c.shape)
    cells[0] = c
    steps = zip(gates.unbind(1), gates[:2].unbind(1), *gates, cells[:-1], cells[1:], squashed, hidden)
    for now, now_if, i, f, g, o, before, c, squash, after in steps:
        now.baddbmm_(h.expand(4, -1, -1), weights)
        now_if.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, before, out=c).addcmul_(i, g)
        torch.tanh(c, out=squash)
        h = torch.mul(o, squash, out=after) if project is None else torch.mm(o * squash, project.T, out=after)
    return [hidden, gates, cells, squashed], cells[-1].clone()


def _lstm_errors(
    saved: Sequence[Tensor], weight: Tensor, project: Tensor | None, first: Tensor, slopes: Tensor, h: Tensor, c: Tensor
) -> Errors:
    _, gates, cells, squashed = saved
    errors = _rows(squashed, len(weight))
    outputs = None if project is None else _rows(squashed, len(project))
    product = torch.empty_like(c)
    steps = zip(*gates, cells[:-1], squashed, slopes, errors.unbind(1), *_gates_of(errors, 4))
    for t, (i, f, g, o, before, squash, slope, error, by_i, by_f, by_g, by_o) in reversed(list(enumerate(steps))):
        h = slope + h
        if project is not None and outputs is not None:
            outputs[:, t] = h
            h = h @ project
        through_sigmoid(torch.mul(h, squash, out=product), o, grad_input=by_o)
        c = c + through_tanh(h.mul_(o), squash, grad_input=product)
        through_sigmoid(torch.mul(c, g, out=product), i, grad_input=by_i)
        through_sigmoid(torch.mul(c, before, out=product), f, grad_input=by_f)
        through_tanh(torch.mul(c, i, out=product), g, grad_input=by_g)
        c *= f
        h = error @ weight
    return Errors(errors, errors, outputs, h, c)


# --- GRU ---


def _run_gru(
    gates: Tensor, bias: Tensor | None, weight: Tensor, project: None, h: Tensor, c: None
) -> tuple[list[Tensor], None]:
    """r, z = sigmoid(gates + W h + b); n = tanh(gates_n + r (W h + b)_n); h_t = (1 - z) n + z h_{t-1}."""
    weights, biases = _by_gate(weight, 3), weight.new_zeros(()) if bias is None else bias.view(3, 1, -1)
    hidden, news = torch.empty_like(gates[0]), torch.empty_like(gates[0])
    for now_rz, r, z, n, new, after in zip(gates[:2].unbind(1), *gates, news, hidden):
        by_hidden = torch.baddbmm(biases, h.expand(3, -1, -1), weights)
        now_rz.add_(by_hidden[:2]).sigmoid_()
        new.copy_(by_hidden[2])
        n.addcmul_(r, new).tanh_()
        h = torch.lerp(n, h, z, out=after)
    return [hidden, gates, news], None


def _gru_errors(
    saved: Sequence[Tensor], weight: Tensor, project: None, first: Tensor, slopes: Tensor, h: Tensor, c: None
) -> Errors:
    hidden, gates, news = saved
    inputs, errors = _rows(hidden, len(weight)), _rows(hidden, len(weight))
    befores = [first, *hidden[:-1]]
    each = inputs.unbind(1), *_gates_of(inputs, 3), errors.unbind(1), _gates_of(errors, 3)[2]
    for r, z, n, before, new, slope, by_input, by_r, by_z, by_n, error, by_new in reversed(
        list(zip(*gates, befores, news, slopes, *each))
    ):
        h = slope + h
        through_sigmoid((before - n).mul_(h), z, grad_input=by_z)
        by_old = h * z
        through_tanh(h.sub_(by_old), n, grad_input=by_n)
        through_sigmoid(by_n * new, r, grad_input=by_r)
        error.copy_(by_input)
        by_new.mul_(r)
        h = torch.addmm(by_old, error, weight)
    return Errors(inputs, errors, None, h)


# --- RNN ---


def _run_rnn(squash: Callable[..., Tensor]) -> Callable[..., tuple[list[Tensor], None]]:
    def run(sums: Tensor, bias: None, weight: Tensor, project: None, h: Tensor, c: None) -> tuple[list[Tensor], None]:
        for now in sums[0]:
            h = squash(now.addmm_(h, weight.T))
        return [sums[0]], None

    return run


def _rnn_errors(through: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Errors]:
    def errors(
        saved: Sequence[Tensor], weight: Tensor, project: None, first: Tensor, slopes: Tensor, h: Tensor, c: None
    ) -> Errors:
        found = _rows(saved[0], len(weight))
        for after, slope, error in reversed(list(zip(saved[0], slopes, found.unbind(1)))):
            error.copy_(through(h.add(slope), after))
            h = error @ weight
        return Errors(found, found, None, h)

    return errors


CELLS = {
    "LSTM": Cell(4, _run_lstm, _lstm_errors, _VF.lstm),
    "GRU": Cell(3, _run_gru, _gru_errors, _VF.gru, folds=False),
    "RNN_TANH": Cell(1, _run_rnn(torch.tanh_), _rnn_errors(torch.ops.aten.tanh_backward), _VF.rnn_tanh),
    "RNN_RELU": Cell(1, _run_rnn(torch.relu_), _rnn_errors(lambda by_h, h: by_h * (h > 0)), _VF.rnn_relu),
}


def _by_gate(weight: Tensor, gates: int) -> Tensor:
    """The transposed matrix of each gate."""
    return weight.unflatten(0, (gates, -1)).mT


def _gates_of(rows: Tensor, gates: int) -> Tensor:
    """Rows (examples, time, gates size) as (gates, time, examples, size)."""
    return rows.unflatten(-1, (gates, -1)).permute(2, 1, 0, 3)


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None, gates: int) -> Tensor:
    """W x + b, as (gates, time, examples, size)."""
    rows, weights = x.reshape(1, -1, x.shape[-1]).expand(gates, -1, -1), _by_gate(weight, gates)
    found = torch.bmm(rows, weights) if bias is None else torch.baddbmm(bias.view(gates, 1, -1), rows, weights)
    return found.unflatten(1, x.shape[:2])


def _rows(like: Tensor, size: int) -> Tensor:
    """A tensor for rows of (time, examples, ...), as (examples, time, size)."""
    return like.new_empty(like.shape[1], like.shape[0], size)


class RecordedRecurrence(torch.autograd.Function):
    """One layer of a recurrent module in one direction, whose backward passes on what its projections received.

    Input and output are (time, examples, features), so that a time step is one piece of memory.

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
        gates = _projected(x, w_ih, b_ih + b_hh if cell.folds and b_ih is not None else b_ih, cell.gates)
        cast = [None if t is None else t.to(gates.dtype) for t in (b_hh, w_hh, w_hr, h, c)]  # for autocast
        with torch.autocast(gates.device.type, enabled=False):
            saved, c_last = cell.run(gates, *cast)
        ctx.volatile = (x if x._base is None else x._base).is_leaf  # a tensor of the caller, or a view of one
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        return saved[0], saved[0][-1].clone(), c_last

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple:
        saved = ctx.saved_tensors  # read once, as checkpointing requires
        tensors, saved = saved[:8], saved[8:]
        if torch.is_grad_enabled():
            return *_differentiable(ctx, tensors, slopes), None, None, None
        x, w_ih, b_ih, w_hh, b_hh, w_hr, h, c = tensors
        hidden = saved[0]
        dtype, needs = hidden.dtype, ctx.needs_input_grad
        by_outputs, by_h, by_c = slopes
        by_outputs = hidden.new_zeros(()).expand_as(hidden) if by_outputs is None else by_outputs
        by_h = torch.zeros_like(hidden[0]) if by_h is None else by_h
        by_c = torch.zeros_like(c, dtype=dtype) if by_c is None and c is not None else by_c
        inner = [None if w is None else w.to(dtype) for w in (w_hh, w_hr)]
        h = h.to(dtype)
        found = CELLS[ctx.kind].errors(saved, *inner, h, by_outputs, by_h, by_c)
        nodes = iter([node for node, _ in ctx.next_functions])
        nodes = [next(nodes) if present else None for present in ctx.present]
        gradients: list[Tensor | None] = [None] * 8
        rows, before = x.to(dtype).transpose(0, 1).contiguous(), _rows(hidden, hidden.shape[-1])
        before[:, 0], before[:, 1:] = h, hidden[:-1].transpose(0, 1)
        calls = [(1, rows, w_ih, b_ih, found.inputs), (3, before, w_hh, b_hh, found.hidden)]
        if w_hr is not None:
            _, gates, _, squashed = saved
            calls.append((5, (gates[3] * squashed).transpose(0, 1).contiguous(), w_hr, None, found.outputs))
        for handle, call_id, (place, inputs, weight, bias, errors) in zip(ctx.handles, ctx.call_ids, calls):
            needed = needs[place], bias is not None and needs[place + 1]
            own = nodes[place : place + 1 + (bias is not None)]
            volatile = place == 1 and ctx.volatile and x.dtype == dtype
            ids = ctx.forward_id, call_id
            pair = _gradients(handle, errors, inputs, weight.to(dtype), needed, ids, volatile, own)
            for i, gradient in enumerate(pair):
                if gradient is not None:
                    gradients[place + i] = gradient.to(weight.dtype)
        if needs[0]:
            by_rows = mm(found.inputs.flatten(0, 1), w_ih.to(dtype)).to(x.dtype)
            gradients[0] = by_rows.unflatten(0, rows.shape[:2]).transpose(0, 1)
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
        return parameter_gradients((RECURRENT,), errors, inputs, weight, needs)
    forward_id, call_id = ids
    return site.gradients(
        (RECURRENT,), errors, inputs, weight, needs, forward_id, volatile, site.own_nodes(nodes), call_id
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
    outputs, *states = CELLS[name].fused(x, first, weights, b_ih is not None, 1, 0.0, True, False, False)
    return outputs, *(state[0] for state in states)


def recur(
    module: nn.RNNBase, parts: Mapping[str, Part], input: Tensor | PackedSequence, hx: Any = None
) -> tuple[Tensor, Any] | None:
    """Outputs and final state as the module returns them; None for a PackedSequence."""
    if isinstance(input, PackedSequence) or input.dim() not in (2, 3) or not input.numel():
        return None
    batched = input.dim() == 3
    x = input[:, None] if not batched else input.transpose(0, 1) if module.batch_first else input
    directions = 2 if module.bidirectional else 1
    layers, width = module.num_layers * directions, module.proj_size or module.hidden_size
    if hx is None:
        hx = tuple(x.new_zeros(layers, x.shape[1], size) for size in (width, module.hidden_size))
        hx = hx if module.mode == "LSTM" else hx[0]
    elif not batched:
        hx = tuple(state[:, None] for state in hx) if module.mode == "LSTM" else hx[:, None]
    module.check_forward_args(x.transpose(0, 1) if module.batch_first else x, hx, None)  # pyright: ignore
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
            outputs, *state = _recurrence(name, x.flip(0) if d else x, ih, hh, hr, h[k], c[k])
            found.append(outputs.flip(0) if d else outputs)
            final.append(state)
        x = torch.cat(found, -1) if directions > 1 else found[0]
        if module.dropout and module.training and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout)
    states = [torch.stack([state[i] for state in final]) for i in range(2 if module.mode == "LSTM" else 1)]
    states = states if batched else [state[:, 0] for state in states]
    # A copy, because the backward pass needs what it is of; contiguous as torch's, because models may call view().
    x = x[:, 0] if not batched else x.transpose(0, 1) if module.batch_first else x
    outputs = x.clone(memory_format=torch.contiguous_format)
    return outputs, tuple(states) if module.mode == "LSTM" else states[0]


recur._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]  # torch.compile does not trace RNNs
not_alone(recur)  # nor what it calls


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
