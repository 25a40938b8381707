"""The inputs of a long job: any change is noticed and named, and nothing else."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood.errors import RequestError
from draftwood.tools.made_from import alone_in, begin_in, changed, made_from, read_note

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 300_000, "deep/er": b""}


def written(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(5, 5))
    return folder


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FILES)), st.sampled_from(["replaced", "touched", "removed", "renamed", "added"]))
def test_every_change_of_a_file_is_named(tmp_path_factory: pytest.TempPathFactory, name: str, change: str) -> None:
    folder = written(tmp_path_factory.mktemp("model"))
    before = made_from({"MODEL": folder, "--drafter": None}, {"kv": [1]})
    assert changed(before, made_from({"MODEL": folder}, {"kv": [1]})) is None
    path = folder / name
    if change == "replaced":  # as many bytes, the same time
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()) or b"x")
        os.utime(path, ns=(5, 5))
    elif change == "touched":
        os.utime(path, ns=(6, 6))
    elif change == "removed":
        path.unlink()
    elif change == "renamed":
        path.rename(path.with_name("another"))
    else:
        path.with_name("new").write_bytes(b"")
    said = changed(before, made_from({"MODEL": folder}, {"kv": [1]}))
    assert said is not None and said.startswith("MODEL (") and "\n" not in said


def test_what_was_made_in_a_folder_is_no_input(tmp_path: Path) -> None:
    """A model may lie in the folder that one works in."""
    folder = written(tmp_path / "model")
    before = made_from({"MODEL": folder}, {})
    for name in ("b/manifest.json", "b.make/stages.json", "b.make/exact/bundle/manifest.json", "deep/c.make/report"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert changed(before, made_from({"MODEL": folder}, {})) is None


def test_options_versions_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "model")
    before = made_from({"MODEL": folder}, {"kv": (1, 2)})
    monkeypatch.chdir(tmp_path)
    assert changed(before, made_from({"MODEL": Path("model")}, {"kv": [1, 2]})) is None
    assert changed(before, made_from({"MODEL": folder}, {"kv": [1], "texts": 8})) == "kv, texts: asked otherwise"
    assert "version 0, this is" in str(changed(before | {"version": "0"}, before))
    for damaged in (None, 5, [], {}, {"files": [], "options": {}}):
        assert changed(damaged, before) == "nothing says what it was made from"


@pytest.mark.parametrize("text", [b"5", b"[]", b'{"a": ', b"", b"\xff", b"[" * 100_000])
def test_a_damaged_note_is_one_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "note.json").write_bytes(text)
    with pytest.raises(RequestError, match=r"note\.json: damaged") as caught:
        read_note(tmp_path / "note.json", dict)
    assert "\n" not in str(caught.value) and read_note(tmp_path / "none.json", dict) == {}


@pytest.mark.parametrize("place", ["teacher", "file", "file/below", "loop", "n" * 300], ids=lambda name: name[:9])
def test_a_long_job_writes_over_nothing(tmp_path: Path, place: str) -> None:
    """It may go on in its own folder alone: a training named its teacher's folder would write over its weights."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RequestError, match=r"^--out .*: .*; expected a folder|^--out .*config.json, which this"):
        begin_in(tmp_path / place, ("log.jsonl",))
    for made in range(2):
        begin_in(tmp_path / "new", ("log.jsonl",))
        (tmp_path / "new" / "log.jsonl").write_text(str(made))


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with alone_in(tmp_path):
            with pytest.raises(RequestError, match="another process works there"), alone_in(tmp_path):
                pass
            assert list(tmp_path.iterdir()) == []
