"""Formats of references and pointers as patterns, which the compiler does not know.

Sources: RFC 3986 (`uri-reference`), RFC 6570 (`uri-template`), RFC 6901 (`json-pointer`), and the
draft on relative JSON pointers that JSON Schema 2020-12 names (`relative-json-pointer`).
"""

from __future__ import annotations

from collections.abc import Mapping

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_LAST = rf"(?:{_HEX}:{_HEX}|{_OCTET}(?:\.{_OCTET}){{3}})"  # of 32 bits
_SHORTENED = "|".join(  # by the most groups of 16 bits that are before ::
    f"(?:(?:{_HEX}:){{0,{most - 1}}}{_HEX})?::{rest}" if most else f"::{rest}"
    for most, rest in enumerate(
        [*(f"(?:{_HEX}:){{{groups}}}{_LAST}" for groups in range(5, -1, -1)), _HEX, ""]
    )
)
IPV6 = f"(?:(?:{_HEX}:){{6}}{_LAST}|{_SHORTENED})"

_ENCODED = "%[0-9A-Fa-f]{2}"
_PLAIN = r"0-9A-Za-z._~!$&'()*+,;=\-"  # RFC 3986's unreserved and sub-delims
_CHARACTER = f"(?:[{_PLAIN}:@]|{_ENCODED})"
_WITHOUT_COLON = f"(?:[{_PLAIN}@]|{_ENCODED})"
_LITERAL = rf"\[(?:{IPV6}|v[0-9A-Fa-f]+\.[{_PLAIN}:]+)\]"
_NAME = f"(?:[{_PLAIN}]|{_ENCODED})*"  # of a host; addresses of IPv4 are such names, too
_AUTHORITY = f"(?:(?:[{_PLAIN}:]|{_ENCODED})*@)?(?:{_LITERAL}|{_NAME})(?::[0-9]*)?"
_FURTHER = f"(?:/{_CHARACTER}*)*"  # segments of a path
_WHOLE_PATH = f"//{_AUTHORITY}{_FURTHER}|/(?:{_CHARACTER}+{_FURTHER})?"
_REFERENCE = (
    f"(?:[A-Za-z][0-9A-Za-z+.\\-]*:(?:{_WHOLE_PATH}|{_CHARACTER}+{_FURTHER})?"
    f"|(?:{_WHOLE_PATH}|{_WITHOUT_COLON}+{_FURTHER})?)"
    rf"(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?"
)

_VARIABLE = r"[0-9A-Za-z_]+(?:\.[0-9A-Za-z_]+)*(?::[1-9][0-9]{0,3}|\*)?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}}"
_PLANES = "".join(rf"\u{{{n:X}{1000 * (n == 14):04}}}-\u{{{n:X}FFFD}}" for n in range(1, 17))
# What stands for itself: of ASCII all but white space, controls, and "'%<>\^`{|}.
_LITERALS = (
    r"[!#$&(-;=?-\[\]_a-z~\u{A0}-\u{D7FF}\u{E000}-\u{F8FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}"
    f"{_PLANES}]"
)
_TEMPLATE = f"(?:{_LITERALS}|{_ENCODED}|{_EXPRESSION})*"

_POINTER = "(?:/(?:[^/~]|~[01])*)*"

PATTERNS: Mapping[str, str] = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-reference": f"^{_REFERENCE}$",
    "uri-template": f"^{_TEMPLATE}$",
}
