"""Chat templates: jinja2 in a sandbox, with the helpers that Hugging Face gives a template."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwood.errors import BundleError

_MOST_POWER, _MOST_ITEMS = 64, 10_000_000
_WIDE = re.compile(r"%[^a-zA-Z%]*([0-9]{4,}|\*)")


class _Generation(Extension):
    """``{% generation %}`` marks what to train on; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses, before it is computed, what would fill the memory or never end in one operation."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= _MOST_POWER):
            raise jinja2.TemplateError(f"a power of {right!r:.40}; expected at most {_MOST_POWER}")
        if operator == "*" and _length(left, right) > _MOST_ITEMS:
            raise jinja2.TemplateError(f"a text or list longer than {_MOST_ITEMS}")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise jinja2.TemplateError(f"a width in {left!r:.40}; expected at most three digits")
        return super().call_binop(context, operator, left, right)


def _length(left: Any, right: Any) -> int:
    """Of a text or list that is repeated; 0 of numbers."""
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
            return len(repeated) * times
    return 0


@contextmanager
def bounded(steps: int = 2_000_000) -> Iterator[None]:
    """Ends a template that goes on for more than ``steps`` lines of the code it was compiled to, about a second."""
    left = steps

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise jinja2.TemplateError(f"it goes on for more than {steps} steps")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def compile_template(template: str, path: Path) -> jinja2.Template:
    """The template in the sandbox and with the helpers that Hugging Face gives it.

    Raises:
        BundleError: it is no valid template; ``path`` and the line are named.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"{path}: chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # nested too deep, say
        raise BundleError(f"{path}: chat template: {str(error) or type(error).__name__}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
