"""Every section on tiny bundles: its rows and their pages."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import RequestError
from draftwood.tests.gguf_files import save_gguf
from draftwood.tests.other_programs import broken, crashing, echoing
from draftwood.tools.benchmarks import draw, open_bundles, peers, served
from draftwood.tools.benchmarks.contents import contents
from draftwood.tools.benchmarks.markdown import markdown
from draftwood.tools.benchmarks.named_bundles import read_bundles
from draftwood.tools.benchmarks.registry import SECTIONS
from draftwood.tools.benchmarks.rows import differences
from draftwood.tools.benchmarks.run import evaluate
from draftwood.tools.benchmarks.section import Table
from draftwood.tools.benchmarks.sections import peers as programs
from draftwood.tools.benchmarks.sections import service
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.trees.spec import read_specs

FEW = {"max_new_tokens": 6, "rounds": 2, "limit": 2}
SUITE = Suite(
    name="all",
    tries=1,
    busy_cores=100.0,
    sections={
        "batches": SectionSettings(**FEW, bundles=("one",), texts=(2, 4, 16)),
        "service": SectionSettings(**FEW, bundles=("one",), texts=(1, 2), lengths=(8,)),
        "peers": SectionSettings(**FEW, temperatures=(0.0, 0.8)),
    },
)


@pytest.fixture
def suite(tiny_bundle: Path, tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A suite over one bundle under two names, with programs of the test that answer or fail."""
    save_gguf(tiny_teacher, tmp_path / "m.gguf")
    server = tmp_path / "bin" / served.LLAMA
    server.parent.mkdir()
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m draftwood.tests.other_programs "$@"\n')
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{server.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(open_bundles, "TUNE_SECONDS", 0.01)
    known = {"nobody": ("no_such_package", broken), "broken": ("json", broken), "crashing": ("json", crashing)}
    known["llama.cpp lookup"] = "json", echoing
    monkeypatch.setattr(service, "LEAST", 3)
    for module in (peers, programs):
        monkeypatch.setattr(module, "PEERS", known)
    monkeypatch.setattr(programs, "compiled_with", lambda: "AVX2")
    given = read_bundles([f"one={tiny_bundle}", f"two={tiny_bundle}"])
    return SUITE.over(given, lambda *_: True, None, tmp_path / "m.gguf")


def test_every_section_measures_and_shows(suite: Suite, tmp_path: Path) -> None:
    rows = evaluate(suite, tmp_path / "run", tmp_path / "work").rows
    found = contents(tmp_path / "run")
    assert found.complete and {chapter.section.name for chapter in found.chapters} == set(SUITE.sections)
    for block in (block for chapter in found.chapters for block in chapter.blocks):
        if isinstance(block, Table):
            assert block.lines and all(len(line) == len(block.columns) for line in block.lines)
    alone, both = (row["found"] for row in rows if row["section"] == "service")
    ours = "draftwood serve one"
    assert list(alone["rounds"]) == [ours, served.LLAMA, "draftwood.open"]
    assert list(both["rounds"]) == [ours, served.LLAMA]
    assert [len(one["first_ms"]) for one in both["rounds"][ours]] == [8, 8] and len(alone["held"]) == 3
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
    ways = [f"draftwood {bundle} {way}" for bundle in ("one", "two") for way in ("plain", "tree")]
    assert [line[2] for line in programs.lines] == 2 * [*ways, "llama.cpp lookup"]
    assert all(line[4] == "2 of 2" for line in programs.lines if line[2] in ways)
    assert ("draftwood one plain", "draftwood two plain") in {(line[2], line[3]) for line in over.lines}
    assert {line[3] for line in over.lines if line[2].endswith("tree")} == {"llama.cpp lookup"}


def test_problems_are_solved_alike_with_and_without_drafts(suite: Suite, tmp_path: Path) -> None:
    """A sum is right by its last number, a function by its tests. Prompts without an answer are no problems, and those
    that are too long are left out."""
    files = tmp_path / "problems.jsonl"
    function = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "def check(f): pass"}
    long = {"id": "long", "question": "the cat sat on " * 400, "answer": "#### 7"}
    lines = [long, {"id": "s", "question": "the cat sat on", "answer": "#### 7"}, function, {"prompt": "the mat"}]
    files.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = {
        "problems": SectionSettings(policies=("adaptive", "tree"), max_new_tokens=6, rounds=1, bundles=("one",))
    }
    asked = msgspec.structs.replace(suite, sections=sections, prompts=(str(files),))
    rows = evaluate(asked, tmp_path / "run", tmp_path / "work").rows
    assert [row["at"]["problem"] for row in rows] == ["long", "s", "HumanEval/0"]
    (table,) = contents(tmp_path / "run").chapters[0].blocks
    assert isinstance(table, Table)
    assert [(line[1], *line[4:7]) for line in table.lines] == [
        (family, way, "0 of 1", "1 of 1") for family in ("gsm8k", "humaneval") for way in ("plain", "adaptive", "tree")
    ]


