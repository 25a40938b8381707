"""The demo models that come with the package, and the names they go by."""

from __future__ import annotations

from pathlib import Path

from draftwood.trees import RankPaths

FOLDER = Path(__file__).parent
NAMES = {"demo": FOLDER / "teacher", "demo-medusa": FOLDER / "medusa"}


def resolve(name: str) -> Path:
    """The folder of a shipped model's name; anything else is taken as a path."""
    return NAMES.get(name, Path(name))


def rank_paths(temperature: float = 0.0) -> RankPaths:
    """The rank paths that the demo teacher's own text took through the demo heads' candidates.

    They were counted twice, on greedy text and on text sampled at temperature 0.8.
    """
    path = NAMES["demo-medusa"] / f"rank_paths_{'sampled' if temperature else 'greedy'}.json"
    return RankPaths.from_json(path.read_text(), str(path))
