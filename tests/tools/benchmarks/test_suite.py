"""The shipped suites, and their needs."""

from pathlib import Path

import msgspec
import pytest

from draftwood.errors import RequestError
from draftwood.tools.benchmarks.named_bundles import check_one_text, read_bundles
from draftwood.tools.benchmarks.registry import SECTIONS
from draftwood.tools.benchmarks.run import tasks_of
from draftwood.tools.benchmarks.suite import FOLDER, read_suite
from draftwood.tools.measure.conversations import by_conversation
from draftwood.tools.prompts import Prompt


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_a_shipped_suite_asks_for_tasks_of_their_own_names(name: str) -> None:
    read = read_suite(name, SECTIONS)
    asked = {part: msgspec.structs.replace(ask, bundles=("one", "two")) for part, ask in read.sections.items()}
    tasks = tasks_of(msgspec.structs.replace(read, sections=asked))
    assert read.name == name and len({task.key for task in tasks}) == len(tasks) > 20
    assert all(task.section in SECTIONS for task in tasks)


def test_the_full_suite_has_every_section() -> None:
    assert set(read_suite("full", SECTIONS).sections) == set(SECTIONS)


def test_sections_and_prompts_take_the_place_of_a_suites() -> None:
    suite = read_suite("full", SECTIONS).only(("turns", "peers"), ["mine.jsonl", "sums=s.jsonl"])
    assert list(suite.sections) == ["turns", "peers"] and suite.sections["turns"].limit == 12
    assert suite.prompts == (str(Path("mine.jsonl").resolve()), f"sums={Path('s.jsonl').resolve()}")
    with pytest.raises(RequestError, match="--sections nope"):
        suite.only(("nope",), ())


def test_a_section_has_the_bundles_and_the_lengths_that_it_can_measure(tiny_bundle: Path) -> None:
    suite = read_suite("full", SECTIONS)
    context = read_bundles([f"one={tiny_bundle}"])["one"].manifest.dims.context
    lengths = (context - 64, context - 63)
    sections = {
        "turns": suite.sections["turns"],
        "lengths": msgspec.structs.replace(suite.sections["lengths"], lengths=lengths, max_new_tokens=64),
    }
    given = read_bundles([f"one={tiny_bundle}", f"two={tiny_bundle}"])
    over = msgspec.structs.replace(suite, sections=sections).over(given, lambda *_: True, None, Path("m/Small.gguf"))
    assert over.sections["turns"].bundles == ("one", "two") and over.sections["lengths"].lengths == lengths[:1]
    assert (over.model, over.checkpoint) == ("Small", str(Path("m/Small.gguf").resolve()))
    unnamed = suite.over(given, lambda name, _: name == "turns", "static", None)
    assert (list(unnamed.sections), unnamed.model, unnamed.engine) == (["turns"], "llama", "static")
    with pytest.raises(RequestError, match="no section that measures it"):
        suite.over(given, lambda *_: False, None, None)
    other = msgspec.structs.replace(sections["turns"], bundles=("three",))
    with pytest.raises(RequestError, match="turns asks for bundle 'three'"):
        msgspec.structs.replace(suite, sections={"turns": other}).over(given, lambda *_: True, None, None)


def test_turns_compare_bundles_of_one_precision(tiny_bundle: Path) -> None:
    given = read_bundles([f"one={tiny_bundle}", f"two={tiny_bundle}"])
    check_one_text(given, "turns")
    manifest = given["two"].manifest
    rounded = msgspec.structs.replace(manifest.teacher, config=manifest.teacher.config | {"quantised": ["layers.0.o"]})
    two = given["two"]._replace(manifest=msgspec.structs.replace(manifest, teacher=rounded))
    with pytest.raises(RequestError, match="one and two hold the teacher in different precisions"):
        check_one_text(given | {"two": two}, "turns")
    assert [name for name, section in SECTIONS.items() if section.one_text] == ["turns"]


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


def test_what_a_small_source_lacks_falls_to_the_others() -> None:
    prompts = [
        Prompt(id=f"{source}{n}", text="x", conversation=f"{source}{n}", source=source)
        for source, count in (("a", 100), ("b", 3), ("c", 1))
        for n in range(count)
    ]
    found = [turns[0].source for turns in by_conversation(prompts, 24)]
    assert (found.count("a"), found.count("b"), found.count("c")) == (20, 3, 1)
