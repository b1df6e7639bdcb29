"""Scales keep their provenance: nothing changes them, and nothing without a provenance takes their place."""

import copy
import dataclasses
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.gradient.transform import Scales


def public() -> Scales:
    """Scales that anyone may know."""
    return Scales({"0.weight": torch.tensor(2.0)}, provenance="public data", source="a book")


def private() -> Scales:
    """Scales that no epsilon covers."""
    return Scales({"2.weight": torch.tensor(3.0)}, provenance="private-derived", source="our patients")


def epsilon(scales: Any) -> float:
    """The epsilon of one step with these scales."""
    plan = make_plan(delta=1e-5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=pg.precondition.fixed(scales))
    private_grad(next(plan.batches(make_data())))
    return private_grad.ledger.epsilon(delta=1e-5)


@pytest.mark.parametrize("union", [operator.or_, operator.ior])
@pytest.mark.parametrize("private_first", [True, False])
def test_a_union_with_private_scales_is_private(union: Callable[[Any, Any], Any], private_first: bool):
    left, right = (private(), public()) if private_first else (public(), private())
    joined = union(left, right)
    assert sorted(joined) == ["0.weight", "2.weight"]
    assert joined.provenance == "private-derived"
    assert epsilon(joined) == math.inf
    assert math.isfinite(epsilon(public()))


CHANGES: dict[str, Callable[[Any], object]] = {
    "update": lambda scales: scales.update(private()),
    "setitem": lambda scales: operator.setitem(scales, "2.weight", torch.tensor(3.0)),
    "setdefault": lambda scales: scales.setdefault("2.weight", torch.tensor(3.0)),
    "delitem": lambda scales: operator.delitem(scales, "0.weight"),
    "pop": lambda scales: scales.pop("0.weight"),
    "clear": lambda scales: scales.clear(),
    "dict.update": lambda scales: dict.update(scales, private()),
    "provenance": lambda scales: setattr(scales, "provenance", "common knowledge"),
    "source": lambda scales: setattr(scales, "source", "another book"),
    "delattr": lambda scales: delattr(scales, "provenance"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_scales_cannot_be_changed(change: str):
    scales = public()
    with pytest.raises((AttributeError, TypeError)):
        CHANGES[change](scales)
    assert (list(scales), scales.provenance, scales.source) == (["0.weight"], "public data", "a book")


def test_scales_do_not_follow_tensors_that_are_overwritten():
    tensor = torch.tensor(2.0)
    scales = pg.Scales({"0.weight": tensor}, provenance="public data", source="a book")
    tensor.fill_(7.0)
    scales["0.weight"].fill_(7.0)
    next(iter(scales.values())).fill_(7.0)
    assert float(scales["0.weight"]) == 2.0


def test_scales_do_not_follow_the_mapping_that_they_were_made_from():
    values = {"0.weight": torch.tensor(2.0)}
    scales = Scales(values, provenance="public data", source="a book")
    values["2.weight"] = torch.tensor(3.0)
    assert list(scales) == ["0.weight"]


PLAIN: dict[str, Callable[[Scales], Any]] = {
    "unpacked": lambda scales: {**public(), **scales},
    "comprehension": lambda scales: {name: 2 * value for name, value in scales.items()},
    "dict": lambda scales: dict(scales),
    "updated": lambda scales: operator.ior({"0.weight": torch.tensor(2.0)}, scales),
    "given": lambda _: {"0.weight": torch.tensor(2.0)},
}


@pytest.mark.parametrize("source", [None, "a book"])
@pytest.mark.parametrize("made", PLAIN)
def test_values_without_a_provenance_are_refused(made: str, source: str | None):
    plain = PLAIN[made](private())
    with pytest.raises(pg.PrivacyError, match=r"to be Scales, with a provenance, got dict; .*provenance="):
        pg.precondition.fixed(plain, source=source)


@pytest.mark.parametrize("union", [operator.or_, operator.ior])
def test_a_union_with_a_dict_is_refused_on_either_side(union: Callable[[Any, Any], Any]):
    plain = {"0.weight": torch.tensor(2.0)}
    with pytest.raises((pg.PrivacyError, TypeError, AttributeError)):
        union(private(), plain)
    with pytest.raises((pg.PrivacyError, TypeError, AttributeError)):
        operator.or_(plain, private())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scales: pickle.loads(pickle.dumps(scales))])
def test_copies_keep_the_provenance(copied: Callable[[Scales], Scales]):
    scales = copied(private())
    assert isinstance(scales, Scales)
    assert (scales.provenance, scales.source) == ("private-derived", "our patients")
    assert {name: float(value) for name, value in scales.items()} == {"2.weight": 3.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        scales.provenance = "public data"  # pyright: ignore[reportAttributeAccessIssue]


def test_scales_are_equal_to_themselves_only_and_show_their_provenance():
    one, other = public(), public()
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    assert repr(one) == "Scales({'0.weight': tensor(2.)}, provenance='public data', source='a book')"
