"""The command lines of the documents: each is understood by its own parser, and all that can be run here is run.

A fence says what becomes of it. ``sh`` is run with tiny models instead of MODEL, DRAFTER and BUNDLE; ``sh slow``
with the tests of that mark, and so ``sh npu`` where torch_npu is installed. ``sh long`` (minutes) and ``sh device`` are
only parsed, and ``sh setup`` is what a launcher or another program does. ``python`` is run.
"""

import argparse
import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest

from draftwood.compiler.drafters.registry import kinds
from draftwood.environment import torch_npu_installed
from draftwood.tests import fixtures
from draftwood.tests.gguf_files import save_gguf
from draftwood.tools import cli
from draftwood.tools.commands import demo
from draftwood.tools.demo import fetch, language_model
from draftwood.tools.measure import profile
from draftwood.trees.calibration import Calibration
from draftwood.trees.calibration_file import write_calibration

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.name != "README.md")
CARD = ROOT / "tools" / "demo" / "MODEL_CARD.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "README.md", CARD, *PAGES]
INFOS = {"sh", "sh npu", "sh slow", "sh long", "sh device", "sh setup", "python", "json", "text"}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = [[name] for name in cli.COMMANDS] + [[]]
OURS = re.compile(r"(draftwood|\./draft|python -m draftwood\.)")
# What makes a command short, besides its own flags or in their place.
SHORTER = {
    "bench": "--prompts few.jsonl --max-new-tokens 8",
    "build": "--kv 128",
    "calibrate": "--prompts few.jsonl --max-new-tokens 16 --workers 1",
    "check": "--engine cpu",
    "make": "--prompts few.jsonl --kv 512 --precision exact --batch-size 1",
    "run": "--max-new-tokens 8",
    "train": "--steps 2 --batch-size 2",
    "distill": "--rows 8 --max-new-tokens 4",
}


class Block(NamedTuple):
    """A fence of a document."""

    info: str
    text: str


class Parsed(Exception):
    """Raised by a command that has parsed its arguments, before it does anything."""


