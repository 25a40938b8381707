"""The format of a bundle's manifest as JSON Schema: ``python -m draftwood.tests.house.schema [--out FILE]``.

It is made from the structs that read a manifest, so a reader refuses all that it refuses. A reader refuses more, since
it also compares the parts of a manifest with each other and with the files.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from draftwood.errors import RequestError
from draftwood.manifest import SCHEMA_VERSION, Manifest
from draftwood.tests.house.script import refusing


def manifest_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of ``manifest.json``."""
    schema = json.loads(json.dumps(msgspec.json.schema(Manifest)))  # tuples become lists
    for struct in schema["$defs"].values():
        struct["description"] = inspect.cleandoc(struct["description"])
    schema["$defs"]["Manifest"]["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"manifest.json of a Draftwood bundle, schema version {SCHEMA_VERSION}",
        **schema,
    }


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftwood.tests.house.schema", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there (default: print it)")
    args = parser.parse_args(argv)
    text = json.dumps(manifest_schema(), indent=1) + "\n"
    if args.out is None:
        print(text, end="")
        return 0
    try:
        args.out.write_text(text)
    except OSError as error:
        raise RequestError(f"--out {args.out}: cannot be written: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
