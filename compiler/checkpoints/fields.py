"""Reading a JSON file field by field, with errors that name the file, the field and the expected value."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from draftwood.errors import CheckpointError
from draftwood.files import read_text

_LARGEST = sys.float_info.max


class IgnoredField(UserWarning):
    """A field that is there, and that nothing reads; transformers warns of it, too."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is missing or something else."""
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected a Hugging Face folder that has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); fetch the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; expected a JSON object")
    return values


@dataclass(frozen=True)
class Fields:
    """A JSON object and the file it came from; null counts as absent, true is not a number.

    Every look-up raises CheckpointError when the value is of another kind, or absent without a default.
    """

    path: Path
    values: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The value, unchecked; the default also replaces null."""
        value = self.values.get(name)
        return default if value is None else value

    def fail(self, name: str, expected: str) -> NoReturn:
        """Refuses the field's value."""
        raise CheckpointError(f"{self.path}: {name} is {self.values.get(name)!r}; expected {expected}")

    def nested(self, name: str) -> Fields:
        """The fields of an object within; none if it is absent."""
        values = self.get(name, {})
        if not isinstance(values, dict):
            self.fail(name, "an object")
        return Fields(self.path, values)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(name, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name, default)
        # Compared, not converted: a whole number of hundreds of digits is no float.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
            self.fail(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, "true or false")
        return value

    def tokens(self, name: str, default: int | None) -> tuple[int, ...]:
        """Token ids, from one id, a list, or null (none); the default is for a field that is left out."""
        value = self.values.get(name, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
            self.fail(name, "a token id, a list of them, or null")
        return tuple(ids)
