"""How options that are given for one learning rate follow its schedule.

`sgd_lr`, `final_lr`, `fallback_lr` and `weight_noise` are given for a *reference* learning rate and multiplied by
lr / reference, so a schedule multiplies all rates of an optimizer by the same factor. The reference is the lr with
which the param group was built (`base_lr`), or `max_lr` of the group, which OneCycleLR sets to its highest rate.
States that are variances in units of lr / reference keep the reference of the first step (`unit_lr`): a scheduler that
is built later changes what options are given for, and no belief.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bayesgrad.warning import warn

RATES = "base_lr", "last_lr", "unit_lr"  # that a step writes into a param group
ROUNDING = 1e-6  # of a schedule that returns to its highest rate


def current_lr(group: Mapping[str, Any]) -> float:
    """The learning rate; zero if a schedule ended at zero minus a rounding error."""
    lr = float(group["lr"])
    return 0.0 if -1e-9 * group["base_lr"] < lr < 0 else lr


def reference_lr(group: Mapping[str, Any]) -> float:
    """The learning rate for which the options of a group were given; zero before the first positive one."""
    return float(group.get("max_lr") or group.get("base_lr") or 0.0)


def relative_lr(group: Mapping[str, Any]) -> float:
    """lr / reference; 1 before the first step of an optimizer that was built with lr = 0."""
    lr = float(group["lr"])
    return lr / (reference_lr(group) or lr or math.inf)


def unit_lr(group: Mapping[str, Any]) -> float:
    """The learning rate at which the units of a group's state are one: the reference in its first step."""
    return float(group.get("unit_lr") or reference_lr(group))


def rates_after(group: Mapping[str, Any]) -> dict[str, float]:
    """What a step with a positive lr writes into a param group."""
    lr = group["lr"]
    return dict(zip(RATES, (group["base_lr"] or lr, lr, unit_lr(group) or lr)))


def state_unit(group: Mapping[str, Any]) -> float:
    """lr in the units of the state."""
    lr = float(group["lr"])
    return lr / (unit_lr(group) or lr or math.inf)


def warn_above_reference(name: str, group: Mapping[str, Any], options: tuple[str, ...]) -> bool:
    """Warns if lr raises one of these options above its given value; returns whether it did."""
    factor = relative_lr(group)
    raised = [option for option in options if 0 < group[option] < math.inf]
    if factor <= 1 + ROUNDING or not raised:
        return False
    now = " and ".join(f"{option}={group[option]:g} to {factor * group[option]:g}" for option in raised)
    warn(
        f"lr={group['lr']:g} is {factor:.3g} times the {reference_lr(group):g} for which {name} was given its options, "
        f"and scales {now}. Build it with the highest lr of the schedule, or set 'max_lr' in its param groups.",
    )
    return True
