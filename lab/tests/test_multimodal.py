"""The experiment on several minima: its ground truth, and that methods start and end where they say."""

from __future__ import annotations

import pytest
import torch

from bayesgrad_lab import khan2023_multimodal as own


def test_true_minima_are_the_published_ones() -> None:
    known = torch.tensor([[3.0, 2.0], [-2.805118, 3.131312], [-3.779310, -3.283186], [3.584428, -1.848126]]).double()
    found = own.true_minima("Himmelblau's function")
    assert len(found) == 4
    assert torch.cdist(known, found).min(1).values.max() < 1e-3


@pytest.mark.parametrize("name", own.METHODS)
def test_methods_begin_at_the_same_points(name: str) -> None:
    path = own.METHODS[name](own.himmelblau, 3, 0.5, 2, 10.0)["path"]
    start = own.starts(3, 0.5)
    assert path.shape[1:] == (own.COMPONENTS, 2)
    assert start.abs().max() <= 0.5
    if name == "mixture":
        assert torch.equal(path[0], start)
    assert 0 < (path[-1] - start).norm() < 30


def test_points_count_for_the_minimum_below_them() -> None:
    minima = own.true_minima("Himmelblau's function")
    points = torch.cat([minima[:1] + 0.3, minima[:1] - 0.2, minima[2:3], torch.full((1, 2), torch.nan).double()])
    assert own.found(own.himmelblau, points, minima).tolist() == [True, False, True, False]
    assert not own.found(own.himmelblau, points[-1:], minima).any()
