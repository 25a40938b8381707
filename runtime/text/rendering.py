"""Chat templates: jinja2 in a sandbox, with the helpers that Hugging Face gives a template.

Also the program of the process that renders them. A template is somebody else's code, and no check of its text bounds
its cost. Compiling folds constants, one multiplication of integers cannot be interrupted, and a text grows in a dozen
ways. So `draftwood.runtime.text.chat` starts this file by its path. The system enforces limits on memory and processor
time. The file imports nothing of the project, and jinja2 only when a template is read: the process that asks needs the
messages and limits alone.

A message is four bytes of length, most significant first, and so many bytes of JSON. The first one holds the templates
by name. Each is answered by an object of ``text``, ``refused`` or ``failed``.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    from jinja2.parser import Parser

# Of the whole process; Python and jinja2 take some 40 MB of it.
MOST_MEMORY = 512 << 20
# Processor time of one rendering, and characters that it may make: the longest contexts are of about a million tokens.
MOST_SECONDS = 2
MOST_CHARACTERS = 16 << 20


def environment() -> jinja2.Environment:
    """The sandbox, with the helpers that Hugging Face gives a template."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def _generation() -> type[jinja2.ext.Extension]:
    """``{% generation %}`` marks text to train on; here its body is rendered as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _raise_exception(message: str) -> None:
    import jinja2

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


def read(source: IO[bytes]) -> Any:
    """The next message; None if the other side has ended."""
    size = source.read(4)
    return json.loads(source.read(int.from_bytes(size, "big"))) if len(size) == 4 else None


def write(sink: IO[bytes], message: Any) -> None:
    content = json.dumps(message).encode()
    sink.write(len(content).to_bytes(4, "big") + content)
    sink.flush()


def main() -> None:
    """Renders requests, until the other side ends. The arguments are folders in which jinja2 may lie."""
    sys.path += sys.argv[1:]
    import jinja2

    limit(resource.RLIMIT_AS, MOST_MEMORY)
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        limit(nothing, 0)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sources, sandbox, compiled = read(source), environment(), {}
    while (request := read(source)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + MOST_SECONDS)
        name = request["name"]
        try:
            if name not in compiled:
                compiled[name] = sandbox.from_string(sources[name])
            answer = {"text": bounded(compiled[name], request["values"])}
        except jinja2.TemplateError as error:
            answer = {"refused": str(error.message)}
        except MemoryError:
            answer = {"failed": f"it takes more than {MOST_MEMORY >> 20} MB"}
        except Exception as error:  # a template can fail in every way that Python can
            answer = {"failed": str(error) or type(error).__name__}
        write(sink, answer)


def bounded(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The template's text of the values; TemplateError once it is too long."""
    import jinja2

    parts, characters = [], 0
    for part in template.generate(values):
        characters += len(part)
        if characters > MOST_CHARACTERS:
            raise jinja2.TemplateError(f"it makes a text of more than {MOST_CHARACTERS} characters")
        parts.append(part)
    return "".join(parts)


def limit(what: int, most: int) -> None:
    """Sets a limit of this process, as far as the system lets it; one that is lower already stays."""
    _, hard = resource.getrlimit(what)
    with contextlib.suppress(ValueError):  # macOS refuses one of memory below what is mapped, shared libraries counted
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
