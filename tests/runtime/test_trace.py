"""A trace survives the file, sums up, and nests strictly in the Chrome form."""

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import RequestError
from draftwood.runtime.trace import StepEvent, Trace, form_of, save


def event(kind="verify", step=0, start_us=0.0, accepted=2, times=(10.0, 20.0, 5.0, 1.0), **changes):
    draft, verify, accept, host = times
    fields = {"kind": kind, "step": step, "gear": "T8", "position": 7, "rows": 8, "accepted": accepted}
    fields |= {"path": (0, 1), "tokens": (5, 9), "start_us": start_us, "draft_us": draft, "verify_us": verify}
    return StepEvent(**fields | {"accept_us": accept, "host_us": host} | changes)


def run_of(*steps):
    """Events back to back, each given by its four times."""
    trace, at_us = Trace({"bundle": "demo"}), 0.5
    for step, times in enumerate(steps):
        trace.add(event(step=step, start_us=at_us, times=times))
        at_us += sum(times)
    return trace


def test_what_is_written_is_read_back(tmp_path):
    trace, path = run_of((1.25, 2, 3, 4), (0.1, 0.2, 0.3, 0.4)), tmp_path / "run.jsonl"
    trace.write(path)
    header = json.loads(path.read_text().splitlines()[0])
    assert header == {"format": "draftwood.trace", "version": 1, "bundle": "demo"}
    again = Trace.read(path)
    assert (again.events, again.meta) == (trace.events, trace.meta)
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


GOOD = b'{"format":"draftwood.trace","version":1}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1: expected the header"),
        (b"[1]\n", "line 1: expected the header"),
        (b"\xff\xfe\n", "line 1: expected the header"),
        (b'{"traceEvents":[]}\n', "line 1: expected format 'draftwood.trace', version 1, got None, None"),
        (GOOD.replace(b"1", b"2"), "version 1, got 'draftwood.trace', 2"),
        (GOOD + msgspec.json.encode(event())[:-9], "line 2: expected a step event"),
        (GOOD + msgspec.json.encode(event()) + b'\n{"kind":"jump"}', r"line 3: .*'jump'"),
        (
            GOOD + msgspec.json.encode(event()).replace(b'"draft_us":10', b'"draft_us":-1'),
            "line 2: .*draft_us",
        ),
        (GOOD + msgspec.json.encode(event()).replace(b'"rows"', b'"lanes"'), "line 2: .*lanes"),
    ],
    ids=["empty", "list", "binary", "chrome", "version", "cut", "kind", "time", "field"],
)
def test_a_broken_file_is_refused_by_line(tmp_path, content, said):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=said) as caught:
        Trace.read(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_time_that_json_could_not_hold_is_refused(bad):
    with pytest.raises(ValueError, match="host_us"):
        event(host_us=bad)


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path):
    with pytest.raises(RequestError, match=r"run\.jsonl: cannot be read: No such file"):
        Trace.read(tmp_path / "run.jsonl")
    (tmp_path / "file").touch()
    for folder in ("nowhere", "file"):
        with pytest.raises(RequestError, match=r"run\.json: cannot be written: No"):
            save(run_of(), tmp_path / folder / "run.json")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.jsonl"
    run_of((1, 1, 1, 1)).write(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Trace({"bad": object()}).write(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_chrome_lays_the_parts_out_inside_the_step():
    spans = run_of((10, 20, 5, 1)).chrome()["traceEvents"]
    assert [(s["name"], s["ts"], s["dur"]) for s in spans] == [
        ("verify T8", 0.5, 36.0), ("draft", 0.5, 10.0), ("verify", 10.5, 20.0), ("accept", 30.5, 5.0)
    ]  # fmt: skip
    assert all(s["ph"] == "X" and type(s["pid"]) is type(s["tid"]) is int for s in spans)
    assert {key: spans[0]["args"][key] for key in ("gear", "accepted", "path")} == {
        "gear": "T8", "accepted": 2, "path": (0, 1)
    }  # fmt: skip


def test_chrome_leaves_out_parts_that_took_no_time():
    spans = run_of((0, 20, 0, 1)).chrome()["traceEvents"]
    assert [span["name"] for span in spans] == ["verify T8", "verify"]


part_us = st.one_of(st.just(0.0), st.floats(0, 1e-3), st.floats(0, 1e5))


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(part_us, part_us, part_us, part_us), max_size=8))
def test_chrome_spans_nest_strictly(steps):
    edges = []
    for span in run_of(*steps).chrome()["traceEvents"]:
        begin = round(span["ts"] * 1000)
        edges.append((span["cat"], begin, begin + round(span["dur"] * 1000)))
    step_end = part_end = 0
    for category, begin, end in edges:
        assert begin <= end
        if category == "part":
            assert part_end <= begin and end <= step_end
            part_end = end
        else:
            assert step_end <= begin
            step_end, part_end = end, begin


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.chrome.json"])
def test_save_follows_the_suffix(tmp_path, name):
    path = tmp_path / name
    save(run_of((1, 2, 3, 4)), path)
    if form_of(path) == "events":
        assert Trace.read(path).events == run_of((1, 2, 3, 4)).events
    else:
        assert json.loads(path.read_text())["otherData"] == {"bundle": "demo"}


@pytest.mark.parametrize("name", ["trace", "trace.txt", "trace.json.gz"])
def test_save_refuses_other_suffixes(tmp_path, name):
    with pytest.raises(RequestError, match=r"ends in \.jsonl .* or \.chrome\.json"):
        save(run_of(), tmp_path / name)
    assert not list(tmp_path.iterdir())
