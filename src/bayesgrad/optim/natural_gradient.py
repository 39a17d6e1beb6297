"""NaturalGradient: exact natural gradients for the Fisher matrix of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods
from bayesgrad.block import Directions, gradient_of
from bayesgrad.layers.fisher import check_batch_mixing, check_outputs, gather_gradients
from bayesgrad.layers.per_example import PerExampleGradients, concatenated, restored
from bayesgrad.layers.probe import common_factor
from bayesgrad.layers.squares import Examples
from bayesgrad.optimizer.base import settings
from bayesgrad.optimizer.constraints import POSITIVE, one_of
from bayesgrad.optimizer.factored import MERGED, MERGES
from bayesgrad.optimizer.layerwise import LayerwiseOptimizer
from bayesgrad.precision.linalg import cholesky

ADAPT_EVERY = 5  # steps between changes of the damping, as in Martens and Grosse, 2015, section 6.5
ADAPT_FACTOR = (19 / 20) ** ADAPT_EVERY


class NaturalGradient(LayerwiseOptimizer):
    r"""The exact damped natural gradient for the Fisher matrix of a batch, by the Woodbury identity.

    .. math::
        W \leftarrow (1 - \eta\lambda_w)\, W - \eta\, (F + \lambda I)^{-1} \nabla, \quad
        F = \frac1N \sum_j g_j g_j^T = G G^T, \quad
        (F + \lambda I)^{-1} \nabla = \frac1\lambda \left(\nabla - G (\lambda I + G^T G)^{-1} G^T \nabla\right)

    with g_j the gradient of example j's loss for a label sampled from the model, eta = `lr`, lambda = `damping` and
    lambda_w = `weight_decay`. G is never formed: the state has the inputs and errors of each layer, which
    `observe(outputs)` replaces. Call it before `loss.backward()`. The outputs of an independent batch make the step
    less biased; those of the same batch save a forward pass. With the same batch and its own labels,
    `observe(outputs, labels)`, the gradient is in the span of G, and the step is G (λI + G'G)^-1 c, which is free of
    cancellation.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda, positive, in units of the Fisher matrix.
        likelihood: "categorical", "bernoulli" or "gaussian", from which labels are sampled.
        blocks: "full" for the Fisher matrix of the whole network, "layer" for its diagonal blocks, one for each module.
        ema: decay of the average of squared gradients, for parameters outside of known layers.
        update_every: steps between updates of the Fisher matrix; observe() does nothing in between.
        losses_per_example: the number of losses per example in the mean loss: 1, or the number of tokens per sequence
            if the loss is a mean over tokens.
        momentum: as in torch.optim.SGD, of the preconditioned gradient.
        weight_decay: decoupled.
        step_size: "lr", or "quadratic": scale the natural gradient (and the momentum) to the minimum of the damped
            quadratic model of the loss, and multiply the result by lr. Described by Martens and Grosse, 2015, sections
            6.4 and 7; tried by Benzing 2021, footnote 2, without notable gains. Checked by
            tests/equations/test_natural_gradient.py, test_the_quadratic_model_chooses_step_and_momentum.
        adapt_damping: Levenberg-Marquardt: every five steps, compare the change of the loss with the change that the
            quadratic model predicts, and adapt damping. Needs `step(closure)`. Described by Martens and Grosse, 2015,
            section 6.5; tried by Benzing 2021, footnote 2. Checked by tests/equations/test_natural_gradient.py,
            test_damping_adapts_to_how_well_the_model_predicts.
        seed: seed of the sampled labels.
        nonfinite, fused: as in `AdaBayes`.

    Parameters outside of known layers (attention, LSTM, raw parameters) use a diagonal,
    w <- w - lr g/(<g^2> + damping).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = NaturalGradient(model, lr=0.1)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen on scikit-learn's digits and MNIST with small MLPs.

    Reference: Benzing 2021, Eq. 17-21, appendix E.5 and footnote 2.
    Differs from the paper: Eq. 19-21 lack factors of the batch size.
    Checked by: tests/equations/test_natural_gradient.py.
    """

    by_layer = False
    recorded = (layers.is_matrix, layers.is_norm)
    records_backward = False
    observes = True
    accepts = {
        **LayerwiseOptimizer.accepts,
        "damping": POSITIVE,
        "blocks": one_of("full", "layer"),
        "step_size": one_of("lr", "quadratic"),
        "adapt_damping": one_of(True, False),
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        params: Any = None,
        damping: float = 0.1,
        likelihood: str = "categorical",
        blocks: str = "full",
        ema: float = 0.95,
        update_every: int = 1,
        losses_per_example: int = 1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        step_size: str = "lr",
        adapt_damping: bool = False,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, params, settings(locals()))

    # --- observations ---

    def _check_model(self) -> None:
        check_batch_mixing(self.model)

    def _bind(self) -> None:
        super()._bind()
        self._checked_shapes: set[Any] = set()  # input shapes for which gradients were found to be per example
        self._unexplained: set[int] = set()

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Computes the Fisher matrix of this batch for the following steps, if an update is due.

        Args:
            outputs: outputs of the model with their graph; neither the graph nor `.grad` is changed.
            labels: replace the sampled labels (the empirical Fisher matrix).
        """
        check_batch_mixing(self.model)
        check_outputs(outputs)
        group = self.param_groups[0]
        clock = self._clock()
        if clock is not None and self._steps_taken() + 1 - int(clock[MERGED]) < group["update_every"]:
            return
        trace = self.recorder.trace(outputs)
        given = labels is not None
        labels = labels if labels is not None else self.draw(outputs)
        residual = likelihoods.named(group["likelihood"]).residual(outputs, labels)
        shapes = tuple((call.name, call.input.shape) for call in trace.pending if call.input is not None)
        columns, left = gather_gradients(trace, [residual], check=shapes not in self._checked_shapes)
        if shapes not in self._checked_shapes and len(outputs) > 1:
            self._unexplained |= left
            self._checked_shapes.add(shapes)
        self._observed.append(({key: c for key, c in columns.items() if key not in self._unexplained}, given))
        self._marked = self._mark()

    def _owner(self) -> Tensor:
        """The parameter whose state has the tensors of the whole network."""
        return self._in_model_order()[0]

    def _clock(self) -> Tensor | None:
        return self.state.get(self._owner(), {}).get("clock")

    def _check_loaded(self, saved: Mapping[str, Any]) -> None:
        super()._check_loaded(saved)
        named = {n: p for group in self.param_groups for n, p in zip(group["param_names"], group["params"])}
        for group in saved["param_groups"]:
            for name, key in zip(group["param_names"], group["params"]):
                columns = restored(saved["state"].get(key, {}), named[name].shape)
                if columns is not None and not columns.fits():
                    raise ValueError(
                        f"the per-example gradients of {name} in the saved state must fit its shape "
                        f"{tuple(named[name].shape)}, but do not: load the state into the model it came from."
                    )

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`; with `adapt_damping`, calls the closure once more every five steps."""
        adapts = any(group["adapt_damping"] for group in self.param_groups)
        if adapts and closure is None:
            raise ValueError("adapt_damping=True compares losses before and after a step: use step(closure).")
        self._model_change: float | None = None
        loss = super().step(closure)
        if adapts and closure is not None and self._model_change is not None and self._steps_taken() % ADAPT_EVERY == 0:
            self._adapt(closure, float(loss.detach() if isinstance(loss, Tensor) else loss))
        return loss

    def directions(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        fresh = self._merge()
        columns = {
            p: c
            for p in self._in_model_order()
            if p in owners and (c := restored(self.state.get(p, {}), p.shape)) is not None
        }
        recorded = {p for module in self.recorder.layers.values() for p in module.parameters(recurse=False)}
        seen = self._clock() is not None and self._unexplained
        if not columns and not seen and any(bool(gradient_of(p).any()) for p in owners if p in recorded):
            raise self.missing_observation(
                "observe() was never called", "call observe(outputs), before loss.backward(), on outputs"
            )
        self._warn_fallback({p for p in owners if p in recorded and p not in columns and bool(gradient_of(p).any())})
        if groups[0]["blocks"] == "full" and len({float(owners[p]["damping"]) for p in columns}) > 1:
            raise ValueError("blocks='full' needs the same damping in all groups: set it, or use blocks='layer'.")
        found: dict[Tensor, Tensor] = {}
        for block in self._blocks_of(columns, groups[0]):
            own = {p: columns[p] for p in block}
            found |= self._solved(own, owners[block[0]], fresh)
        if found and groups[0]["step_size"] == "quadratic":
            self._scale_by_model(found, columns, groups[0])
        if groups[0]["adapt_damping"]:
            self._predict(found, columns, owners)
        return found

    def _merge(self) -> bool:
        """Replaces the Fisher matrix by the observed one; True if labels were given, perhaps those of this batch."""
        if not self._observed:
            return False
        observed, self._observed = self._observed, []
        named = {id(p): p for group in self.param_groups for p in group["params"]}
        keys = [key for key in observed[0][0] if key in named and all(key in columns for columns, _ in observed)]
        merged = {named[key]: concatenated([columns[key] for columns, _ in observed]) for key in keys}
        for p in named.values():
            entry = self.state[p]
            old = [key for key in entry if key.startswith(("outer_", "lookup_", "rows_")) or key in ("gram", "dual")]
            for key in old:
                del entry[key]
        for p, columns in merged.items():
            self.state[p].update({name: value.detach() for name, value in columns.tensors().items()})
        clock = self.state[self._owner()].setdefault("clock", torch.zeros(3, dtype=torch.int64))
        clock[MERGES] += 1
        clock[MERGED] = self._steps_taken() + 1
        return all(given for _, given in observed)

    def _blocks_of(self, columns: Mapping[Tensor, PerExampleGradients], group: Mapping[str, Any]) -> list[list[Tensor]]:
        if not columns:
            return []
        if group["blocks"] == "full":
            return [list(columns)]
        blocks, seen = [], set()
        for module in self.recorder.layers.values():
            own = [p for p in module.parameters(recurse=False) if p in columns and p not in seen]
            seen.update(own)
            blocks += [own] if own else []
        return blocks

    def _solved(
        self, columns: Mapping[Tensor, PerExampleGradients], group: Mapping[str, Any], fresh: bool
    ) -> dict[Tensor, Tensor]:
        """The preconditioned gradient of one block."""
        params = list(columns)
        count, damping = columns[params[0]].count, float(group["damping"])
        scale = 1 / math.sqrt(count * group["losses_per_example"])
        factor = self._dual(columns, damping, scale**2)
        if fresh and (c := _common_factor(columns)) is not None:
            rest = torch.full((count, 1), c / scale, dtype=factor.dtype, device=factor.device)
            weights = scale * torch.cholesky_solve(rest, factor)[:, 0]
            return {p: own.combine(weights.to(_kind(own))) for p, own in columns.items()}
        projection = torch.stack(
            [own.project(gradient_of(p).to(_kind(own))).to(factor) for p, own in columns.items()]
        ).sum(0)
        weights = torch.cholesky_solve(scale * projection[:, None], factor)[:, 0] * (-scale / damping)
        return {
            p: own.combine_onto(gradient_of(p).to(_kind(own)), weights.to(_kind(own)), 1 / damping)
            for p, own in columns.items()
        }

    def _dual(self, columns: Mapping[Tensor, PerExampleGradients], damping: float, weight: float) -> Tensor:
        """The Cholesky factor of λI + G'G, cached in the state of the block's first parameter."""
        owner = next(iter(columns))
        entry, device = self.state[owner], owner.device
        order = self._in_model_order()
        members = torch.tensor([i for i, p in enumerate(order) if p in columns])
        if "gram" not in entry or not torch.equal(entry["gram_of"], members):
            grams = [own.gram() for own in columns.values()]
            dtype = torch.float64 if any(g.dtype == torch.float64 for g in grams) else grams[0].dtype
            entry["gram"] = torch.stack([g.to(device, dtype) for g in grams]).sum(0) * weight
            entry["gram_of"] = members
            entry.pop("dual", None)
        if "dual" not in entry or entry["dual_damping"] != damping:
            entry["dual"] = cholesky(entry["gram"], damping, "the Gram matrix of the gradients")
            entry["dual_damping"] = torch.tensor(damping, dtype=torch.float64)
        return entry["dual"]

    # --- the quadratic model ---

    def _fisher_products(
        self, vectors: list[dict[Tensor, Tensor]], columns: Mapping[Tensor, PerExampleGradients]
    ) -> Tensor:
        """v'F u for all pairs of vectors, in float64."""
        count = next(iter(columns.values())).count
        blocks = self._blocks_of(columns, self.param_groups[0])
        total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
        for block in blocks:
            rows = torch.stack(
                [sum(columns[p].project(v[p].to(_kind(columns[p]))).double() for p in block) for v in vectors]  # pyright: ignore
            )
            total += (rows @ rows.T / (count * self.param_groups[0]["losses_per_example"])).cpu()
        return total

    def _scale_by_model(
        self, found: dict[Tensor, Tensor], columns: Mapping[Tensor, PerExampleGradients], group: Mapping[str, Any]
    ) -> None:
        """Scales direction and momentum buffer to the minimum of g'δ + δ'(F + λI)δ/2 over δ = -(a d + m b)."""
        buffers = {p: self.state[p]["momentum"] for p in found if "momentum" in self.state.get(p, {})}
        vectors = (
            [found, buffers] if len(buffers) == len(found) and any(bool(b.any()) for b in buffers.values()) else [found]
        )
        inner = torch.stack([_dot({p: gradient_of(p) for p in found}, v) for v in vectors])
        norms = torch.stack([torch.stack([_dot(a, b) for a in vectors]) for b in vectors])
        matrix = self._fisher_products(vectors, columns) + float(group["damping"]) * norms
        best = torch.linalg.lstsq(matrix, inner[:, None]).solution[:, 0].tolist()
        for p in found:
            found[p] = best[0] * found[p]
        self._momentum_now = best[1] if len(best) > 1 else 0.0

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        n = super().scalars(group, step)
        if group.get("preconditioned") and group["step_size"] == "quadratic" and "momentum" in n:
            n["momentum"] = self._momentum_now
        return n

    def _predict(
        self, found: Mapping[Tensor, Tensor], columns: Mapping[Tensor, PerExampleGradients], owners: Mapping
    ) -> None:
        """Stores the change of the loss that the undamped quadratic model predicts for this step."""
        steps = {}
        for p, d in found.items():
            group = owners[p]
            buffer = self.state.get(p, {}).get("momentum")
            momentum = self._momentum_now if group["step_size"] == "quadratic" else group["momentum"]
            moved = d if buffer is None or not group["momentum"] else d + momentum * buffer
            steps[p] = -float(group["lr"]) * moved
        if steps:
            linear = _dot({p: gradient_of(p) for p in steps}, steps)
            self._model_change = (linear + self._fisher_products([steps], columns)[0, 0] / 2).item()

    def _adapt(self, closure: Callable[[], Any], before: float) -> None:
        """Levenberg-Marquardt: decreases damping if the quadratic model predicted the loss well, else increases it."""
        params = [p for group in self.param_groups for p in group["params"]]
        gradients = [None if p.grad is None else p.grad.clone() for p in params]
        draws = self.param_groups[0]["draws"]
        with torch.enable_grad():
            loss = closure()
        after = float(loss.detach() if isinstance(loss, Tensor) else loss)
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        self._observed = []  # discard what this evaluation observed
        self.param_groups[0]["draws"] = draws
        ratio = (after - before) / self._model_change if self._model_change else 0.0
        change = ADAPT_FACTOR if ratio > 0.75 else 1 / ADAPT_FACTOR if ratio < 0.25 else 1.0
        for group in self.param_groups:
            group["damping"] = float(group["damping"]) * change


def _kind(columns: PerExampleGradients) -> torch.dtype:
    return next(t.dtype for t in columns.tensors().values() if t.is_floating_point())


def _dot(a: Mapping[Tensor, Tensor], b: Mapping[Tensor, Tensor]) -> Tensor:
    return torch.stack([torch.dot(a[p].flatten().double(), b[p].flatten().double()).cpu() for p in b]).sum()


def _common_factor(columns: Mapping[Tensor, PerExampleGradients]) -> float | None:
    """c, if every gradient is c times the sum of the per-example gradients up to rounding; else None."""
    if any(gradient_of(p).dtype != _kind(own) for p, own in columns.items()):
        return None
    return common_factor([Examples([own]).projection(gradient_of(p)) for p, own in columns.items()])
