"""Products by either library against float64, for matrices of all layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bayesgrad import products

LAYOUTS = {
    "plain": lambda m, n: torch.randn(m, n),
    "transposed": lambda m, n: torch.randn(n, m).T,
    "every third row": lambda m, n: torch.randn(3 * m, n)[::3],
    "columns": lambda m, n: torch.randn(m, 2 * n)[:, :n],
    "stack of one": lambda m, n: torch.randn(1, m, n),
    "expanded": lambda m, n: torch.randn(m, 1).expand(m, n),
    "stack": lambda m, n: torch.randn(2, m, n),
}


def rounding(a: Tensor, b: Tensor) -> Tensor:
    """A bound of the rounding of a @ b in float32."""
    return a.shape[-1] * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())


@pytest.fixture(params=[False, True], ids=["torch", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either library, on all processors that have oneDNN."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    operator = torch.ops.mkldnn._linear_pointwise.default if request.param else None
    monkeypatch.setattr(products, "_onednn", lambda: operator)
    monkeypatch.setattr(products, "_adds_by_onednn", lambda: operator is not None)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products_of_all_layouts(left: str, right: str) -> None:
    torch.manual_seed(0)
    a, b = LAYOUTS[left](200, 170), LAYOUTS[right](170, 130)
    found = products.mm(a, b)
    assert found.shape == (a @ b).shape
    assert ((found.double() - a.double() @ b.double()).abs() <= rounding(a, b)).all()
    assert found.is_contiguous()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_product_is_added_in_place(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(*shape, 200, 170), torch.randn(*shape, 170, 130)
    for beta in (0.0, 1.0, 0.5):
        wide = torch.randn(*shape, 200, 140)
        target = wide[..., :130]  # a part of a matrix
        before = target.double()
        if not beta:
            target.fill_(float("nan"))  # nothing is left of it
        products.addmm_(target, a, b, beta=beta, alpha=0.3)
        expected = beta * before + 0.3 * (a.double() @ b.double())
        assert ((target.double() - expected).abs() <= rounding(a, b)).all()


def test_what_is_differentiated_or_of_another_dtype_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(products, "_onednn", lambda: refused)
    a, b = torch.randn(200, 200), torch.randn(200, 200)
    for x, y in ((a.requires_grad_(), b), (a.detach().double(), b.double()), (a.detach()[:9], b)):
        torch.testing.assert_close(products.mm(x, y), x @ y)
    stack = torch.randn(3, 200, 200)
    torch.testing.assert_close(torch.vmap(products.mm)(stack, stack), stack @ stack)
    with pytest.raises(AssertionError):
        products.mm(b, b)


@pytest.mark.parametrize(("family", "added"), [(25, False), (26, True), (None, False)])
def test_sums_of_products_are_by_onednn_where_its_instructions_take_one_cycle(
    family: int | None, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "vendor_id : AuthenticAMD\n" if family is None else f"vendor_id : AuthenticAMD\ncpu family\t: {family}\n"
    monkeypatch.setattr(products, "_processor", lambda: text)
    monkeypatch.setattr(products, "_onednn", lambda: torch.matmul)
    products._adds_by_onednn.cache_clear()
    assert products._adds_by_onednn() is added
    products._adds_by_onednn.cache_clear()
