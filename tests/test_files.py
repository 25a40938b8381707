"""Reading what may be anything."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood.errors import UserError
from draftwood.files import (
    absolute_path,
    cache_home,
    json_text,
    lines_of,
    open_regular,
    read_regular,
    read_text,
    write_whole,
)
from draftwood.tools.prompts import numbered_lines


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("é\r\nb\r".encode())
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link") == path.read_bytes()
    assert read_text(path) == "é\nb\n"


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"])), max_size=5),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    mark=st.booleans(),
    last=st.booleans(),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_is_read_whatever_editor_wrote_it(
    tmp_path: Path, lines: list[str], end: str, mark: bool, last: bool
) -> None:
    """Of all planes; JSON lines come back as they were."""
    path, values = tmp_path / "a", [{"prompt": line} for line in lines]
    for written in (lines, [json.dumps(value, ensure_ascii=False) for value in values]):
        text = end.join(written) + (end if last and written else "")
        if not mark and text.startswith("\ufeff"):
            continue  # a mark, as far as a file tells
        path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode())
        assert read_text(path) == text.replace(end, "\n")
    assert [json.loads(line) for line in lines_of(read_text(path))] == values
    found = [(prompt["prompt"]) for prompt in (json.loads(line) for _, line in numbered_lines(path))]
    assert found == lines


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a").write_bytes('{"prompt": "the cat"}\n'.encode(encoding))
    with pytest.raises(OSError, match=f"{encoding[:6].upper()} text, expected UTF-8"):
        read_text(tmp_path / "a")


@pytest.mark.parametrize("name", ["fifo", "folder", "/dev/zero", "/dev/stdin", "nowhere", "a\0b", "x" * 300])
def test_anything_else_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for read in (open_regular, read_regular, read_text):
        with pytest.raises(OSError) as caught:
            read(tmp_path / name)
        assert caught.value.strerror


def test_a_file_that_is_too_large_or_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc\xff")
    assert len(read_regular(tmp_path / "a", 4)) == 4
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_regular(tmp_path / "a", 3)
    with pytest.raises(OSError, match="not UTF-8 text at byte 3"):
        read_text(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb", r"a\nb"), ("\x1b[2J\0", r"\x1b[2J\x00"), ("é 🌳 ok", "é 🌳 ok"), ("\ud800", r"\ud800")],
)
def test_a_refusal_is_one_printable_line(text: str, shown: str) -> None:
    assert str(UserError(text)) == shown


def test_a_refusal_is_not_longer_than_a_screen() -> None:
    line = str(UserError(f"begin {'x' * 100_000} end"))
    assert len(line) < 2100 and line.startswith("begin x") and line.endswith("x end")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    write_whole(tmp_path / "a", b"after")
    assert (tmp_path / "a").read_text() == "after"
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "nowhere" / "a", tmp_path / "a" / "b"):
        with pytest.raises(OSError):
            write_whole(target, b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """Who runs it as root with --out /dev/null would have no /dev/null afterwards."""
    (tmp_path / "link").symlink_to("a")
    for content in (b"new", b"old"):
        write_whole(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"content")
    assert os.read(reader, 100) == b"content" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link", "pipe"]


def test_caches_lie_where_the_user_keeps_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.setenv("HOME", "/somebody")
    for relative in ("", "caches"):  # the standard: a path that is not absolute is to be ignored
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_home() == Path("/somebody/.cache")


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Whoever limits a process to less than the largest file may still read small ones."""
    (tmp_path / "small").write_bytes(b"x" * 100)
    tracemalloc.start()
    assert len(read_regular(tmp_path / "small")) == 100
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 << 20


def test_a_file_keeps_its_own_name_among_links_and_a_folder_does_not(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "0a1b").touch()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "link" / "model.gguf").symlink_to("0a1b")
    assert absolute_path(tmp_path / "link") == tmp_path / "folder"
    assert absolute_path(tmp_path / "link" / "model.gguf") == tmp_path / "folder" / "model.gguf"


def test_json_has_no_form_of_what_is_no_number() -> None:
    value = {"a": [1.5, float("inf"), {"b": (float("nan"), "NaN")}]}
    assert json_text(value) == '{"a": [1.5, null, {"b": [null, "NaN"]}]}'
