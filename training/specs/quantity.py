"""Kubernetes' quantities: 8, 500m, 700Gi, 1e3. Pure.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

_FORM = re.compile(
    r"^(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<unit>[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
)
_DECIMAL = "numkMGTPE"
_EXPONENTS = (-9, -6, -3, 3, 6, 9, 12, 15, 18)
_UNITS: Mapping[str, Decimal] = {
    "": Decimal(1),
    **{unit: Decimal(10) ** power for unit, power in zip(_DECIMAL, _EXPONENTS, strict=True)},
    **{f"{unit}i": Decimal(1024) ** (place + 1) for place, unit in enumerate("KMGTPE")},
}


def amount_of(text: str) -> Decimal:
    """The number that a quantity stands for.

    Raises:
        ValueError: it is none.
    """
    found = _FORM.match(text)
    if found is None:
        raise ValueError(f"{text!r} is no quantity such as 8, 500m or 700Gi")
    unit = found["unit"] or ""
    scale = _UNITS[unit] if unit in _UNITS else Decimal(f"1{unit}")
    return Decimal(found["number"]) * scale
