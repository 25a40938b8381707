"""``draftwood profile``: the timed steps and their state, the written table, the refusals."""

import argparse
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from draftwood.errors import UserError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import choice
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.tests.conftest import TINY
from draftwood.tests.random_models import save_eagle3
from draftwood.tools.cli import main
from draftwood.tools.commands import profile as profile_command
from draftwood.tools.measure import profile
from draftwood.trees import Topology, tensorize, violations
from draftwood.trees.latency import LatencyTable


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "VISIT_SECONDS", 0.0)
    monkeypatch.setattr(profile, "HOST_TOKENS", 8)
    monkeypatch.setattr(profile, "LEAST_ROUNDS", 2)


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    profile_command.add_arguments(parser)
    return profile_command.main(parser.parse_args([str(argument) for argument in arguments]))


def test_a_bundle_is_measured(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    assert run(tiny_bundle, "--rows", "2,12", "--out", out) == 0
    assert "round 2 of at least 2" in capsys.readouterr().err
    table = LatencyTable.from_json(out.read_text(), str(out))
    assert (table.source, table.kv_read, table.slots) == ("measured", "filled", (128, 256))
    # Trees of 1, 3 and 7 rows, one more inside the bundle's buffers and one past them.
    assert all(table.rows(slots) == (1, 2, 3, 7, 12) for slots in table.slots)
    steps = [entry for entry in table.entries if entry.kind in ("decode", "verify")]
    assert all(entry.samples == 2 * profile.STEPS and entry.seconds > 0 for entry in steps)
    assert {(entry.slots, entry.filled) for entry in steps} == {(128, 64), (256, 128)}
    assert table.draft_s(2, 3) > 0 and table.host_s() > 0
    assert table.machine["threads"] >= 1 and table.drafter["kind"] == "medusa"
    assert table.teacher["digest"] == Bundle.open(tiny_bundle).manifest.teacher.digest


@pytest.mark.parametrize("by", ["bitwise", "cpu"])
def test_the_engine_that_decodes_from_a_bundle_times_its_steps(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Trees that branch over rows in int8 are decoded by the bitwise engine, whose steps take longer."""
    monkeypatch.setattr(choice, "default_engine", lambda bundle: by)
    ran: set[bool] = set()
    honest = CpuEngine.verify
    monkeypatch.setattr(CpuEngine, "verify", lambda self, *given: ran.add(self.bitwise) or honest(self, *given))
    out = tmp_path / "l.json"
    assert run(tiny_bundle, "--kv", "128", "--out", out) == 0
    assert ran == {by == "bitwise"} and LatencyTable.from_json(out.read_text()).machine["engine"] == by


def test_the_table_is_shown_to_people(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny_bundle, "--kv", "128", "--out", tmp_path / "l.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured on ") and lines[1].split() == ["rows", "kv", "128"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "3", "7"]
    assert lines[5].startswith("draft of width 10, by depth 2: ") and lines[6].startswith("host ")


def test_steps_are_timed_in_the_state_of_a_real_text(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half the KV length filled, after a commit of the last tree, and with the tree's own mask."""
    engine = CpuEngine(Bundle.open(tiny_bundle))
    subjects = profile._subjects(engine, set(), 256)
    states: dict[int, list[int]] = defaultdict(list)
    verify = engine.verify

    def seen(given, drafts):  # type: ignore[no-untyped-def]
        (state,), (draft,) = given, drafts
        states[draft.tree.rows].append(state.length)
        assert not violations(draft.tree) and draft.tree.mask.sum() == (draft.tree.depths + 1).sum()
        return verify(given, drafts)

    monkeypatch.setattr(engine, "verify", seen)
    times = profile.Times()
    for subject in subjects:
        profile._visit(engine, subject, times)
        subject.states[0].check()
    assert states[1] == [128 + step for step in range(5)]
    assert states[7] == [128 + 2 * step for step in range(5)]  # the ragged tree of 7 rows commits the root and row 3
    assert {key: len(samples) for key, samples in times.steps.items()} == {(1, r, 256, 128): 4 for r in (1, 3, 7)}
    assert len(times.drafts[1, 2, 10]) == 2 * 4  # plain decoding drafts nothing


def test_every_draft_of_its_own_is_timed(tiny_draft_bundles: dict[str, Path]) -> None:
    """Also if two trees have equally many rows: what no entry of a table offers is never planned."""
    engine = CpuEngine(Bundle.open(tiny_draft_bundles["eagle3"]))
    subjects = profile._subjects(engine, {7, 9}, 128)
    assert [subject.topology.rows for subject in subjects] == [1, 7, 7, 9]
    drafted = {(subject.topology.depth, subject.topology.width) for subject in subjects if subject.gear}
    assert drafted == {(3, 2), (3, 3)}


def test_texts_that_share_a_launch_are_timed_together(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In real launches of several texts, for every tree and KV length; plans read them, and people."""
    sizes: list[int] = []
    honest = CpuEngine.verify

    def seen(engine, states, drafts):  # type: ignore[no-untyped-def]
        sizes.append(len(states))
        assert all(not violations(draft.tree) for draft in drafts)
        return honest(engine, states, drafts)

    monkeypatch.setattr(CpuEngine, "verify", seen)
    out = tmp_path / "profile.json"
    assert run(tiny_bundle, "--batch-size", "2,3", "--out", out) == 0
    table = LatencyTable.from_json(out.read_text(), str(out))
    assert table.texts == (1, 2, 3) and set(sizes) == {1, 2, 3}
    for texts in table.texts:
        assert all(table.rows(slots, texts) == (1, 3, 7) for slots in (128, 256))
        own = [entry for entry in table.entries if entry.texts == texts]
        assert all(entry.samples == 2 * profile.STEPS for entry in own if entry.kind in ("decode", "verify"))
        assert table.draft_s(2, 3, texts) > 0 and table.host_s(texts) > 0
    assert table.step_s(7, 256, 3) > table.step_s(1, 256, 1)
    assert "3 texts a launch" in capsys.readouterr().out


def test_a_long_visit_ends_where_the_cache_is_full(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "VISIT_SECONDS", 1e6)
    engine = CpuEngine(Bundle.open(tiny_bundle))
    plain, _, ragged = profile._subjects(engine, set(), 128)
    times = profile.Times()
    profile._visit(engine, plain, times)
    assert plain.states[0].length == 127  # every slot but the spare one
    profile._visit(engine, ragged, times)
    assert not ragged.states[0].kv.room(7) and ragged.states[0].length <= 127
    # 63 steps of one token and 29 of two, the first of each not counted.
    assert {rows: len(samples) for (_, rows, _, _), samples in times.steps.items()} == {1: 62, 7: 28}


def test_every_round_visits_every_shape_in_another_order(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CpuEngine(Bundle.open(tiny_bundle))
    subjects = [s for slots in (128, 256) for s in profile._subjects(engine, {2, 5}, slots)]
    visits: list[tuple[int, int] | None] = []
    monkeypatch.setattr(profile, "_visit", lambda _, s, __: visits.append((s.tree.rows, s.states[0].slots)))
    monkeypatch.setattr(profile, "_host_seconds", lambda *_: visits.append(None) or 0.0)
    profile._time([engine], [subjects], rounds=3)
    rounds = [visits[at : at + 11] for at in range(0, len(visits), 11)]
    assert len(rounds) == 4  # one of them to warm up
    everything = {None, *((rows, slots) for rows in (1, 2, 3, 5, 7) for slots in (128, 256))}
    assert all(set(one) == everything for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_warm_up_is_not_counted(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CpuEngine(Bundle.open(tiny_bundle))
    counted: list[object] = []
    monkeypatch.setattr(profile, "_visit_all", lambda engines, visits, times, order: counted.append(times[0]))
    (times,) = profile._time([engine], [profile._subjects(engine, set(), 128)], rounds=2)
    assert counted[0] is not times and counted[1:] == [times, times]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 21, 64])
def test_bushy_trees(rows: int) -> None:
    tree = profile.bushy(rows)
    assert tree.rows == rows and not violations(tensorize(tree)) and tree.width <= 4
    assert all(len(tree.children(row)) == 4 for row in range((rows - 1) // 4))


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (Topology.plain(), (0,)),
        (Topology.chain(4), (0, 1, 2)),  # a chain has no other path
        (Topology.full((4, 3, 2)), (0, 4, 16)),  # depth 3: two levels, the last row of each
        (Topology.from_paths([(0,), (1,), (0, 0)]), (0, 2)),
    ],
)
def test_the_committed_path_goes_half_way_down_and_lies_scattered(tree: Topology, path: tuple[int, ...]) -> None:
    assert profile.committed_path(tree) == path


def test_quartiles_surround_the_median() -> None:
    entry = profile._entry("host", [random.Random(0).random() for _ in range(9)])
    assert entry.quartiles and entry.quartiles[0] <= entry.seconds <= entry.quartiles[1] and entry.samples == 9
    known = profile._entry("host", [5e-3, 1e-3, 2e-3, 4e-3, 3e-3])
    assert (known.quartiles, known.seconds) == ((2e-3, 4e-3), 3e-3)


@pytest.fixture
def tiny_config(tiny_teacher: Path, tmp_path: Path) -> Path:
    """A teacher without weights: its configuration alone."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_teacher / "config.json").read_text())
    return folder


def test_an_absent_device_is_modelled_from_the_configuration_alone(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "npu.json"
    options = [tiny_config, "--device", "ascend-910b3", "--drafter", "eagle3:200", "--kv", "128,256"]
    assert run(*options, "--out", out) == 0
    first = out.read_bytes()
    assert run(*options, "--out", out) == 0 and out.read_bytes() == first
    table = LatencyTable.from_json(out.read_text(), str(out))
    assert (table.source, table.machine["soc"], table.slots) == ("modelled", "Ascend910B3", (128, 256))
    assert table.rows(256) == tuple(range(1, 65)) and table.drafter["vocabulary"] == 200
    assert {entry.rows for entry in table.entries if entry.kind == "prefill"} == {32, 128}
    text = capsys.readouterr().out
    assert "modelled on ascend-910b3" in text and "no figure of this table was taken on a device" in text


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("medusa:3", {"kind": "medusa", "levels": 3, "tied": False}),
        ("medusa:3:tied", {"kind": "medusa", "levels": 3, "tied": True}),
        ("eagle3", {"kind": "eagle3", "vocabulary": 300}),
        ("fasteagle:4", {"kind": "fasteagle", "layers": 4, "vocabulary": 300}),
        ("fasteagle:4:90", {"kind": "fasteagle", "layers": 4, "vocabulary": 90, "heads": None}),
        ("fasteagle:4:90:2:1:20", {"vocabulary": 90, "heads": 2, "kv_heads": 1, "intermediate": 20}),
    ],
)
def test_drafters_to_model(tiny_config: Path, spec: str, facts: dict[str, object]) -> None:
    assert facts.items() <= profile_command.parse_drafter(spec, tiny_config)[0].facts.items()


def test_a_folder_of_heads_is_read(tiny_teacher: Path, tiny_heads: Path) -> None:
    facts = profile_command.parse_drafter(str(tiny_heads), tiny_teacher)[0].facts
    assert (facts["levels"], facts["blocks"], facts["tied"]) == (2, 1, True)


def test_drafters_of_a_teacher_without_weights(tiny_config: Path, tiny_heads: Path, tiny_eagle3: Path) -> None:
    """A model of a step reads sizes alone, also those of a drafter's folder."""
    for name, folder in (("medusa", tiny_heads), ("eagle3", tiny_eagle3)):
        assert profile_command.parse_drafter(str(folder), tiny_config)[0].facts["kind"] == name
    assert profile_command.parse_drafter("shape:medusa-5", tiny_config)[0].facts["levels"] == 5


def test_a_folder_of_a_cascade_is_read(tiny_teacher: Path, tiny_drafters: dict[str, Path]) -> None:
    """Its layers' own widths count, not the teacher's."""
    folder = tiny_drafters["fasteagle"]
    facts = profile_command.parse_drafter(str(folder), tiny_teacher)[0].facts
    config = json.loads((folder / "config.json").read_text())
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "draft_vocab_size")
    assert [facts[name] for name in ("layers", "heads", "kv_heads", "intermediate", "vocabulary")] == [
        config[name] for name in names
    ]


def test_a_drafters_blocks_have_the_sizes_of_its_folder(tiny_config: Path, tiny_eagle3: Path, tmp_path: Path) -> None:
    """Every kind's, in its cost and in what ranks can share."""
    widths = {"intermediate_size": 8192, "num_attention_heads": 3, "num_key_value_heads": 1}
    sizes = save_eagle3(tmp_path / "wide", TINY | widths)
    options = [tiny_config, "--device", "ascend-910b3", "--kv", "128", "--rows", "1"]
    drafts = []
    for folder in (tiny_eagle3, sizes):
        assert run(*options, "--drafter", folder, "--out", tmp_path / "table.json") == 0
        drafts.append(LatencyTable.from_json((tmp_path / "table.json").read_text()).draft_s(1, 1))
    assert drafts[1] > drafts[0]
    with pytest.raises(UserError, match="the drafter has 3 query and 1 key/value heads"):
        run(*options, "--drafter", sizes, "--ranks", 2, "--out", tmp_path / "ranks.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["BUNDLE", "--device", "ascend-910b3"], "a teacher is modelled"),
        (["BUNDLE", "--batch-size", "8"], "has graphs for at most 4"),
        (["BUNDLE", "--kv", "x"], "--kv x"),
        (["BUNDLE", "--kv", "512"], "has KV lengths up to 256"),
        (["BUNDLE", "--kv", "100"], "--kv 100: expected a positive multiple"),  # no build takes a plan of such gears
        (["BUNDLE", "--rows", "0"], "--rows 0"),
        (["BUNDLE", "--rows", "80"], "--kv 128: too short to time steps of 80 rows"),
        (["CONFIG", "--device", "h100"], "--device h100: not known"),
        (["CONFIG", "--device", "ascend-910b3", "--kv", "100"], "--kv 100: expected a positive multiple"),
        (["CONFIG", "--device", "ascend-910b3", "--kv", "1024"], "choose at most 512"),
        (["CONFIG", "--device", "ascend-910b3"], "knows 512 positions only; name the KV lengths"),
        (["nowhere", "--device", "ascend-910b3"], "nowhere/config.json: no such file"),
        (["CONFIG", "--device", "ascend-910b3", "--kv", "128", "--ranks", "2", "--batch-size", "1,2"], "2 ranks take"),
        (
            ["CONFIG", "--device", "ascend-910b3", "--kv", "128", "--ranks", "2", "--drafter", "fasteagle:4:90:3:1:20"],
            "--ranks 2: the drafter has 3 query and 1 key/value heads",
        ),
        *(
            (["CONFIG", "--device", "ascend-910b3", "--kv", "128", "--drafter", drafter], "--drafter")
            for drafter in (
                "hydra:3",
                "medusa",
                "medusa:0",
                "medusa:x",
                "eagle3:0",
                "eagle3:1:2",
                "fasteagle",
                "fasteagle:4:90:2",
            )
        ),
    ],
)
def test_refused_in_one_line_and_nothing_is_written(
    tiny_bundle: Path, tiny_config: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    places = {"BUNDLE": tiny_bundle, "CONFIG": tiny_config}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as refused:
        run(*(places.get(option, option) for option in options), "--out", tmp_path / "l.json")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_is_made_or_refused_before_steps_are_timed(
    tiny_bundle: Path, tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise UserError("it goes on")

    monkeypatch.setattr(profile_command, "_times", refused)
    monkeypatch.setattr(profile_command, "_built", refused)
    (tmp_path / "table").mkdir()
    for number, source in enumerate((tiny_bundle, tiny_teacher)):
        with pytest.raises(UserError, match="table: cannot be written: Is a directory; choose another --out"):
            run(source, "--out", tmp_path / "table")
        with pytest.raises(UserError, match="it goes on"):
            run(source, "--out", tmp_path / f"new/{number}/table")


def test_places_that_cannot_be_written_are_refused(tiny_config: Path, tmp_path: Path) -> None:
    options = [tiny_config, "--device", "ascend-910b3", "--kv", "128"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        run(*options, "--out", tmp_path / "folder")
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        run(*options, "--out", "")
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.glob("folder/*"))


def test_a_bundle_without_a_drafter(tiny_bundle: Path) -> None:
    whole = Bundle.open(tiny_bundle)
    plain = {
        name: tuple(part for part in getattr(whole.manifest, name) if "plain" in part.name)
        for name in ("trees", "gears")
    }
    manifest = msgspec.structs.replace(whole.manifest, drafter=None, **plain)
    engine = CpuEngine(replace(whole, manifest=manifest, trees={"plain": whole.trees["plain"]}))
    (table,) = profile.measure([engine], (4,), (128,), rounds=1)
    assert table.rows(128) == (1, 4) and table.draft_s(3, 3) == 0.0 and table.drafter == {}


def test_a_teacher_is_timed_in_a_bundle_that_is_removed(
    tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    line = ["profile", str(tiny_teacher), "--precision", "nbits", "--kv", "256", "--rows", "1,4"]
    status, said = main([*line, "--batch-size", "1,2", "--out", str(out)]), capsys.readouterr().err
    assert status == 0 and "building step\n" in said and "prefill" not in said, said
    table = LatencyTable.from_json(out.read_text(), str(out))
    assert table.texts == (1, 2) and all(table.step_s(rows, 256, texts) > 0 for rows in (1, 4) for texts in (1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_precisions_are_timed_in_turns(
    tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own file, and every round visits both."""
    visited: list[str] = []
    real = profile._visit

    def visit(engine: CpuEngine, *given: object) -> None:
        visited.append(engine.bundle.folder.name)
        real(engine, *given)

    monkeypatch.setattr(profile, "_visit", visit)
    line = ["profile", str(tiny_teacher), "--precision", "exact,nbits", "--kv", "256", "--rows", "1,4"]
    assert main([*line, "--out", str(tmp_path / "l.json")]) == 0
    assert len(visited) >= 16 and all(set(visited[at : at + 4]) == {"exact", "nbits"} for at in range(0, 16, 4))
    said = capsys.readouterr().out
    tables = {name: LatencyTable.from_json((tmp_path / f"l-{name}.json").read_text()) for name in ("exact", "nbits")}
    assert all(table.rows(256) == (1, 4) and f"{name}, measured on" in said for name, table in tables.items())
    assert {table.teacher["name"] for table in tables.values()} == {"exact", "nbits"}
    assert {path.name for path in tmp_path.iterdir()} == {"l-exact.json", "l-nbits.json"}


@pytest.mark.parametrize("names", ["five", "nbits,nbits", "exact,"])
def test_precisions_are_known_and_named_once(
    tiny_teacher: Path, tmp_path: Path, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tiny_teacher), "--precision", names, "--out", str(tmp_path / "l")]) == 2
    assert f"--precision {names}: expected some of exact, " in capsys.readouterr().err
