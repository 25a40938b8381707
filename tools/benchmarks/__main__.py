"""``python -m draftwood.tools.benchmarks evaluate|report``, with the exit codes of ``draftwood``."""

import sys

from draftwood.tools import cli

PROGRAM = cli.Program(
    "python -m draftwood.tools.benchmarks",
    "Repeats what papers measured, and races other programs on the same texts.",
    "draftwood.tools.benchmarks",
    {
        "evaluate": "measure a suite: exactness, speed and every experiment, into a folder that can be resumed",
        "report": "write what evaluate measured as Markdown: tables and pictures",
    },
)


def main(words: list[str] | None = None) -> int:
    return cli.main(sys.argv[1:] if words is None else words, PROGRAM)


if __name__ == "__main__":
    sys.exit(cli.main(None, PROGRAM))
