"""Formats as patterns, where the compiler's own have too much or too little.

llguidance's `date` has a 29 February every year, and its `time` a second 60 in every minute.
RFC 3339 (sections 5.7 and appendix C) has neither; its leap seconds are left out altogether, and
so is the year 0000, which many calendars do not have. Its `ipv6` has no address that ends as one of
IPv4 does, such as ::ffff:192.0.2.1; that of RFC 3986 (section 3.2.2) has.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from onnxport.serving.structured.pointers import ONE_SCHEMA, SCHEMA_LISTS, SCHEMA_MAPS
from onnxport.serving.structured.uri_formats import IPV6
from onnxport.serving.structured.uri_formats import PATTERNS as URI_PATTERNS
from onnxport.serving.structured.writable import writable

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:02-(?:[01]|2[0-8])|0[13-9]|1)|{_LEAP_YEAR}-02-29)"
_YEAR = "^[0-9]{0,3}[1-9]"
_SECONDS = "^[^:]*:[^:]*:[0-5]"
# Instead of the format.
REPLACED: Mapping[str, str] = {"ipv6": f"^{IPV6}$", **URI_PATTERNS}
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (_DAY, _YEAR),
    "date-time": (_DAY, _YEAR, _SECONDS),
    "time": (_SECONDS,),
}


# The compiler compares so many digits; bounds that have more are a little tighter for it.
_DIGITS = 15
_ROUNDING: Mapping[str, str] = {
    "exclusiveMaximum": ROUND_FLOOR,
    "exclusiveMinimum": ROUND_CEILING,
    "maximum": ROUND_FLOOR,
    "minimum": ROUND_CEILING,
}


def _rounded(bound: float, rounding: str) -> float:
    """Return a bound as the compiler can keep it."""
    if bound == int(bound):
        return int(bound)  # which is compared in full
    exact = Decimal(repr(bound))
    places = _DIGITS - 1 - exact.adjusted()
    return float(exact.quantize(Decimal(1).scaleb(-places), rounding))


def tightened(schema: Any) -> Any:
    """Return a checked schema as it is compiled.

    There are patterns beside or instead of some of its formats, all patterns are as `writable` has
    them, and bounds have no more digits than are compared.
    """
    if not isinstance(schema, dict):
        return schema
    result = {name: one for name, one in schema.items() if name != "$schema"}
    for name in set(ONE_SCHEMA) & result.keys():
        result[name] = tightened(result[name])
    for name in set(SCHEMA_LISTS) & result.keys():
        result[name] = [tightened(one) for one in result[name]]
    for name in set(SCHEMA_MAPS) & result.keys():
        result[name] = {key: tightened(one) for key, one in result[name].items()}
    for name, rounding in _ROUNDING.items():
        if name in result:
            result[name] = _rounded(result[name], rounding)
    if "pattern" in result:
        result["pattern"] = writable(result["pattern"])
    if "patternProperties" in result:
        named = result["patternProperties"]
        result["patternProperties"] = {writable(name): one for name, one in named.items()}
    name = result.get("format", "")
    patterns = PATTERNS.get(name, ())
    if name in REPLACED:
        del result["format"]
        patterns = (REPLACED[name],)
    if patterns:
        more = [{"pattern": pattern} for pattern in patterns]
        result["allOf"] = [*result.get("allOf", ()), *more]
    return result
