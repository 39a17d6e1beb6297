"""Second moments of a layer's inputs and errors, against sums over examples, positions and directions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.combination import concatenated, summed
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.moments import Moment, symmetric
from bayesgrad.layers.per_example import EmbeddingGradients, OuterProducts
from bayesgrad.layers.statistics import LayerStatistics


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), lambda n: torch.randn(n, 3)),
    "no bias": (lambda: nn.Linear(3, 2, bias=False), lambda n: torch.randn(n, 3)),
    "sequence": (lambda: nn.Linear(3, 2), lambda n: torch.randn(n, 4, 3)),
    "conv": (lambda: nn.Conv2d(2, 4, 3, padding=1), lambda n: torch.randn(n, 2, 4, 5)),
    "groups": (lambda: nn.Conv1d(4, 6, 2, groups=2), lambda n: torch.randn(n, 4, 5)),
    "lookup": (lambda: nn.Embedding(7, 2, padding_idx=1), lambda n: torch.randint(7, (n, 3))),
    "wide": (lambda: nn.Linear(600, 2), lambda n: torch.randn(n, 600)),
}


def layer_of(module: nn.Module) -> Layer:
    own = layers.own_parameters(module)
    return Layer(("layer",), module, own["weight"], own.get("bias"))


def calls(module: nn.Module, x: Tensor, directions: int, forward_id: int = 0) -> list[LayerCall]:
    return [LayerCall(module, x, torch.randn_like(module(x)), 0, forward_id) for _ in range(directions)]


def rows_of(layer: Layer, call: LayerCall) -> tuple[Tensor, Tensor]:
    """Inputs and errors of a call, (groups, rows, size)."""
    if layer.lookup:
        indices, errors = layers.lookups_of(layer.module, call.input, call.error)  # pyright: ignore
        return nn.functional.one_hot(indices, 7).double().flatten(0, 1)[None], errors.flatten(0, 1)[None]
    a = layers.inputs_of(call.module, call.input).flatten(1, 2)
    a = a if layer.bias is None else torch.cat([a, torch.ones_like(a[..., :1])], -1)
    return a, layers.errors_of(call.module, call.error).flatten(1, 2)


def expected(layer: Layer, passes: list[list[LayerCall]], further: list[list[LayerCall]]) -> dict[str, Tensor]:
    """The mean over examples of Σ aa' over positions; the mean over both of Σ ee' over directions."""
    shape = layer.shape[0], layer.sizes["input"], layer.sizes["error"]
    A, E, rows = torch.zeros(shape[0], shape[1], shape[1]), torch.zeros(shape[0], shape[2], shape[2]), 0
    for call in (call for one in passes for call in one):
        a, e = rows_of(layer, call)
        A, E, rows = A + torch.einsum("gri,grj->gij", a, a), E + torch.einsum("gri,grj->gij", e, e), rows + a.shape[1]
        rows -= int(a[..., 1].sum()) if layer.lookup else 0  # of padding, whose row has no gradient
    for call in (call for one in further for call in one):
        _, e = rows_of(layer, call)
        E = E + torch.einsum("gri,grj->gij", e, e)
    return {"input": A / sum(len(one[0].input) for one in passes), "error": E / rows}


def check(found: list[dict[str, Moment]], wanted: dict[str, Tensor]) -> None:
    """Compares means over several batches."""
    for side, matrix in wanted.items():
        moments = [batch[side] for batch in found]
        total = torch.stack([moment.sum() for moment in moments]).sum(0).double()
        mean = total / sum(moment.count for moment in moments)
        torch.testing.assert_close(torch.diag_embed(mean) if mean.dim() == 2 else mean, matrix)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("directions", [1, 3])
def test_moments_of_calls_and_of_gradients_are_sums_over_examples_positions_and_directions(
    name: str, directions: int
) -> None:
    torch.manual_seed(0)
    make, data = LAYERS[name]
    layer = layer_of(module := make())
    by_direction = [[calls(module, x, directions, n) for x in (data(n), data(n))] for n in (5, 2)]  # two calls per pass
    passes = [[uses[0] for uses in one] for one in by_direction]
    further = [[uses[k] for uses in one] for one in by_direction for k in range(1, directions)]
    wanted = expected(layer, passes, further)

    if directions == 1:
        for keep in (False, True):
            found = LayerStatistics.of(layer, [call for one in passes for call in one], keep=keep)
            check([found.moments()], wanted)
            diagonal = LayerStatistics.of(layer, found.calls, diagonal=("input", "error")).moments() if keep else {}
            for side, moment in diagonal.items():
                torch.testing.assert_close(moment.sum().double() / moment.count, wanted[side].diagonal(dim1=1, dim2=2))
    found = []
    for n, one in zip((5, 2), by_direction):
        columns = [
            summed([dict(layers.per_example_gradients(module, u[k].input, u[k].error))[layer.owner] for u in one])
            for k in range(directions)
        ]
        for some, examples in ((columns[:2], n), (columns[2:], 0)):  # in two parts, as `laplace` adds directions
            if some:
                joint = concatenated(some)
                assert isinstance(joint, (OuterProducts, EmbeddingGradients))
                found.append(LayerStatistics.from_gradients(layer, joint, examples).moments())
    check(found, wanted)


@pytest.mark.parametrize("name", ["linear", "sequence", "conv", "groups"])
def test_a_mean_is_a_sum_over_its_count(name: str) -> None:
    torch.manual_seed(1)
    make, data = LAYERS[name]
    layer = layer_of(module := make())
    for moment in LayerStatistics.of(layer, calls(module, data(5), 1)).moments().values():
        torch.testing.assert_close(moment.mean(), moment.sum() / moment.count)


def test_reduced_moments_average_inputs_and_sum_errors_over_positions() -> None:
    torch.manual_seed(2)
    layer = layer_of(module := nn.Linear(3, 2))
    (call,) = calls(module, torch.randn(5, 4, 3), 1)
    moments = LayerStatistics.of(layer, [call], losses=20, sharing="reduce").moments()
    a = torch.cat([call.input.mean(1), torch.ones(5, 1)], 1)
    e = call.error.sum(1)
    torch.testing.assert_close(moments["input"].mean()[0], a.T @ a / 20)
    torch.testing.assert_close(moments["error"].mean()[0], e.T @ e / 5)


def test_a_moving_average_is_formed_in_place() -> None:
    torch.manual_seed(3)
    layer = layer_of(module := nn.Linear(600, 2))
    (call,) = calls(module, torch.randn(5, 600), 1)
    for rows in (1, 80):  # rows that are stored, and rows that are summed at once
        statistics = LayerStatistics.of(layer, [call] * rows, sides=("input",))
        moment = statistics.moments()["input"]
        assert (moment.total is None) == (rows == 1)
        old = moment.mean()
        for scale in (None, torch.tensor(3.0)):
            factor = old.clone()
            moment.into(factor, 0.25, 0.5, scale)
            torch.testing.assert_close(symmetric(factor), (0.25 + 0.5 * (1 if scale is None else 3)) * old)


@pytest.mark.parametrize(
    ("name", "count", "every"),
    # The largest k that leaves 20 rows, or 16 lines, and has no divisor in common with their number: with k = 5, 100
    # rows would be at the same positions of each example; with k = 7, there would be 15.
    [("linear", 100, 3), ("sequence", 50, 9), ("conv", 49, 11), ("groups", 64, 11), ("lookup", 71, 10)],
)
def test_with_stats_rows_moments_are_means_over_every_kth_row_or_line(name: str, count: int, every: int) -> None:
    torch.manual_seed(0)
    make, data = LAYERS[name]
    layer = layer_of(module := make())
    (call,) = calls(module, x := data(count), 1)
    found = LayerStatistics.of(layer, [call], stats_rows=20.0).moments()
    a, e = rows_of(layer, call)
    if name == "conv":  # four lines of five places in each example
        a, e = (rows.unflatten(1, (4 * count, -1))[:, ::every].flatten(1, 2) for rows in (a, e))
    else:
        a, e = a if layer.lookup else a[:, ::every], e[:, ::every]  # indices are all counted
    losses = len(x) * (1 if layer.lookup else a.shape[1] / rows_of(layer, call)[0].shape[1])
    for side, rows, number in (("input", a, losses), ("error", e, e.shape[1])):
        mean = found[side].sum().double() / found[side].count
        mean = torch.diag_embed(mean) if mean.dim() == 2 else mean
        if layer.lookup and side == "error":
            number *= 1 - float((x == 1).double().mean())  # of padding
        torch.testing.assert_close(mean, torch.einsum("gri,grj->gij", rows, rows) / number)


def test_with_stats_rows_repeated_examples_have_the_moments_of_all_rows() -> None:
    torch.manual_seed(0)
    for name, (make, data) in LAYERS.items():
        layer = layer_of(module := make())
        (call,) = calls(module, data(1), 1)
        repeated = LayerCall(module, *(t.expand(4000, *t.shape[1:]) for t in (call.input, call.error)), 0, 0)
        some, every = (LayerStatistics.of(layer, [repeated], **o).moments() for o in ({"stats_rows": 64.0}, {}))
        for side in ("input", "error"):
            means = [m[side].sum().double() / m[side].count for m in (some, every)]
            if name != "lookup":  # 65 of 12,000 rows, whose positions differ
                # Of 65 rows of sequences, 17 are at one of four positions, and 16 at each other one; of 17 lines of
                # the convolution, 5 and 4.
                part = {"sequence": 0.05, "groups": 0.05, "conv": 0.1}.get(name, 1e-7)
                torch.testing.assert_close(*means, rtol=0, atol=part * float(means[1].abs().max()))
            assert some[side].count == every[side].count, name  # losses and rows of the whole call


@pytest.mark.parametrize("frames", [2, 8, 12])
def test_with_stats_rows_the_numbers_of_frames_of_clips_differ_by_at_most_one(frames: int) -> None:
    layer = layer_of(module := nn.Conv2d(frames, 1, 1, bias=False))
    clips = torch.eye(frames).expand(16, frames, frames).flatten(0, 1)  # each frame has a channel
    call = LayerCall(module, clips[..., None, None].expand(-1, -1, 8, 8), torch.ones(16 * frames, 1, 8, 8), 0)
    moment = LayerStatistics.of(layer, [call], sides=("input",), stats_rows=1024.0).moments()["input"]
    numbers = moment.sum()[0].diagonal()
    assert 0 < numbers.max() < 2.01 * numbers.min()  # one and two, or more


def test_with_stats_rows_there_are_four_rows_for_each_row_of_a_factor() -> None:
    torch.manual_seed(0)
    layer = layer_of(module := nn.Linear(256, 8))
    for shape in ((30, 77), (64, 64), (2310,), (30030,)):
        (call,) = calls(module, torch.randn(*shape, 256), 1)
        moment = LayerStatistics.of(layer, [call], sides=("input",), stats_rows=1024.0).moments()["input"].mean()
        assert torch.linalg.eigvalsh(moment).min() > 0.1 * moment.diagonal(dim1=1, dim2=2).mean(), shape


@pytest.mark.parametrize("diagonal", [(), ("input", "error")])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(3, 2), (3,)),
        (nn.Conv2d(2, 4, 3), (2, 6, 7)),
        (nn.Conv1d(4, 6, 2, groups=2), (4, 5)),
        (nn.ConvTranspose2d(2, 3, 1, bias=False), (2, 6, 7)),
    ],
    ids=["linear", "conv", "groups", "transposed"],
)
def test_with_stats_rows_calls_of_any_size_count_by_their_rows(
    module: nn.Module, shape: tuple[int, ...], diagonal: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    layer, uses = layer_of(module.double()), []
    for index, count in enumerate((4000, 300, 1)):  # all rows of a call are the same
        x = torch.randn(1, shape[0], *[1] * len(shape[1:])).expand(count, *shape)
        like = module(x)
        error = torch.randn(1, like.shape[1], *[1] * len(shape[1:])).expand_as(like)
        uses.append(LayerCall(module, x, error, 0, index))
    some, every = (
        LayerStatistics.of(layer, uses, diagonal=diagonal, **o).moments() for o in ({"stats_rows": 64.0}, {})
    )
    for side in ("input", "error"):
        torch.testing.assert_close(*(m[side].sum() / m[side].count for m in (some, every)))
