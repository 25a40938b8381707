"""Schemas of which llguidance would make another form are refused, and nothing else is."""

import json
import random
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle

pytest.importorskip("llguidance")

BIG = 12345678901234567
CLOSED = {"type": "array", "prefixItems": [{"const": "a"}]}


def takes(bundle: Bundle, schema: Any, text: str) -> bool:
    """Whether a schema's grammar lets a whole text through."""
    assert bundle.tokenizer is not None
    grammar, ids = bundle.grammars.begin(schema), bundle.tokenizer.encode(text, special=False)
    for position, token in enumerate(ids):
        if not grammar.allows(position, token):
            return False
        grammar.take(position, token)
    return grammar.allows(len(ids), min(bundle.manifest.teacher.eos))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": BIG}, f"const {BIG}"),
        ({"enum": ["a", [{"b": BIG}]]}, f"enum {BIG}"),
        ({"const": 2**64}, "const 18446744073709551616"),
        ({"const": -(2**63)}, "const -9223372036854775808"),
        ({"const": 2**60}, "const 1152921504606846976"),
        ({"const": 123456789.12345679}, "const 123456789.12345679"),
        ({"const": -275890216421386.12}, "const -275890216421386.12"),
        ({"type": "integer", "const": 1e300}, r"const 1e\+300"),
        ({"type": "integer", "minimum": BIG}, "minimum"),
        ({"type": "integer", "minimum": 0, "maximum": BIG}, "maximum"),
        ({"type": "integer", "minimum": 1e23, "maximum": 1e24}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum"),
        ({"properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"const": BIG}]}}}}, "const"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": BIG}}}, "const"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0"),
        ({"type": "number", "minimum": -0.1, "exclusiveMaximum": 0}, "exclusiveMaximum 0"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "exclusiveMinimum 1"),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "exclusiveMinimum 0"),
        (
            {"type": "number", "exclusiveMaximum": -1, "$ref": "#/$defs/a", "$defs": {"a": {"minimum": -1.5}}},
            "exclusiveMaximum -1",
        ),
        (CLOSED | {"additionalItems": False}, "prefixItems: .*additionalItems"),
        (CLOSED | {"items": [{"const": "b"}]}, "prefixItems: .*items"),
        (CLOSED | {"$schema": "http://json-schema.org/draft-07/schema#"}, r"prefixItems: .*\$schema"),
        ({"maximum": float("inf")}, "the schema is not JSON"),
        (f'start: "a" x\nx: %json {{"const": {BIG}}}', "const"),
        ('start: %json {"exclusiveMinimum": 1e400}', "exclusiveMinimum Infinity"),
        ('start: %json {"minimum": NaN}', "minimum NaN"),
    ],
)
def test_a_schema_that_would_be_another_one_is_refused_by_its_keyword(
    bundle: Bundle, schema: Any, keyword: str
) -> None:
    with pytest.raises(RequestError, match=f"^grammar: {keyword}[ :]?"):
        bundle.grammars.begin(schema)


@pytest.mark.parametrize(
    ("schema", "text", "another"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "minimum": 2**53 - 1, "maximum": 10**18}, str(10**18), str(10**18 + 1)),
        ({"type": "boolean", "default": BIG, "examples": [{"const": BIG}]}, "true", str(BIG)),
        (
            {"properties": {"const": {"const": 1, "default": BIG}}, "additionalProperties": False},
            '{"const":1}',
            '{"a":1}',
        ),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1, "type": "number"}, "0.5", "0"),
        ({"exclusiveMinimum": False, "minimum": 0, "maximum": 0.5, "type": "number"}, "0", "0.6"),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 1}]}, "0.5", "0"),
        ({"type": "object", "properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}}, "{}", "0"),
        (CLOSED | {"items": False}, '["a"]', '["a","a"]'),
        ({"type": "array", "items": [{"const": "a"}], "additionalItems": False}, '["a"]', '["a","a"]'),
    ],
)
def test_what_stays_itself_passes(bundle: Bundle, schema: Any, text: str, another: str) -> None:
    assert takes(bundle, schema, text) and not takes(bundle, schema, another)


def test_a_number_that_passes_is_written_as_itself(bundle: Bundle) -> None:
    rng, passed, refused = random.Random(0), 0, 0
    for _ in range(300):
        number: float = rng.choice(
            (
                rng.uniform(-1, 1) * 10 ** rng.randint(-25, 25),
                round(rng.uniform(-1000, 1000), rng.randint(0, 8)),
                rng.randint(-(2**63), 2**64) >> rng.randint(0, 60),
                rng.choice((1, -1)) * (2 ** rng.randint(50, 64) + rng.randint(-3, 3)),
                10 ** rng.randint(0, 19) * rng.randint(1, 9),
            )
        )
        try:
            assert takes(bundle, {"const": number}, f"{Decimal(repr(number)):f}".removesuffix(".0")), number
            passed += 1
        except RequestError:
            refused += 1
    assert passed > 100 and refused > 50


@pytest.mark.parametrize("joined", [False, True], ids=["one schema", "allOf"])
def test_no_number_outside_of_a_range_passes(bundle: Bundle, joined: bool) -> None:
    ends = [None, -1.5, -1, -0.05, 0, 0.1, 1, 1.05, 10]
    texts = [f"{sign}{whole}{rest}" for sign, whole, rest in product(("", "-"), "01", ("", ".0", ".05", ".1", ".5"))]
    seen = 0
    for low, high, open_low, open_high in product(ends, ends, (False, True), (False, True)):
        if low is None or high is None or low < high:
            bounds = {
                "exclusiveMinimum" if open_low else "minimum": low,
                "exclusiveMaximum" if open_high else "maximum": high,
            }
            bounded = {name: bound for name, bound in bounds.items() if bound is not None}
            parts = [{name: bound} for name, bound in bounded.items()]
            schema = {"type": "number"} | ({"allOf": parts} if joined and parts else bounded)
            try:
                numbers = [Fraction(text) for text in texts if takes(bundle, schema, text)]
            except RequestError:
                continue
            seen += len(numbers)
            least, most = (None if end is None else Fraction(json.dumps(end)) for end in (low, high))
            assert all(least is None or least < number or (least == number and not open_low) for number in numbers), (
                schema
            )
            assert all(most is None or number < most or (most == number and not open_high) for number in numbers), (
                schema
            )
    assert seen > 500
