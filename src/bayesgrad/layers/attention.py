"""The forward pass of nn.MultiheadAttention, with its projections as recorded layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad.layers.call import Part


def attend(
    module: nn.MultiheadAttention,
    parts: Mapping[str, Part],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Outputs and attention weights as the module returns them; None if it would refuse the arguments."""
    batched = query.dim() == 3
    given = query, key, value
    if query.is_nested or query.dim() not in (2, 3) or {x.dim() for x in given} != {query.dim()}:
        return None
    if not batched:
        query, key, value = (x[None] for x in given)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in given)
    (count, length, size), (_, sources, _), heads = query.shape, key.shape, module.num_heads
    fits = size == module.embed_dim and key.shape[:2] == value.shape[:2] == (count, sources)
    fits = fits and (attn_mask is None or attn_mask.shape in ((length, sources), (count * heads, length, sources)))
    fits = fits and (key_padding_mask is None or key_padding_mask.shape == (count, sources))
    if not fits or (is_causal and attn_mask is None):
        return None
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None
    if attn_mask is not None and not hint:
        mask = _added(attn_mask, query.dtype)
        mask = mask if mask.dim() == 2 else mask.view(count, heads, length, sources)
    if key_padding_mask is not None:
        ignored = _added(key_padding_mask, query.dtype)[:, None, None]
        mask = ignored if mask is None else mask + ignored
    sides = _project(module, parts, (query, key, value), (given[0] is given[1], given[1] is given[2]))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in sides)  # (N, heads, positions, size)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if batched else weights[0]
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=hint)
    outputs = parts["out_proj"](mixed.transpose(1, 2).flatten(2))
    # Contiguous as torch's, because models may call view().
    outputs = outputs[0] if not batched else outputs if module.batch_first else outputs.transpose(0, 1).contiguous()
    return outputs, weights


def _project(
    module: nn.MultiheadAttention, parts: Mapping[str, Part], given: tuple[Tensor, ...], same: tuple[bool, bool]
) -> tuple[Tensor, ...]:
    """Queries, keys and values. The part "in_proj" is one layer with the outputs of all three.

    Args:
        same: whether queries are keys, and whether keys are values.
    """
    query, key, value = given
    if "in_proj" not in parts:
        found = [parts[f"{side}_proj"](x) for side, x in zip("qkv", given)]
        bias = module._parameters["in_proj_bias"]
        return tuple(found if bias is None else (x + b for x, b in zip(found, bias.chunk(3))))
    if all(same):
        return parts["in_proj"](query).chunk(3, -1)
    # A layer with several inputs is called with each of them, and outputs that are not used have no error.
    q, rest = parts["in_proj"](query).chunk(3, -1)[0], parts["in_proj"](key).chunk(3, -1)
    return q, rest[1], rest[2] if same[1] else parts["in_proj"](value).chunk(3, -1)[2]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
