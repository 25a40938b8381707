"""JSON schemas that llguidance would silently turn into others.

It reads numbers as 64-bit floats, and not always the nearest one. It lets the whole number in at the open end of a
range below it, and drops ``prefixItems`` if an older draft's keywords stand there too. Such schemas are refused.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from draftwood.errors import RequestError

_OPEN = {"exclusiveMinimum", "exclusiveMaximum"}
_BOUNDS = {"minimum", "maximum"} | _OPEN
_LITERALS = {"const", "enum"}
# Keywords by which several schemas hold for one number.
_JOINING = {"allOf", "$ref", "$dynamicRef"}
# Keywords under which names, and not keywords, lead to schemas.
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
# Keywords that restrict nothing, and may hold anything.
_NOTES = {"default", "examples", "x-guidance"}
# Whole numbers from here on are not all floats; those beyond the second are no bounds of integers there.
_FLOATS, _LARGEST = 2**53, 2**63 - 1
# Digits that a float always keeps, and the largest power of ten that is one.
_DIGITS, _POWER = 15, 22
_OLDER_DRAFT = re.compile(r"draft-0\d/|draft/2019-09/")


def check_schema(schema: Any) -> None:
    """Looks at a schema at every depth.

    Raises:
        RequestError: llguidance would let through what the schema forbids; the keyword is named.
    """
    parts: list[dict[str, Any]] = []
    older = isinstance(schema, dict) and bool(_OLDER_DRAFT.search(str(schema.get("$schema", ""))))
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            parts.append(part)
            _check_items(part, older)
            for keyword, value in part.items():
                if keyword in _LITERALS or keyword in _BOUNDS:
                    _check_numbers(keyword, value)
                elif keyword in _NAMED and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in _NOTES:
                    waiting.append(value)
            _check_ranges([part])
    if any(not _JOINING.isdisjoint(part) for part in parts):
        _check_ranges(parts)


def schemas_of(grammar: str) -> Iterator[Any]:
    """The JSON schemas of a grammar in Lark's syntax."""
    for mark in re.finditer(r"%json\s*(?=\{)", grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, mark.end())[0]
        except (ValueError, RecursionError):  # llguidance says what is wrong with it
            continue


def _check_numbers(keyword: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | dict):
            waiting += part.values() if isinstance(part, dict) else part
        elif _is_number(part) and not (abs(part) < math.inf and _kept(part, keyword in _OPEN)):
            number = json.dumps(part)
            raise RequestError(f"grammar: {keyword} {number:.40}: would be read as another number; give fewer digits")


def _kept(number: float, open_end: bool) -> bool:
    """Whether a number stays itself: its digits are read as one float, and that is multiplied by a power of ten.

    It is written with the fewest digits that are that float's, or as a whole number of 64 bits. An open end of integers
    is moved by one first.
    """
    value = Decimal(repr(number))
    _, digits, exponent = value.as_tuple()
    size, whole = int("".join(map(str, digits))), value == value.to_integral_value()
    if whole and abs(value) >= (_FLOATS if open_end else _LARGEST):
        return value == _LARGEST and not open_end  # larger ones are cut off there
    if isinstance(number, int) and abs(number) <= _FLOATS:
        return True
    if len(str(size).rstrip("0")) > _DIGITS or float(size) != size or abs(int(exponent)) > _POWER:
        return False
    return not whole or int(float(number)) == value


def _check_ranges(schemas: Sequence[dict[str, Any]]) -> None:
    """Refuses (0, 0.5] and [-0.5, 0), and the same next to other whole numbers; each bound is any schema's."""
    lows = [_end(schema, "minimum", "exclusiveMinimum", max) for schema in schemas]
    highs = [_end(schema, "maximum", "exclusiveMaximum", min) for schema in schemas]
    above = sorted(high for high, _ in highs if high is not None)
    below = sorted(low for low, _ in lows if low is not None and low < 0)
    let_in = [("exclusiveMinimum", low) for low in _whole_open(lows) if low >= 0 and _between(low, above, low + 1)]
    let_in += [("exclusiveMaximum", high) for high in _whole_open(highs) if _between(high - 1, below, high)]
    for name, end in let_in:
        raise RequestError(f"grammar: {name} {end}: would be let in, since the other bound is less than 1 away")


def _whole_open(ends: Iterable[tuple[float | None, bool]]) -> set[float]:
    return {end for end, is_open in ends if end is not None and is_open and end == int(end)}


def _between(low: float, values: list[float], high: float) -> bool:
    """Whether one of the ascending values is in (low, high)."""
    place = bisect_right(values, low)
    return place < len(values) and values[place] < high


def _end(schema: dict[str, Any], name: str, open_name: str, stricter: Any) -> tuple[float | None, bool]:
    """The stricter bound of one end, if there are two, and whether it is open; of draft 4, a switch opens it."""
    closed, opened = schema.get(name), schema.get(open_name)
    if opened is True:
        opened = closed
    closed, opened = (bound if _is_number(bound) else None for bound in (closed, opened))
    if closed is None or opened is None:
        return (opened, True) if closed is None else (closed, False)
    return (opened, True) if stricter(closed, opened) == opened else (closed, False)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_items(schema: dict[str, Any], older: bool) -> None:
    if "prefixItems" in schema and (older or "additionalItems" in schema or isinstance(schema.get("items"), list)):
        other = "$schema" if older else "additionalItems" if "additionalItems" in schema else "items"
        raise RequestError(f"grammar: prefixItems: would be dropped, since {other} is of an older draft; say items")
