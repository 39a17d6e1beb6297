"""Printed text beside text that was recorded: the same words, and numbers that agree up to what machines differ in."""

from __future__ import annotations

import re

NUMBER = r"(?<![\w.])-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?"


def differences(recorded: str, printed: str, relative: float = 0.1, absolute: float = 0.02) -> list[str]:
    """What differs, a line for each difference."""
    words = [re.sub(NUMBER, "#", text).split() for text in (recorded, printed)]
    if words[0] != words[1]:
        return [f"recorded:\n{recorded}\nprinted:\n{printed}"]
    pairs = zip(*([float(n.replace(",", "")) for n in re.findall(NUMBER, text)] for text in (recorded, printed)))
    return [f"{a:g} was recorded, {b:g} is printed" for a, b in pairs if abs(a - b) > absolute + relative * abs(a)]