def test_looked_up_trees_are_ways_of_a_length(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_bundles, "TUNE_SECONDS", 0.01)
    trees, prompts = read_specs("lookup:chain:2").trees, tmp_path / "prompts.jsonl"
    build(BuildRequest(model=tiny_teacher, drafter=None, trees=trees, slots=(128,)), tmp_path / "bundle")
    prompts.write_text("".join(json.dumps({"prompt": f"the cat {number}"}) + "\n" for number in range(3)))
    ask = SectionSettings(lengths=(40,), limit=1, max_new_tokens=6, rounds=1)
    suite = Suite(name="lengths", tries=1, busy_cores=100.0, prompts=(str(prompts),), sections={"lengths": ask})
    suite = suite.over(read_bundles([str(tmp_path / "bundle")]), lambda *_: True, None, None)
    (row,) = evaluate(suite, tmp_path / "run", tmp_path / "work").rows
    assert set(row["found"]["ways"]) == {"plain", "adaptive", "plain again", "lookup-chain-2"}
    assert "lookup-chain-2" in markdown(contents(tmp_path / "run"))


def test_peers_read_the_teachers_own_file(tiny_teacher: Path, tmp_path: Path) -> None:
    save_gguf(tiny_teacher, tmp_path / "m.gguf", "Q8_0")
    file, config = peers.read_gguf(tmp_path)
    assert file == tmp_path / "m.gguf" and config.eos == (1,)
    with pytest.raises(RequestError, match=r"reads GGUF files; expected MODEL\.gguf"):
        peers.read_gguf(tiny_teacher)


def test_a_publishers_generation_config_changes_no_text_of_transformers(tiny_teacher: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import torch

    texts = []
    for name, fields in (("plain", {}), ("punishing", {"repetition_penalty": 9.0, "do_sample": True, "top_p": 1e-3})):
        shutil.copytree(tiny_teacher, tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps({"eos_token_id": 1} | fields))
        generate = peers.transformers_generate(tmp_path / name, tmp_path, 1)
        torch.manual_seed(0)
        texts.append([list(generate([5, 6, 7], 8, temperature)) for temperature in (0.0, 1.0)])
    assert texts[0] == texts[1]


def test_an_export_is_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are kept, and two checkpoints may lie in folders of one name."""
    exports, opened = list[str](), list[str]()

    def export(command: list[str], **_: Any) -> None:
        (folder := Path(command[command.index("-o") + 1])).mkdir()
        (folder / "genai_config.json").write_text('{"model": {"decoder": {}}}')
        exports.append(str(folder))

    monkeypatch.setitem(sys.modules, "onnxruntime_genai", SimpleNamespace(Model=opened.append))
    monkeypatch.setattr(peers.subprocess, "run", export)
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model/config.json").write_text(name)
    for name in ("a", "b", "a"):
        peers.genai(tmp_path / name / "model", tmp_path, 1)
    assert len(exports) == 2 and opened == [*exports, exports[0]]


def test_llama_server_reads_a_gguf_checkpoint_or_is_missing(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gguf(tiny_teacher, tmp_path / "m.gguf")
    monkeypatch.setattr(served.shutil, "which", lambda name: None)
    assert served.why_missing(None) == "llama-server reads the teacher's checkpoint: give --model"
    assert served.why_missing(str(tiny_teacher)) == f"llama-server reads GGUF files; {tiny_teacher} is none"
    assert served.why_missing(str(tmp_path)) == "llama-server is not on PATH"


def test_a_text_of_ours_that_differs_beside_other_programs_is_a_difference() -> None:
    programs = {"draftwood plain": {"equal": True}, "draftwood tree": {"equal": False}, "echo": {"agree": 0}}
    (found,) = differences([{"key": "peers/0", "section": "peers", "found": {"programs": programs}}])
    assert found == {"tie": False, "key": "peers/0", "way": "draftwood tree"}


def test_programs_that_not_every_row_has_are_named_and_not_compared() -> None:
    """A run goes on where other programs are installed."""

    def row(*names: str, **missing: str) -> dict:
        figures = {"seconds": [1.0, 2.0], "tokens": 4, "agree": 4, "base": 4}
        found = {"programs": dict.fromkeys(("draftwood one plain", *names), figures), "missing": missing}
        return {"at": {"model": "m", "temperature": 0.0}, "found": found}

    table, _, left = programs.show([row("gone", "kept"), row("new", "kept", gone="not installed")])
    assert isinstance(table, Table) and [line[2] for line in table.lines] == ["draftwood one plain", "kept"]
    assert left == "Missing: gone (not installed); new (not of every row)."


@pytest.mark.parametrize(("lengths", "got"), [((), "none"), ((8, 16), "8, 16")])
def test_a_service_of_other_than_one_length_is_refused(lengths: tuple[int, ...], got: str) -> None:
    with pytest.raises(RequestError, match=f"suite all: service takes prompts of one length, .+; got {got}"):
        list(service.tasks(SectionSettings(texts=(1,), lengths=lengths), SUITE))


def test_the_service_runs_the_suites_engine() -> None:
    assert "--engine static" in " ".join(served.our_command(Path("b"), "static"))


def test_every_section_is_registered_under_its_own_name() -> None:
    assert all(section.name == name and section.question.endswith("?") for name, section in SECTIONS.items())


def test_bundles_are_drawn_in_colours_of_their_own() -> None:
    assert draw.colour("eagle3 tree") == draw.COLOURS["eagle3"] and draw.colour("plain mine") == draw.COLOURS["plain"]
    assert draw.colour("mine adaptive") == draw.colour("mine tree") in draw.MANY
