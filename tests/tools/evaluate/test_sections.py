"""Every section on a tiny bundle: its rows, what it shows of them, and figures that were worked out by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from draftwood.environment import torch_npu_installed
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools import demo
from draftwood.tools.cli import main
from draftwood.tools.evaluate import bundles, lab, peers
from draftwood.tools.evaluate.noises import NoNoise, OtherNoise, Subset
from draftwood.tools.evaluate.registry import SECTIONS
from draftwood.tools.evaluate.report.contents import contents
from draftwood.tools.evaluate.report.markdown import markdown
from draftwood.tools.evaluate.run import evaluate
from draftwood.tools.evaluate.section import Figure, Table
from draftwood.tools.evaluate.sections import ablations, budget, coupled, exactness, pairs, shapes, steps
from draftwood.tools.evaluate.sections import peers as programs
from draftwood.tools.evaluate.suite import Ask, Suite
from draftwood.tools.measure import w8a8
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration

ONE = {"drafters": ("demo-medusa",), "max_new_tokens": 6, "rounds": 2, "limit": 2}
SUITE = Suite(
    name="all",
    tries=1,
    busy_cores=100.0,
    sections={
        "exactness": Ask(drafters=("demo-medusa",)),
        "coupled": Ask(**ONE, temperatures=(0.8,)),
        "vocabulary": Ask(**ONE),
        "shapes": Ask(**ONE, nodes=(2, 3)),
        "budget": Ask(**ONE, nodes=(2, 3), depths=(1, 2)),
        "bitwise": Ask(**ONE),
        "quantised": Ask(**ONE),
        "steps": Ask(drafters=("demo-medusa",), depths=(1, 2), nodes=(1, 2)),
        "peers": Ask(**ONE),
        "ablations": Ask(**ONE, nodes=(3,)),
        "window": Ask(max_new_tokens=6, rounds=2, limit=1, lengths=(100,), windows=(8, 0)),
    },
)


@pytest.fixture
def all_tiny(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles and counted paths of two levels in the place of the shipped ones; exactness with fewer texts."""
    counted = Calibration()
    for number, path in enumerate([(0, 0), (0, 1), (1,), (0,), (1, 0), (2,), ()] * 3):
        counted.add(path, group=f"text {number}")
    for module in (bundles, lab, shapes, budget, steps, coupled, ablations):
        monkeypatch.setattr(module, "counted", lambda *_, **__: counted)
    for name in ("planned_bundle", "tree_bundle", "windowed_bundle", "bitwise_bundle", "quantised_bundle"):
        monkeypatch.setattr(bundles, name, lambda *_: tiny_bundle)
    monkeypatch.setattr(lab, "TUNE_SECONDS", 0.01)
    for name, value in (("ROWS", (1, 2, 4)), ("TEXT", 20), ("SLOTS", 128)):
        monkeypatch.setattr(w8a8, name, value)
    monkeypatch.setattr(exactness, "TEXTS", 60)
    monkeypatch.setattr(exactness, "STEPS", 6)
    monkeypatch.setattr(peers, "PEERS", {"nobody": ("no_such_package", None), "broken": ("json", broken)})
    monkeypatch.setattr(programs, "PEERS", peers.PEERS)


def broken(model: Path, work: Path, threads: int) -> peers.Generate:
    raise RuntimeError("reads no such checkpoint")


