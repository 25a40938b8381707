"""Errors in two families.

DraftwoodError
├── UserError            the input is wrong: one line, exit code 2, no traceback
│   ├── TreeError            a draft tree or a tree file
│   ├── CheckpointError      a teacher or drafter checkpoint
│   ├── BundleError          a bundle: damaged, of another version, or not a bundle
│   ├── LoweringError        a step that the target cannot express
│   ├── RequestError         a prompt, flag or setting
│   │   └── BusyError            a text for which nothing is free now
│   └── NumericError         a model whose output is no number
└── InvariantError       our own promise is broken: keeps its traceback

A message says what, where, expected, got, and the way out.
"""

_LONGEST = 2000  # characters


class DraftwoodError(Exception):
    """Base of everything Draftwood raises on purpose."""


class UserError(DraftwoodError):
    """The input cannot be used as it is; the message is one line that says how to mend it.

    Its quotes of the input cannot break the line, steer a terminal or fill a screen. Control characters are shown as
    escapes, and the middle of a long message is left out.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 300]} ... {text[-300:]}"
        return text if text.isprintable() else "".join(map(_printable, text))


class TreeError(UserError):
    """A draft tree that breaks an invariant, or a tree file that cannot be read."""


class CheckpointError(UserError):
    """A teacher or drafter checkpoint that does not fit the compiler."""


class BundleError(UserError):
    """A bundle that is damaged, incomplete, of another schema version, or not a bundle."""


class LoweringError(UserError):
    """A step that the target of a build cannot express; names operator, step and source line."""


class RequestError(UserError):
    """A prompt, flag or setting that the bundle cannot serve."""


class BusyError(RequestError):
    """A text would have to wait, and the number of waiting texts is at its limit."""


class NumericError(UserError):
    """A model whose logits are not finite: its weights are damaged, or overflow the precision they run in."""


class InvariantError(DraftwoodError):
    """A promise of Draftwood's own code does not hold: a bug, not a user error."""


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
