"""The picture of the architecture agrees with the source, and imports run one way."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftwood.errors import RequestError
from draftwood.tests.house import lines
from draftwood.tests.house.architecture import architecture, as_text, columns, described, draw, main
from draftwood.tests.house.imports import circles, modules, room_imports

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "architecture.svg"
REDRAW = "./draft python -m draftwood.tests.house.architecture --out docs/pictures/architecture.svg"

FILES = {
    "__init__.py": "",
    "errors.py": "",
    "trees/topology.py": "from draftwood.errors import TreeError\n\ndef f():\n    import numpy\n    return numpy\n",
    "compiler/steps/draft.py": "from draftwood.trees import topology\nfrom draftwood import errors, __version__\n",
    "runtime/decode.py": "def f():\n    import draftwood.trees.topology\n\n    return 1\n",
    "tools/commands/run.py": "if TYPE_CHECKING:\n    from draftwood.runtime.decode import f\n",
    "tools/commands/build.py": "from draftwood.compiler.steps.draft import g\n",
}
ROOM_IMPORTS = {
    ("trees", "root"): 1,
    ("compiler/steps", "trees"): 1,
    ("compiler/steps", "root"): 1,
    ("compiler/steps", "draftwood"): 1,
    ("runtime", "trees"): 1,
    ("tools/commands", "runtime"): 1,
    ("tools/commands", "compiler/steps"): 1,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for house in ("trees", "kernels", "compiler", "runtime", "tools"):
        (tmp_path / house).mkdir()
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """All but how many imports an arrow stands for: a line more does not make the picture wrong."""
    return found | {"imports": {(importer, imported) for importer, imported, _ in found["imports"]}}


def test_the_picture_shows_what_the_source_imports() -> None:
    assert shown(described(PICTURE.read_text(encoding="utf-8"))) == shown(architecture()), f"draw it anew: {REDRAW}"


def test_imports_are_found_wherever_they_stand(checkout: Path) -> None:
    assert dict(room_imports(modules(checkout))) == ROOM_IMPORTS


def test_circles_are_found() -> None:
    edges = Counter({("a", "b"): 1, ("b", "c"): 2, ("c", "a"): 1, ("c", "d"): 1})
    assert circles(edges) == [["a", "b", "c"]]


def test_columns_follow_the_imports() -> None:
    edges = Counter({("bundle", "steps"): 1, ("steps", "teachers"): 1, ("bundle", "teachers"): 3})
    assert columns(["bundle", "steps", "teachers", "alone"], edges) == [["alone", "teachers"], ["steps"], ["bundle"]]


def test_a_picture_tells_what_it_was_drawn_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, found = tmp_path / "a.svg", tmp_path / "b.svg", architecture()
    assert main(["--out", str(first)]) == 0
    draw(found, second)
    assert capsys.readouterr().out == as_text(found) + "\n"
    assert found == described(first.read_text())
    assert first.read_bytes() == second.read_bytes()
    assert main(["--out", str(tmp_path / "no" / "c.svg")]) == 2


def test_a_picture_that_tells_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="draw it anew"):
        described("<svg/>")


def test_the_text_lists_every_import() -> None:
    found = {"rooms": {"a": "", "b": ""}, "imports": [["a", "b", 2], ["b", "a", 12]]}
    assert as_text(found).splitlines() == ["2 rooms", "   12  b imports a", "    2  a imports b"]


def test_lines_are_counted_without_blank_ones(checkout: Path) -> None:
    found = lines.figures(checkout)
    assert found["rooms"]["trees"] == {"files": 1, "lines": 4}
    assert (found["files"], found["lines"], found["functions"]) == (7, 12, 2)
    assert found["longest_functions"] == [["trees.topology.f", 3], ["runtime.decode.f", 3]]
    assert found["longest_files"][0] == ["trees.topology", 4]


def test_lines_of_no_checkout_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines.main(["--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"draftwood: error: --root {tmp_path}: expected a checkout")


def test_lines_as_text(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines.main(["--root", str(checkout)]) == 0
    assert "tools/commands" in capsys.readouterr().out