def test_every_section_measures_and_shows(all_tiny: None, tmp_path: Path) -> None:
    rows = evaluate(SUITE, tmp_path / "run", tmp_path / "work").rows
    found = contents(tmp_path / "run")
    assert found.complete and {chapter.section.name for chapter in found.chapters} == set(SUITE.sections)
    keys = {row["key"] for row in rows}
    for block in (block for chapter in found.chapters for block in chapter.blocks):
        if isinstance(block, Table):
            assert block.lines and len(block.lines) == len(block.rows)
            assert all(len(line) == len(block.columns) for line in block.lines)
            assert all(set(held) <= keys and held for held in block.rows)
        elif isinstance(block, Figure):
            assert block.rows and set(block.rows) <= keys
    assert all(row["found"]["failed"] == 0 and row["found"]["cases"] for row in rows if row["section"] == "exactness")
    (missing,) = {tuple(row["found"]["missing"].items()) for row in rows if row["section"] == "peers"}
    why = "cannot open the checkpoint: reads no such checkpoint"
    assert missing == (("nobody", "no export of the checkpoint to it yet"), ("broken", why))
    assert "Missing: nobody" in markdown(found)
    for row in (row for row in rows if row["section"] == "bitwise"):
        ours, theirs = (list(row["found"]["bits"][name].values()) for name in ("bitwise", "ordinary"))
        assert all(kind["rows"] == kind["equal_one"] for kind in ours) and any(kind["rows"] for kind in ours)
        assert any(kind["equal_one"] < kind["rows"] for kind in theirs)


@pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package")
def test_a_whole_step_is_one_launch_that_reads_little(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = tmp_path / "lowered"
    given = ["--model", str(tiny_teacher), "--drafter", str(tiny_heads), "--tree", "backbone:2:3", "--kv", "128"]
    assert main(["build", *given, "--prefill", "16", "--target", "ge", "--one-launch", "--out", str(lowered)]) == 0
    monkeypatch.setattr(bundles, "lowered_bundle", lambda *_: lowered)
    suite = Suite(name="npu", tries=1, busy_cores=100.0, sections={"launches": Ask(drafters=("demo-medusa",))})
    (row,) = evaluate(suite, tmp_path / "run", tmp_path / "work").rows
    steps = row["found"]["steps"]
    assert {step["draws"] for step in steps} == {"greedy", "sampled"} and {step["rows"] for step in steps} == {1, 7}
    assert all(step["launches"] == 1 and step["read_bytes"] < 4096 for step in steps)
    assert all(step["apart"]["launches"] == (3 if step["rows"] > 1 else 2) for step in steps)
    (table,) = SECTIONS["launches"].show([row])
    assert isinstance(table, Table) and len(table.lines) == len(steps) == len(table.rows)


def test_every_section_is_registered_under_its_own_name() -> None:
    assert all(section.name == name and section.question.endswith("?") for name, section in SECTIONS.items())


def test_exactness_catches_a_draw_that_depends_on_the_tree(all_tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "TEXTS", 400)
    monkeypatch.setattr(exactness, "draw", lambda logits_V, sampling, position: int(np.argmax(logits_V)))
    assert exactness.sampler(None, None)["failed"] == len(list(exactness.small_trees(3)))


def test_small_trees_are_all_of_them() -> None:
    assert [tree.paths for tree in exactness.small_trees(1)] == [((0,),), ((1,),)]
    trees = list(exactness.small_trees(3))
    assert len(trees) == len(set(trees)) and max(tree.nodes for tree in trees) == 3
    assert Topology.chain(3) in trees and Topology.from_paths([(0,), (1,), (0, 0)]) in trees


def test_the_chance_of_a_chi_square_is_the_known_one() -> None:
    # Tables: 95 % of 15 degrees of freedom is 24.996.
    assert exactness.chi_square_chance(24.996, 15) == pytest.approx(0.05, abs=1e-4)


def test_a_sweet_spot_is_the_fastest_budget() -> None:
    point = shapes.Point("native", "eagle3", 0.0, "M 16 D 4", 17, 3.0, 2.0, budget_interval(1.5), ["a"])
    slow = dataclasses.replace(point, way="M 64 D 8", tokens_a_step=4.0, ms_a_step=6.0, speedup=budget_interval(0.9))
    said = budget._sweet_spot([slow, point])
    assert "the sweet spot is M = 16, D = 4" in said and "longest accept length has M = 64, D = 8" in said


@pytest.mark.parametrize("drafter", demo.DRAFTERS)
def test_a_budget_ends_where_the_drafter_does(drafter: str) -> None:
    found = dict(budget.trees_of(drafter, Ask(nodes=(16,), depths=(3, 12))))
    assert all(demo.can_draft(drafter, tree) for tree in found.values()) and "M 16 D 3" in found
    assert ("M 16 D 12" in found) == (drafter == "demo-eagle3")


def budget_interval(value: float) -> shapes.Interval:
    return shapes.Interval(value, value, value)


def test_tokens_a_step_are_of_all_texts_and_beside_their_goal() -> None:
    def figures(tokens: int, steps: int) -> dict[str, object]:
        return {"tokens": tokens, "steps": steps, "equal": True}

    ways = [
        {"plain": figures(10, 9), "eagle3 coupled": figures(10, 3), "eagle3 uncoupled": figures(10, 4)},
        {"plain": figures(6, 5), "eagle3 coupled": figures(6, 4), "eagle3 uncoupled": figures(6, 5)},
    ]
    at = {"size": "native", "temperature": 1.0}
    first, second = coupled.lines_of([{"key": f"k{n}", "at": at, "found": {"ways": w}} for n, w in enumerate(ways)])
    assert (first.tokens_a_step.value, second.tokens_a_step.value) == (2.0, 14 / 9)
    assert (first.goal, second.goal, first.same) == (2.55, None, "2 of 2")


def test_drafts_without_the_noise_are_those_of_greedy_text(tiny_draft_bundles: dict[str, Path]) -> None:
    engine = CpuEngine(Bundle.open(tiny_draft_bundles["fasteagle"]), threads=1)
    alone, gear = (
        OtherNoise(engine, NoNoise(engine.bundle)),
        next(gear for gear in engine.bundle.manifest.gears if gear.draft),
    )
    seen: list[bool] = []
    run = engine.drafting._run
    engine.drafting._run = lambda *given: seen.append(bool(given[1]["noise"].any())) or run(*given)
    for one in (engine, alone, engine):
        state = one.begin(gear.slots, Sampling(temperature=1.0, seed=3))
        one.start(state, np.arange(5, 9))
        one.step([state], gear)
    assert seen == [True, False, True]


def test_a_subset_is_all_that_a_drafter_proposes(tiny_draft_bundles: dict[str, Path]) -> None:
    engine, kept = CpuEngine(Bundle.open(tiny_draft_bundles["fasteagle"]), threads=1), np.arange(40, 60)
    gear = next(gear for gear in engine.bundle.manifest.gears if gear.draft)
    proposed = []
    for noise in (engine.drafting.noise, Subset(engine.bundle, kept)):
        state = engine.begin(gear.slots)
        engine.start(state, np.arange(5, 9))
        with engine.drafting.given(noise):
            proposed.append(set(engine.draft([state], gear)[0].tokens_T[1:].tolist()))
    assert proposed[1] <= set(kept.tolist()) and not proposed[0] <= set(kept.tolist())


def test_a_pair_is_compared_by_its_own_plain_texts_and_by_rows() -> None:
    def figures(seconds: float, steps: int) -> dict[str, object]:
        return {"seconds": [seconds], "tokens": 9, "steps": steps, "equal": True}

    turns = [
        {"of": name, "ways": {f"plain {name}": figures(plain, 8), f"{name} tree": figures(tree, 4)}}
        for name, plain, tree in (("fp32", 4.0, 2.0), ("w8a8", 2.0, 0.5))
    ]
    at = {"size": "native", "drafter": "demo-medusa", "temperature": 0.0}
    ms = {"fp32": {"1": 2.0, "4": 3.0}, "w8a8": {"1": 1.0, "4": 2.0}}
    rows = [{"key": "a", "at": at, "found": {"turns": turns, "step_ms": ms}}]
    table = pairs.steps_table(rows, ("fp32", "w8a8"))
    first, second = pairs.texts_table(rows, ("fp32", "w8a8"), "").lines
    assert first[4:9] == ["1 of 1", 0, 2.0, 4.0, 2.0] and [one.value for one in second[9:]] == [4.0, 2.0]
    assert list(table.lines) == [["native", 1, 2.0, 1.0, 0.5, 1.0, 1.0], ["native", 4, 3.0, 2.0, 0.667, 1.5, 2.0]]
