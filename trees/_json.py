"""JSON as every reader of this package wants it: one line of error, and no key silently dropped."""

import json

from draftwood.errors import TreeError


def load_json(text: str, where: str) -> object:
    """The value in `text`; TreeError, beginning with `where`, if it is not JSON or repeats a key."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        value: dict[str, object] = {}
        for key, item in pairs:
            if key in value:
                raise TreeError(f"{where}: the key {key!r} occurs twice in one object; keep one")
            value[key] = item
        return value

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise TreeError(f"{where}: not JSON: {error}; check the file") from error


def expect_format(value: object, form: str, keys: set[str], where: str) -> dict[str, object]:
    """`value` as an object of Draftwood's format `form`, version 1, with exactly `keys` beside the two.

    Raises:
        TreeError: it is something else.
    """
    if not isinstance(value, dict) or value.get("format") != form:
        got = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise TreeError(f"{where}: expected an object with format {form!r}, got {got!r}")
    version = value.get("version")
    if type(version) is not int or version != 1:
        raise TreeError(f"{where}: expected version 1 of {form}, got {version!r}; update Draftwood")
    if set(value) != keys | {"format", "version"}:
        expected, got = sorted(keys | {"format", "version"}), sorted(value)
        raise TreeError(f"{where}: expected the keys {expected}, got {got}")
    return value
