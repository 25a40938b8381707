"""Every section on a tiny bundle: its rows, what it shows of them, and figures that were worked out by hand."""

import dataclasses
from pathlib import Path

import pytest

from draftwood.tests.other_programs import broken, crashing, echoing
from draftwood.tools import demo
from draftwood.tools.lab import bundles, opened, peers, served
from draftwood.tools.lab.registry import SECTIONS
from draftwood.tools.lab.report.contents import contents
from draftwood.tools.lab.report.markdown import markdown
from draftwood.tools.lab.rows import differences
from draftwood.tools.lab.run import evaluate
from draftwood.tools.lab.section import Table
from draftwood.tools.lab.sections import budget, service, shapes, steps
from draftwood.tools.lab.sections import peers as programs
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.trees.calibration import Calibration

ONE = {"drafters": ("demo-medusa",), "max_new_tokens": 6, "rounds": 2, "limit": 2}
SUITE = Suite(
    name="all",
    tries=1,
    busy_cores=100.0,
    sections={
        "shapes": Ask(**ONE, nodes=(2, 3)),
        "budget": Ask(**ONE, nodes=(2, 3), depths=(1, 2)),
        "steps": Ask(drafters=("demo-medusa",), depths=(1, 2), nodes=(1, 2)),
        "batches": Ask(**ONE, texts=(2, 4)),
        "service": Ask(**ONE, texts=(1, 2), lengths=(8,)),
        "peers": Ask(**ONE, precisions=("nbits", "w8a8"), temperatures=(0.0, 0.8)),
        "ablations": Ask(**ONE),
        "window": Ask(max_new_tokens=6, rounds=2, limit=1, lengths=(100,), windows=(8, 0)),
    },
)


@pytest.fixture
def all_tiny(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles and counted paths of two levels in the place of the shipped ones."""
    counted = Calibration()
    for number, path in enumerate([(0, 0), (0, 1), (1,), (0,), (1, 0), (2,), ()] * 3):
        counted.add(path, group=f"text {number}")
    for module in (bundles, opened, shapes, budget, steps):
        monkeypatch.setattr(module, "counted", lambda *_, **__: counted)
    for name in ("planned_bundle", "tree_bundle", "windowed_bundle"):
        monkeypatch.setattr(bundles, name, lambda *_: tiny_bundle)
    monkeypatch.setattr(opened, "TUNE_SECONDS", 0.01)
    known = {"nobody": ("no_such_package", broken), "broken": ("json", broken), "crashing": ("json", crashing)}
    known["llama.cpp lookup"] = "json", echoing
    monkeypatch.setattr(service, "LEAST", 3)
    for module in (peers, programs):
        monkeypatch.setattr(module, "PEERS", known)
    monkeypatch.setattr(programs, "compiled_with", lambda: "AVX2")


def test_every_section_measures_and_shows(all_tiny: None, tmp_path: Path) -> None:
    rows = evaluate(SUITE, tmp_path / "run", tmp_path / "work").rows
    found = contents(tmp_path / "run")
    assert found.complete and {chapter.section.name for chapter in found.chapters} == set(SUITE.sections)
    for block in (block for chapter in found.chapters for block in chapter.blocks):
        if isinstance(block, Table):
            assert block.lines and all(len(line) == len(block.columns) for line in block.lines)
    alone, both = (row["found"] for row in rows if row["section"] == "service")
    assert list(alone["rounds"]) == ["draftwood serve", "draftwood.open"] and list(both["rounds"]) == [
        "draftwood serve"
    ]
    assert [len(one["first_ms"]) for one in both["rounds"]["draftwood serve"]] == [8, 8] and len(alone["held"]) == 3
    (missing,) = {tuple(row["found"]["missing"].items()) for row in rows if row["section"] == "peers"}
    why = "cannot open the checkpoint: reads no such checkpoint"
    crashed = "ends its process before its first token, as a segmentation fault does"
    absent = "not installed: pip install 'draftwood[peers]'"
    assert missing == (("nobody", absent), ("broken", why), ("crashing", crashed))
    assert "Missing: nobody" in markdown(found)
    (chapter,) = (one for one in found.chapters if one.section.name == "peers")
    programs, over, compiled, _ = chapter.blocks
    assert compiled == "llama.cpp was compiled with AVX2."
    assert not list(differences(rows))
    ours = [f"draftwood {form} {way}" for form in ("nbits", "w8a8") for way in ("plain", "medusa tree")]
    assert [line[2] for line in programs.lines] == 2 * [*ours, "llama.cpp lookup"]
    assert all(line[4] == "2 of 2" for line in programs.lines if line[2] in ours)
    assert ("draftwood nbits plain", "draftwood w8a8 plain") in {(line[2], line[3]) for line in over.lines}
    assert {line[3] for line in over.lines if line[2].endswith("tree")} == {"llama.cpp lookup"}


def test_llama_server_without_its_files_writer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.shutil, "which", lambda _: "/bin/llama-server")
    monkeypatch.setattr(served.importlib.util, "find_spec", lambda _: None)
    assert served.why_missing() == "llama-server: its files want a package: pip install gguf"


def test_a_text_of_ours_that_differs_beside_other_programs_is_a_difference() -> None:
    programs = {"draftwood plain": {"equal": True}, "draftwood tree": {"equal": False}, "echo": {"agree": 0}}
    (found,) = differences([{"key": "peers/0", "section": "peers", "found": {"programs": programs}}])
    assert found == {"tie": False, "key": "peers/0", "way": "draftwood tree"}


def test_every_section_is_registered_under_its_own_name() -> None:
    assert all(section.name == name and section.question.endswith("?") for name, section in SECTIONS.items())


def test_a_sweet_spot_is_the_fastest_budget() -> None:
    point = shapes.Point("native", "eagle3", 0.0, "M 16 D 4", 17, 3.0, 2.0, budget_interval(1.5))
    slow = dataclasses.replace(point, way="M 64 D 8", tokens_a_step=4.0, ms_a_step=6.0, speedup=budget_interval(0.9))
    said = budget._sweet_spot([slow, point])
    assert "the sweet spot is M = 16, D = 4" in said and "longest accept length has M = 64, D = 8" in said


@pytest.mark.parametrize("drafter", demo.DRAFTERS)
def test_a_budget_ends_where_the_drafter_does(drafter: str) -> None:
    found = dict(budget.trees_of(drafter, Ask(nodes=(16,), depths=(3, 12)), Suite(name="a", sections={})))
    assert all(demo.can_draft(drafter, tree) for tree in found.values()) and "M 16 D 3" in found
    assert ("M 16 D 12" in found) == (drafter == "demo-eagle3")


@pytest.mark.parametrize("drafter", demo.DRAFTERS)
def test_a_tree_that_is_deeper_than_the_drafter_is_left_out(drafter: str) -> None:
    found = dict(shapes.trees_of(drafter, Ask(nodes=(7, 63)), Suite(name="a", sections={})))
    assert all(demo.can_draft(drafter, tree) for tree in found.values()) and {"plain", "binary 7"} < set(found)
    assert ("binary 63" in found) == (drafter in ("demo-eagle3", "demo-dspark"))  # six levels


def budget_interval(value: float) -> shapes.Interval:
    return shapes.Interval(value, value, value)
