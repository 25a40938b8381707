"""Results of `draftwood check` on a bundle."""

import json
from pathlib import Path
from typing import Any

from draftwood.tools.cli import main


def checked(folder: Path, engine: str = "", code: int = 0) -> dict[str, Any]:
    """Runs the command, which has to end with ``code``; the report that it leaves in the bundle."""
    assert main(["check", str(folder), *(("--engine", engine) if engine else ())]) == code
    return json.loads((folder / (f"check-{engine}.json" if engine else "check.json")).read_text())
