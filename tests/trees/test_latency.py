"""Latency tables: look-ups that pad upwards, and a file that says exactly the table."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees.latency import Assumption, LatencyEntry, LatencyTable


def modelled(kind: str, seconds: float, **shape: int) -> LatencyEntry:
    return LatencyEntry(kind=kind, seconds=seconds, parts={"all": seconds}, **shape)  # type: ignore[arg-type]


def measured(kind: str, seconds: float, **shape: int) -> LatencyEntry:
    quartiles = (0.9 * seconds, 1.1 * seconds)
    return LatencyEntry(kind=kind, seconds=seconds, quartiles=quartiles, samples=5, **shape)  # type: ignore[arg-type]


STEPS = (
    modelled("decode", 0.010, rows=1, slots=512),
    modelled("verify", 0.012, rows=8, slots=512, bytes=7),
    modelled("verify", 0.011, rows=17, slots=512),
    modelled("decode", 0.020, rows=1, slots=1024),
    modelled("prefill", 0.090, rows=128, slots=512),
)
DRAFTS = (
    modelled("draft", 0.003, depth=2, width=4),
    modelled("draft", 0.005, depth=2, width=16),
    modelled("draft", 0.004, depth=5, width=8),
)
HOST = (modelled("commit", 0.0005, rows=0), modelled("host", 0.00025))
CONSTANT = Assumption(name="peak", value=3.0, unit="FLOP/s", mark="derived", source="cores times clock")


def table(*entries: LatencyEntry) -> LatencyTable:
    return LatencyTable(source="modelled", entries=entries or (*STEPS, *DRAFTS, *HOST), constants=(CONSTANT,))


def test_a_step_is_padded_up_in_rows_and_in_slots() -> None:
    whole = table()
    assert [whole.step_s(rows, 512) for rows in (1, 2, 8, 9, 17)] == [0.010, 0.012, 0.012, 0.011, 0.011]
    assert whole.step_s(1, 1) == 0.010 and whole.step_s(1, 513) == 0.020
    assert whole.slots == (512, 1024)
    assert (whole.rows(300), whole.rows(512), whole.rows(513)) == ((1, 8, 17), (1, 8, 17), (1,))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t: t.step_s(18, 512), "no step of 18 rows at KV length 512; it goes up to 17 rows"),
        (lambda t: t.step_s(2, 1024), "no step of 2 rows at KV length 1024; it goes up to 1 rows"),
        (lambda t: t.rows(1025), "no step at KV length 1025; it goes up to 1024"),
        (lambda t: t.draft_s(6, 1), "no draft of depth 6 and width 1; it goes up to depth 5 and width 16"),
        (lambda t: t.draft_s(3, 9), "no draft of depth 3 and width 9"),
    ],
    ids=["rows", "rows-there", "slots", "depth", "width"],
)
def test_what_the_table_has_not_is_one_line(ask, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TreeError, match=r"^latency table: ") as refused:
        ask(table())
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_cheapest_draft_that_is_enough() -> None:
    whole = table()
    asked = [(1, 1), (2, 4), (2, 5), (3, 4), (5, 8), (1, 16)]
    assert [whole.draft_s(*ask) for ask in asked] == [0.003, 0.003, 0.004, 0.004, 0.004, 0.005]
    assert whole.draft_s(0, 99) == 0.0  # plain decoding drafts nothing
    assert table(*STEPS).draft_s(9, 9) == 0.0


def test_host_and_commit_add_up() -> None:
    assert table().host_s() == 0.00075
    assert table(*STEPS).host_s() == 0.0


def test_equal_tables_are_equal_files() -> None:
    text = table().to_json()
    assert LatencyTable.from_json(text, "x") == table() and LatencyTable.from_json(text, "x").to_json() == text
    turned = table(*reversed((*STEPS, *DRAFTS, *HOST)))
    assert turned == table() and turned.to_json() == text
    assert json.loads(text)["format"] == "draftwood.latency"


def test_a_measured_table_keeps_its_spread() -> None:
    entry = measured("verify", 0.004, rows=3, slots=128, filled=64)
    kept = LatencyTable(source="measured", kv_read="filled", entries=(entry,), machine={"threads": 2}, notes=("a",))
    read = LatencyTable.from_json(kept.to_json(), "cpu.json")
    assert read == kept and read.entries[0].quartiles == (0.9 * 0.004, 1.1 * 0.004)
    assert (read.kv_read, read.machine, read.notes) == ("filled", {"threads": 2}, ("a",))


def changed(path: tuple[object, ...], value: object) -> str:
    """The table's file with one value replaced, or removed if the value is None."""
    root = json.loads(table().to_json())
    at = root
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not draftwood.latency: Expected `object`, got `array`"),
        ("{}", "expected an object with format 'draftwood.latency', got ''"),
        (changed(("format",), "draftwood.tree"), "got 'draftwood.tree'"),
        (changed(("version",), 1), "expected version 2"),
        (changed(("source",), None), "missing required field `source`"),
        (changed(("extra",), 1), "unknown field `extra`"),
        (changed(("source",), "guessed"), "'guessed' - at `$.source`"),
        (changed(("kv_read",), 3), "Expected `str`, got `int` - at `$.kv_read`"),
        (changed(("machine",), []), "Expected `object`, got `array` - at `$.machine`"),
        (changed(("entries",), {}), "Expected `array`, got `object` - at `$.entries`"),
        (changed(("entries",), []), "no decode or verify entry"),
        (changed(("entries", 0), 7), "Expected `object`, got `int` - at `$.entries[0]`"),
        (changed(("entries", 0, "kind"), "step"), "'step' - at `$.entries[0].kind`"),
        (changed(("entries", 0, "kind"), ["decode"]), "Expected `str`, got `array`"),
        (changed(("entries", 0, "seconds"), None), "missing required field `seconds`"),
        (changed(("entries", 0, "depth"), 1), "depth is 1; expected 0, it has none"),
        (changed(("entries", 0, "seconds"), -1.0), "Expected `float` >= 0.0"),
        (changed(("entries", 0, "seconds"), 0.0), "a step of 0.0 seconds; expected 1e-09 or more"),
        (changed(("entries", 0, "seconds"), 1e300), "Expected `float` <= 100.0"),
        (changed(("entries", 0, "seconds"), "1"), "Expected `float`, got `str`"),
        (changed(("entries", 0, "seconds"), float("nan")), "malformed"),
        (changed(("entries", 0, "rows"), 2), "expected 1, more rows are of kind verify"),
        (changed(("entries", 0, "rows"), True), "Expected `int`, got `bool` - at `$.entries[0].rows`"),
        (changed(("entries", 0, "slots"), 10**40), "Expected `int` <= 10000000"),
        (changed(("entries", 0, "slots"), 0), "slots is 0; expected 1 or more"),
        (changed(("entries", 0, "quartiles"), [1]), "`array` of length 2"),
        (changed(("entries", 0, "quartiles"), [0.02, 0.03]), "lies outside its quartiles"),
        (changed(("entries", 0, "parts"), {"all": 0.5}), "do not add up"),
        (changed(("entries", 1, "slots"), 512), "two decode entries of shape (1, 1, 512)"),
        (changed(("constants", 0, "mark"), "well known"), "'well known' - at `$.constants[0].mark`"),
        (changed(("constants", 0, "source"), ""), "length >= 1 - at `$.constants[0].source`"),
        (changed(("constants", 0, "value"), "3"), "Expected `float`, got `str`"),
        (changed(("constants", 0, "unit"), None), "missing required field `unit`"),
        (changed(("source",), "measured"), "has no quartiles and samples"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(TreeError) as refused:
        LatencyTable.from_json(text, "bad.json")
    line = str(refused.value)
    assert line.startswith("bad.json: ") and message in line and "\n" not in line


@pytest.mark.parametrize("kind", ["draft", "host", "commit"])
def test_a_part_of_a_step_that_some_numbers_of_texts_lack_is_refused(kind: str) -> None:
    """A host's share that is not there cost nothing, and a draft that is not there was told to be too deep."""
    shape = {"depth": 2, "width": 4} if kind == "draft" else {}
    entries = [modelled("decode", 0.01, rows=1, slots=512, texts=texts) for texts in (1, 2)]
    with pytest.raises(ValueError, match=f"^steps of 2 texts, but no {kind} of so many; expected it for all or none"):
        table(*entries, modelled(kind, 0.001, **shape))
    assert table(*entries, *(modelled(kind, 0.001, **shape, texts=texts) for texts in (1, 2))).texts == (1, 2)


def test_a_step_that_is_not_there_says_of_how_many_texts() -> None:
    shared = table(*(modelled("decode", 0.01, rows=1, slots=512 // texts, texts=texts) for texts in (1, 2)))
    with pytest.raises(TreeError, match="no step of 2 texts at KV length 512; it goes up to 256; profile again"):
        shared.step_s(1, 512, 2)
    with pytest.raises(TreeError, match="no step of 3 rows of each of 2 texts at KV length 256; it goes up to 1 rows"):
        shared.step_s(3, 256, 2)


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)


@given(
    grid=st.dictionaries(st.integers(1, 9), sizes, min_size=1, max_size=4),
    rows=st.integers(1, 13),
    slots=st.integers(1, 10),
)
def test_look_ups_agree_with_a_search_of_all_entries(grid: dict[int, list[int]], rows: int, slots: int) -> None:
    entries = [
        modelled("decode" if count == 1 else "verify", 100 * length + count, rows=count, slots=length)
        for length, counts in grid.items()
        for count in counts
    ]
    whole = table(*entries)
    lengths = [length for length in grid if length >= slots]
    counts = [count for count in grid[min(lengths)] if count >= rows] if lengths else []
    if counts:
        assert whole.step_s(rows, slots) == 100 * min(lengths) + min(counts)
    else:
        with pytest.raises(TreeError):
            whole.step_s(rows, slots)
