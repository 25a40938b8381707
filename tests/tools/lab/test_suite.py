"""The shipped suites, and what they ask for."""

from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.tools import demo
from draftwood.tools.lab import bundles
from draftwood.tools.lab.conversations import by_conversation
from draftwood.tools.lab.registry import SECTIONS
from draftwood.tools.lab.run import tasks_of
from draftwood.tools.lab.suite import FOLDER, read_suite
from draftwood.tools.prompts import Prompt
from draftwood.trees import Topology


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_a_shipped_suite_asks_for_tasks_of_their_own_names(name: str) -> None:
    suite = read_suite(name, SECTIONS)
    tasks = tasks_of(suite)
    assert suite.name == name and len({task.key for task in tasks}) == len(tasks) > 20
    assert all(task.section in SECTIONS for task in tasks)


def test_the_paper_has_every_section_that_is_installed() -> None:
    assert set(read_suite("paper", SECTIONS).sections) == set(SECTIONS)


def test_sections_and_prompts_take_the_place_of_a_suites() -> None:
    suite = read_suite("paper", SECTIONS).only(("turns", "window"), ["mine.jsonl", "sums=s.jsonl"])
    assert list(suite.sections) == ["turns", "window"] and suite.sections["turns"].limit == 12
    assert read_suite("cells", SECTIONS).sections["lengths"].limit_of("500m") == 1
    assert suite.prompts == (str(Path("mine.jsonl").resolve()), f"sums={Path('s.jsonl').resolve()}")
    with pytest.raises(RequestError, match="--sections nope"):
        suite.only(("nope",), ())


def test_a_limit_takes_from_every_source_evenly() -> None:
    prompts = [
        Prompt(id=f"{source}{n}/{turn}", text="x", conversation=f"{source}{n}", source=source)
        for source in "ab"
        for n in range(6)
        for turn in (1, 2)
    ]
    found = by_conversation(prompts, 5)
    assert [turns[0].conversation for turns in found] == ["a0", "a2", "a4", "b0", "b3"]
    assert all(len(turns) == 2 for turns in found) and len(by_conversation(prompts, None)) == 12


def test_kv_lengths_reach_the_longest_text() -> None:
    assert bundles.kv_lengths(200) == (1024,) and bundles.kv_lengths(4160) == (1024, 4224)


def test_one_built_tree_stands_for_all_of_a_drafter_that_ranks_levels() -> None:
    trees = (("plain", Topology.plain()), ("chain", Topology.chain(4)), ("wide", Topology.from_paths([(9,), (2,)])))
    _, tree = bundles.largest(trees)
    assert tree.rows >= 5 and tree.depth == 4 and tree.width >= 10
    assert bundles.distinct((*trees, ("again", Topology.chain(4)))) == trees


@pytest.mark.parametrize("drafter", demo.DRAFTERS)
def test_a_drafter_that_follows_nodes_has_every_tree_built(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft graph of its own for each: another tree's would not fit."""
    asked: dict = {}
    monkeypatch.setattr(bundles, "_build", lambda *_, **given: asked.update(given))
    trees = (("plain", Topology.plain()), ("chain-2", Topology.chain(2)), ("star-3", Topology.full((3,))))
    bundles.tree_bundle("native", drafter, 64, trees, tmp_path, print)
    own = drafter in ("demo-eagle3", "demo-dspark")
    assert [name for name, _ in asked["trees"]] == (["plain", "chain-2", "star-3"] if own else ["plain", "largest"])
