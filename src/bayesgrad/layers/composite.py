"""Modules that consist of linear layers which they do not call: recurrent layers, attention, Bilinear, EmbeddingBag.

A module of this kind is known by its *parts*: plain Linear or Embedding layers that have its parameters and are not
registered in it. Everything else in this package sees only the parts, under the names that `known_layers` gives them.
If parts are recorded, the forward pass of the module computes the same numbers and passes inputs and errors of its
parts to the recorders, with examples in the first dimension and time steps or tokens in the second.

    >>> [name for name, module in known_layers(nn.Sequential(nn.LSTM(3, 4))) if type(module) is nn.Linear]
    ['0.ih_l0', '0.hh_l0']
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesgrad.layers.attention import attend
from bayesgrad.layers.call import SITE, Part, is_derived, is_recorded
from bayesgrad.layers.recurrent import recur

OWNER, PATHS = "_bayesgrad_owner", "_bayesgrad_paths"  # attributes of a part
Paths = tuple[str, str | None]  # of a part's weight and bias, from the module that has them


def known_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules`, with the parts of each module after it."""
    for name, module in model.named_modules():
        yield name, module
        for key, part in parts_of(module).items():
            yield ".".join(filter(None, (name, key))), part


def parts_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """The parts of a module by their names in it; empty for a module that has none. They are the same in all calls."""
    kind = _kind_of(module)
    paths = {} if kind is None else kind.paths(module)
    if kind is None or not _has_own(module, paths.values()):
        return {}
    if _PARTS.get(module, {}).keys() != paths.keys():
        _PARTS[module] = {key: kind.build(module, _value(module, path)) for key, (path, _) in paths.items()}
    for key, part in _PARTS[module].items():
        part._parameters["weight"], part._parameters["bias"] = (_value(module, path) for path in paths[key])
        part.__dict__.update({OWNER: weakref.ref(module), PATHS: paths[key]})
    return _PARTS[module]


def owners(part: nn.Module) -> list[nn.Module]:
    """The module that has a part; empty for other layers."""
    owner = part.__dict__.get(OWNER)
    return [] if owner is None or owner() is None else [owner()]


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a module with recorded parts. Arguments that are not supported are not recorded."""
    site, kind = self.__dict__[SITE], _kind_of(self)
    parts = {}
    for key, module in site.parts.items():
        parts[key] = Part(module, *(_value(self, path) for path in module.__dict__[PATHS]))
    found = None
    params = [p for part in parts.values() for p in (part.weight, part.bias)]
    own = _has_own(self, [part.module.__dict__[PATHS] for part in parts.values()])  # not if they were pruned later
    if kind is not None and own and is_recorded(self, *params):
        found = kind.run(self, parts, *args, **kwargs)
    return type(self).forward(self, *args, **kwargs) if found is None else found


@dataclass(frozen=True, eq=False)
class Composite:
    """A kind of modules with parts.

    Args:
        paths: module -> the parameters of each part, by its name.
        run: computes the forward pass from the module, its parts and arguments; None if it does not support those.
        supports: whether a module has settings that `run` supports.
        build: makes a part from the module and the part's weight.
    """

    paths: Callable[[Any], dict[str, Paths]]
    run: Callable[..., Any]
    supports: Callable[[Any], bool] = lambda module: True
    build: Callable[[Any, Tensor], nn.Module] = lambda module, weight: nn.Linear(
        weight[0].numel(), len(weight), device="meta", dtype=weight.dtype
    )


def _kind_of(module: nn.Module) -> Composite | None:
    base = next((base for base in type(module).__mro__ if base in KINDS), None)
    if base is None or type(module).forward is not base.forward or "parametrizations" in module._modules:
        return None
    given = getattr(module.__dict__.get("forward"), "__func__", base.forward)
    own = given in (forward, base.forward)
    return KINDS[base] if own and KINDS[base].supports(module) else None


def _value(module: nn.Module, path: str | None) -> Any:
    """The parameter at a path, or the tensor that functional_call has put in its place."""
    if path is None:
        return None
    module, name = _place(module, path)
    return module._parameters.get(name)


def _has_own(module: nn.Module, paths: Iterable[Paths]) -> bool:
    """Whether the weights and biases at these paths are parameters, and not computed from them."""
    for weight, bias in paths:  # no generators: torch.compile traces each in frames of its own
        if _value(module, weight) is None or is_derived(*_place(module, weight)):
            return False
        if bias is not None and is_derived(*_place(module, bias)):
            return False
    return True


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has the parameter at a path, and the name of that."""
    *inner, name = path.split(".")
    for key in inner:
        module = module._modules[key]  # pyright: ignore[reportAssignmentType]
    return module, name


_PARTS: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = weakref.WeakKeyDictionary()


def _recurrent_paths(module: nn.RNNBase) -> dict[str, Paths]:
    found: dict[str, Paths] = {}
    for layer in range(module.num_layers):
        for end in ("", "_reverse") if module.bidirectional else ("",):
            for side in ("ih", "hh"):
                key = f"{side}_l{layer}{end}"
                found[key] = f"weight_{key}", f"bias_{key}" if module.bias else None
            if module.proj_size:
                found[f"hr_l{layer}{end}"] = f"weight_hr_l{layer}{end}", None
    return found


def _attention_paths(module: nn.MultiheadAttention) -> dict[str, Paths]:
    # With keys of another size, the biases of three layers are one parameter, which then belongs to none.
    inside: dict[str, Paths] = {"in_proj": ("in_proj_weight", "in_proj_bias")}
    if module.in_proj_weight is None:
        inside = {f"{side}_proj": (f"{side}_proj_weight", None) for side in "qkv"}
    return {**inside, "out_proj": ("out_proj.weight", "out_proj.bias")}


def _multiply(module: nn.Bilinear, parts: Mapping[str, Part], input1: Tensor, input2: Tensor) -> Tensor:
    return parts[""]((input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2))


def _sum_bags(
    module: nn.EmbeddingBag,
    parts: Mapping[str, Part],
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor | None:
    if input.dim() != 2 or offsets is not None or not input.shape[1]:
        return None
    rows = parts[""](input)  # (bags, length, features)
    counted = None if module.padding_idx is None else (input != module.padding_idx).to(rows.dtype)
    if counted is not None:
        rows = rows * counted[..., None]
    if module.mode == "sum":
        return (rows if per_sample_weights is None else rows * per_sample_weights[..., None]).sum(1)
    if per_sample_weights is not None:
        return None
    return rows.mean(1) if counted is None else rows.sum(1) / counted.sum(1, keepdim=True).clamp(min=1)


KINDS: dict[type[nn.Module], Composite] = {
    **{kind: Composite(_recurrent_paths, recur) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    nn.MultiheadAttention: Composite(
        _attention_paths,
        attend,
        lambda module: (
            type(module.out_proj) is NonDynamicallyQuantizableLinear
            and "parametrizations" not in module.out_proj._modules
            and not is_derived(module, "in_proj_bias")
            and module.bias_k is None
            and not module.add_zero_attn
        ),
    ),
    nn.Bilinear: Composite(lambda module: {"": ("weight", "bias")}, _multiply),
    nn.EmbeddingBag: Composite(
        lambda module: {"": ("weight", None)},
        _sum_bags,
        lambda module: (
            module.mode != "max" and module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
        ),
        lambda module, weight: nn.Embedding(
            *weight.shape, padding_idx=module.padding_idx, device="meta", dtype=weight.dtype
        ),
    ),
}