def blocks(document: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(document.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    """The words of every command line: continued lines joined, comments left out, chains taken apart."""
    lines = [part for line in text.replace("\\\n", " ").splitlines() for part in line.split("&&")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def ours(words: list[str]) -> list[str]:
    """The command as ``draftwood ...`` or ``MODULE ...``; nothing if it is another program's."""
    if words[:1] == ["torchrun"] and "-m" in words:
        words = ["python", *(word for word in words[words.index("-m") :] if word != "--")]
    if words[:1] == ["./draft"]:
        words = words[1:] if words[1:2] == ["python"] else ["draftwood", *words[1:]]
    if words[:2] == ["python", "-m"]:
        words = ["draftwood", *words[3:]] if words[2] == "draftwood.tools.cli" else words[2:]
    known = words[:1] == ["draftwood"] and words[1:2] != ["test"]
    return words if known or words[0].startswith("draftwood.") else []


def main_of(words: list[str]) -> int:
    if words[0] == "draftwood":
        return cli.main(words[1:])
    spec = importlib.util.find_spec(f"{words[0]}.__main__") if not is_module(words[0]) else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)  # as python -m does
        return importlib.import_module(spec.name if spec else words[0]).main()


def is_module(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and not spec.submodule_search_locations


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the command's own parser takes the words."""
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments: object, **options: object) -> None:
        parse(*arguments, **options)  # type: ignore[call-overload]
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        try:
            main_of(words)
        except Parsed:
            return True
        except SystemExit:
            return False
    return False


def documented() -> list[object]:
    found = []
    for document in DOCUMENTS:
        lines = [words for block in blocks(document) if block.info[:2] == "sh" for words in commands(block.text)]
        spans = re.findall(r"`((?:draftwood|python -m draftwood\.)[^`.]*)`", FENCE.sub("", document.read_text()))
        lines += [words for span in spans if len(words := shlex.split(span)) > 2 or words[1:2] not in NAMES]
        for words in filter(None, map(ours, lines)):
            found.append(pytest.param(words, id=f"{document.name}: {' '.join(words)[:60]}"))
    return found


@pytest.mark.parametrize("words", documented())
def test_a_documented_command_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert understood(words, monkeypatch), shlex.join(words)


@pytest.mark.parametrize(
    "line",
    ["draftwood run BUNDLE --prompt x --nope", "draftwood nope", "python -m draftwood.tests.house.lines --nope"],
    ids=["flag", "command", "flag of a module"],
)
def test_what_does_not_exist_is_not_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not understood(ours(shlex.split(line)), monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_command_stands_in_a_fence_that_says_what_becomes_of_it(document: Path) -> None:
    assert {block.info for block in blocks(document)} <= INFOS
    outside = [block.text for block in blocks(document) if block.info in ("text", "json")]
    outside.append(FENCE.sub("", document.read_text(encoding="utf-8")))
    assert [line for text in outside for line in text.splitlines() if OURS.match(line.strip())] == []
    for block in blocks(document):
        if block.info in ("sh", "sh npu", "sh slow"):
            assert all(ours(words) for words in commands(block.text)), block.text


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Medusa heads for the trees that documents name, and the quickest drafter to build."""
    import torch
    from safetensors.torch import save_file

    tensors = {f"{head}.0.linear.weight": torch.eye(64) * 0.05 * (head + 1) for head in range(3)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(64) for head in range(3)}
    # Matrices of their own, since a build from shapes alone has no teacher's to share.
    tensors |= {f"{head}.1.weight": torch.eye(300, 64) * 0.05 for head in range(3)}
    folder = tmp_path_factory.mktemp("three")
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    return folder


@pytest.fixture(autouse=True)
def quick(tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are only made here, not read, and demo is a tiny model."""

    def tiny_file() -> Path:
        save_gguf(tiny_teacher, tmp_path / "demo.gguf", "Q4_1")
        return tmp_path / "demo.gguf"

    monkeypatch.setattr(fetch, "model", tiny_file)
    trees = "lookup:chain:3,lookup:chain:7"  # the demo's own drafter fits its own model alone
    for name, value in (
        ("SLOTS", 512), ("PREFILL_ROWS", (32,)), ("SEQUENCES", 2), ("DRAFTER", None), ("TREES", trees)
    ):  # fmt: skip
        monkeypatch.setattr(language_model, name, value)
    for name, value in (("TUNE_SECONDS", 0.1), ("NEW_TOKENS", 8)):
        monkeypatch.setattr(demo, name, value)
    for name, value in (("SECONDS", 0.0), ("VISIT_SECONDS", 0.0), ("HOST_TOKENS", 8), ("LEAST_ROUNDS", 2)):
        monkeypatch.setattr(profile, name, value)


@pytest.fixture
def world(
    tiny_teacher: Path,
    three_layer_teacher: Path,
    three_heads: Path,
    tiny_bundle: Path,
    tmp_path: Path,
) -> Callable[[str], Path]:
    """Makes the files that a document's command reads and no earlier command made; small, with the documents' names."""
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    folders = {
        r"(distill|train \w+|--teacher) MODEL": three_layer_teacher,
        "EAGLE3 MODEL": fixtures.TEACHER,
        "MODEL": tiny_teacher,
        "DRAFTER": three_heads,
        "EAGLE3": fixtures.EAGLE3,
        "MEDUSA": fixtures.MEDUSA,
        "BUNDLE": tiny_bundle,
    }
    texts = [f"the cat sat on the mat and the hat {number}" for number in range(40)]
    files = {
        "chat.json": json.dumps([{"role": "user", "content": "the cat"}]),
        "mine.json": json.dumps([[0], [1], [0, 0]]),
        "prompts.jsonl": '{"prompt": "the cat sat"}\n{"prompt": "on the mat"}\n',
        "eval240.jsonl": '{"prompt": "the cat sat"}\n{"prompt": "on the mat"}\n',
        "few.jsonl": "".join(json.dumps({"prompt": text}) + "\n" for text in texts[:4]),
        "texts.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "DATA/text.jsonl": "".join(json.dumps({"id": text, "text": text}) + "\n" for text in texts),
    }

    def make(words: str) -> Path:
        for named, folder in folders.items():
            name = named.split()[-1]
            if re.search(rf"{named}\b", words) and not (tmp_path / name).exists():
                shutil.copytree(folder, tmp_path / name)
        for name, text in files.items():
            if name.partition("/")[0] in f"{words} few.jsonl" and not (tmp_path / name).exists():
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text(text)
        if "tests/fixtures" in words and not (tmp_path / "tests").exists():
            (tmp_path / "tests").symlink_to(ROOT / "tests")
        if "plan.json" in words and not (tmp_path / "plan.json").exists():
            plan(tmp_path)
        return tmp_path

    return make


def plan(folder: Path) -> None:
    """Writes a plan of small trees."""
    counted = Calibration()
    for number in range(40):
        counted.add((0, 2) if number % 2 else (), group=str(number), context=412)
    write_calibration(counted, folder / "counted.bin")
    with chdir(folder):
        assert cli.main(["plan", "counted.bin", "--max-nodes", "4", "--out", "plan.json"]) == 0


def small(words: list[str]) -> list[str]:
    """The command with the fewest graphs where it builds, and less to do."""
    name = words[1] if words[0] == "draftwood" else words[0]
    shorter = shlex.split("" if "--device" in words else SHORTER.get(name, ""))
    for flag, value in zip(shorter[::2], shorter[1::2], strict=True):
        if flag == "--engine" and flag in words:
            continue  # a document that names an engine means it
        words = [word for at, word in enumerate(words) if flag not in (word, words[at - 1])] + [flag, value]
    return words


def here(words: list[str]) -> bool:
    """Whether the engine that is named, if one is, has a package for this machine."""
    needs = {"qnn": "onnxruntime_qnn", "openvino": "openvino"}
    return all(importlib.util.find_spec(package) for engine, package in needs.items() if engine in words)


def run(document: Path, world: Callable[[str], Path], infos: set[str]) -> None:
    """Runs what a document says from top to bottom, in one folder."""
    for block in blocks(document):
        if block.info == "python" and "python" in infos:
            with chdir(world(block.text)):
                exec(compile(block.text, document.name, "exec"), {})
        if block.info not in infos - {"python"}:
            continue
        for words in map(ours, commands(block.text)):
            out = words[words.index("--out") + 1] if "--out" in words else ""
            folder = world(" ".join(word for word in words if word != out))
            if words[:2] == ["draftwood", "build"]:
                shutil.rmtree(folder / out, ignore_errors=True)
            with chdir(folder):
                assert not here(words) or main_of(small(words)) == 0, shlex.join(words)


def with_blocks(*infos: str) -> list[object]:
    found = [document for document in DOCUMENTS if {block.info for block in blocks(document)} & set(infos)]
    return [pytest.param(document, id=document.name) for document in found]


@pytest.mark.parametrize("document", with_blocks("sh"))
def test_the_commands_of_a_document_run(document: Path, world: Callable[[str], Path]) -> None:
    run(document, world, {"sh"})


@pytest.mark.parametrize("document", with_blocks("python"))
def test_the_python_of_a_document_runs(document: Path, world: Callable[[str], Path]) -> None:
    run(document, world, {"python"})


@pytest.mark.slow
@pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package")
@pytest.mark.parametrize("document", with_blocks("sh npu"))
def test_the_commands_for_an_npu_run(document: Path, world: Callable[[str], Path]) -> None:
    run(document, world, {"sh npu"})


@pytest.mark.slow
@pytest.mark.parametrize("document", with_blocks("sh slow"))
def test_the_longer_commands_of_a_document_run(
    document: Path, world: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(document, world, {"sh slow"})


def test_the_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:trees|kernels|compiler|runtime|tools|tests)/[\w/]*(?:\.py|/))`", text))
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_the_pages_name_every_drafter_that_is_modelled_and_every_graph_of_a_cpu() -> None:
    modelled = (DOCS / "latency-model.md").read_text(encoding="utf-8")
    assert [k.name for k in kinds() if k.cost_source and f"`{k.name}{k.cost_sizes}`" not in modelled] == []
    listed = (DOCS / "bundle-format.md").read_text(encoding="utf-8")
    assert [name for name in ("step", "grouped", "bitwise", "extend") if f"onnx/{name}.onnx" not in listed] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text())):
        path = document if not target else document.parent / target
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"\]\((\w[\w/-]*\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_for_whom_it_is(page: Path) -> None:
    first = " ".join(page.read_text(encoding="utf-8").split("\n\n")[1].split())
    written = page.name != "measured.md"
    assert not written or (first.startswith("For ") and "After reading this page" in first)


def test_the_extras_and_the_line_of_the_tests_are_those_of_the_project() -> None:
    install = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"[`.]\[(\w+)\][`']", install)) == set(extras)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- tests -->\n```sh setup\n./draft test\n```" in readme  # what .ci/run looks for


def test_the_readme_is_short_and_begins_plainly() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    jargon = {"KV", "Medusa", "EAGLE", "logits", "verify", "gear", "static-graph", "argmax", "prefill"}
    assert [line for line in lines[:15] for word in jargon if word in line] == []
