"""A bundle of a plan has the plan's gears and no others, and the plan's knowledge."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import TreeError
from draftwood.planned import LengthEase, Prior
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, Gears, Learned, Policies
from draftwood.runtime.policy.gains import Ease
from draftwood.runtime.trace import Trace
from draftwood.tools.commands.build import counted_for_another, gears_of, lengths
from draftwood.tools.show.gear_figures import gear_figures, gear_rows
from draftwood.trees.calibration import Calibration
from draftwood.trees.latency import LatencyEntry, LatencyTable
from draftwood.trees.plan import make_plan
from draftwood.trees.plan_file import Limits, Plan, format_plan
from draftwood.trees.spec import Specs, read_specs


def counted(seed: int, accuracy: float) -> Calibration:
    """Contexts of two levels; half of them are mostly right."""
    source, found = random.Random(seed), Calibration()
    for i in range(3000):
        sure = source.random() < 0.5
        path: list[int] = []
        while len(path) < 2 and source.random() < (0.95 if sure else accuracy):
            best = sure and source.random() < accuracy + 0.35
            path.append(0 if best else min(int(source.expovariate(0.8)), 3))
        found.add(path, group=f"text {i % 40}", context=source.randint(0, 220))
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    steps = {128: ((1, 10.0), (4, 11.0), (8, 11.5)), 256: ((1, 14.0), (4, 15.0), (8, 25.0))}
    entries = [
        LatencyEntry(kind="verify", rows=rows, slots=slots, seconds=s / 1000, parts={"all": s / 1000})
        for slots, found in steps.items()
        for rows, s in found
    ]
    table = LatencyTable(source="modelled", entries=tuple(entries))
    return make_plan(counted(1, 0.6), Limits(nodes=7, gears=4), table, counted(2, 0.2))


@pytest.fixture(scope="module")
def specs(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Specs:
    file = tmp_path_factory.mktemp("plan") / "my.plan"
    file.write_text(format_plan(plan))
    return read_specs(f"plan:{file}")


@pytest.fixture(scope="module")
def planned_bundle(
    specs: Specs, tiny_teacher: Path, tiny_heads: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    folder = tmp_path_factory.mktemp("planned") / "bundle"
    slots = tuple(sorted({gear.slots for gear in specs.gears}))
    planned = {"trees": specs.trees, "gears": specs.gears, "plan": specs.plan}
    request = BuildRequest(model=tiny_teacher, drafter=tiny_heads, slots=slots, prefill_rows=(), **planned)
    build(request, folder)
    return Bundle.open(folder)


def test_the_gears_are_the_plans(plan: Plan, planned_bundle: Bundle) -> None:
    topologies = {tree.name: tree.topology for tree in plan.trees}
    wanted = {(topologies[gear.tree], gear.slots) for gear in plan.gears if topologies[gear.tree].nodes}
    drafting = [gear for gear in planned_bundle.manifest.gears if gear.draft]
    found = {(planned_bundle.trees[gear.tree][0], gear.slots) for gear in drafting}
    assert found == wanted and len(drafting) == len(wanted) >= 2
    assert len({gear.slots for gear in drafting}) == 2


def test_plain_decoding_is_at_every_length_and_no_graph_is_left_over(planned_bundle: Bundle) -> None:
    manifest = planned_bundle.manifest
    lengths = {gear.slots for gear in manifest.gears}
    assert [gear.slots for gear in manifest.gears if gear.tree == "plain"] == sorted(lengths)
    used = {gear.graph for gear in manifest.gears}
    assert {graph.name for graph in manifest.graphs_of("onnx") if graph.kind in ("decode", "verify")} == used


def test_the_manifest_knows_what_the_plan_knew(plan: Plan, planned_bundle: Bundle) -> None:
    planning = planned_bundle.manifest.planning
    assert planning is not None and planning == plan.planning and planning.sampled is not None
    assert {time.gear for time in planning.times} == {gear.name for gear in planned_bundle.manifest.gears}
    learned = Learned(Gears.of(planned_bundle))
    assert learned.times(1).absolute
    eases = [Ease(learned.gains[greedy, False]) for greedy in (True, False)]
    for gear in learned.gears.gears:
        if gear.draft:
            tokens = [ease.tokens(gear.tree) for ease in eases]
            assert tokens[0] > 1.1 * tokens[1]
            (name,) = (planned.tree for planned in plan.gears if planned.name == gear.name)
            (promised,) = (tree.promise.counted.tokens for tree in plan.trees if tree.name == name)
            # Both sampling classes together; they have equally many contexts.
            assert sum(tokens) / 2 == pytest.approx(promised, rel=0.1)


def test_a_planned_bundle_decodes_the_same_text(planned_bundle: Bundle) -> None:
    engine, trace = CpuEngine(planned_bundle), Trace()
    prompt, options = list(range(5, 25)), Options(max_new_tokens=300, ignore_eos=True)
    plain = Decoding(engine, prompt, options, FixedTree(planned_bundle)).run()
    policy = Policies(planned_bundle).new(greedy=True, max_new_tokens=128)
    text = Decoding(engine, prompt, options, policy, trace).run()
    assert text.token_ids == plain.token_ids
    assert {event.gear for event in trace.events if event.kind == "verify"}
    assert trace.events[1].expected_us is not None


def test_a_plan_with_lengths_stands_alone(specs: Specs, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "my.plan").write_text(format_plan(plan))
    with pytest.raises(TreeError, match="stands alone"):
        read_specs(f"chain:2,plan:{tmp_path / 'my.plan'}")


def test_a_plan_without_lengths_gives_trees_and_what_was_counted(tmp_path: Path) -> None:
    (tmp_path / "my.plan").write_text(format_plan(make_plan(counted(1, 0.6), Limits(nodes=3, gears=2))))
    specs = read_specs(f"plan:{tmp_path / 'my.plan'}")
    assert specs.gears == () and specs.plan is not None
    planning = specs.plan
    assert planning.times == () and planning.sampled is None and planning.greedy.reached


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([(256, 0.5), (0, 0.5)], r"expected ascending numbers of tokens, got \[256, 0\]"),
        ([(-1, 0.5)], "expected ascending numbers of tokens"),
        ([(0, float("nan"))], "expected log-odds"),
    ],
)
def test_eases_by_length_that_are_none_are_refused(lengths: list[tuple[int, float]], said: str) -> None:
    own = tuple(LengthEase(tokens=n, ease=ease) for n, ease in lengths)
    with pytest.raises(ValueError, match=said):
        Prior(reached={}, first=0.5, lengths=own)


def test_step_times_of_gears_that_are_not_built_are_left_out(specs: Specs, tiny_teacher: Path) -> None:
    gears = tuple(gear for gear in specs.gears if gear.slots == 128)
    request = BuildRequest(
        model=tiny_teacher, drafter=None, trees=specs.trees, slots=(128,), gears=gears, plan=specs.plan
    )
    assert specs.plan is not None and request.planning is not None
    assert {time.gear for time in specs.plan.times} > {time.gear for time in request.planning.times}
    assert {time.gear for time in request.planning.times} == {gear.name for gear in gears}


def test_a_plan_that_was_counted_with_other_models_is_told_of(tmp_path: Path) -> None:
    calibration, file = counted(1, 0.6), tmp_path / "plan"
    manifest: Any = SimpleNamespace(teacher=SimpleNamespace(digest="a"), drafter=SimpleNamespace(digest="b"))
    for models, others in (
        ({}, []),
        ({"teacher": "a", "drafter": "b"}, []),
        ({"teacher": "a", "drafter": "c"}, ["drafter"]),
    ):
        calibration.models = models
        file.write_text(format_plan(make_plan(calibration, Limits(nodes=3))))
        assert counted_for_another(read_specs(f"plan:{file}"), manifest) == others


def test_inspect_tells_what_each_gear_is_for(
    plan: Plan, planned_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was tuned here
    found = gear_figures(planned_bundle, "cpu")
    assert [one["gear"] for one in found] == [gear.name for gear in planned_bundle.manifest.gears]
    for one in found:
        assert one["timed"] == "the plan" and one["step_ms"] > 0
        assert one["longest_text"] == one["slots"] - 1 - one["rows"]
        assert one["tokens_greedy"] >= 1 and (one["tokens_greedy"] > 1) == (one["rows"] > 1)
    assert all(len(row) == len(gear_rows(found)[0]) for row in gear_rows(found))


def test_a_plan_for_several_texts_asks_for_their_graphs_and_for_no_others(tmp_path: Path) -> None:
    """At the plan's KV lengths, and at others."""
    entries = tuple(
        LatencyEntry(kind="verify", rows=rows, slots=128, seconds=s, parts={"all": s}, texts=texts)
        for texts in (1, 3)
        for rows, s in ((1, 0.01), (4, 0.011))
    )
    calibration = Calibration()
    for _ in range(9):
        calibration.add((0, 0), group="text 0")
    plan = make_plan(calibration, Limits(nodes=3), LatencyTable(source="modelled", entries=entries))
    (tmp_path / "plan").write_text(format_plan(plan))
    specs = read_specs(f"plan:{tmp_path / 'plan'}")
    for kv in (None, "256"):
        gears = gears_of(specs, kv)
        request = BuildRequest(model=tmp_path, drafter=None, trees=specs.trees, slots=lengths(specs, kv), gears=gears)
        assert request.shapes.batches == (3,) and {gear.texts for gear in gears} == {(1, 3)}
