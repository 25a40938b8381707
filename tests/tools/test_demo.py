"""``draftwood demo`` and what its name stands for; a tiny file takes the place of the model, so nothing is fetched."""

import json
import os
from pathlib import Path

import pytest

from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.tuned import tuned_times
from draftwood.tests.gguf_files import save_gguf
from draftwood.tools import demo
from draftwood.tools.cli import main
from draftwood.tools.commands import demo as command
from draftwood.tools.demo import fetch, language_model
from draftwood.tools.demo.language_model import SHOWN


@pytest.fixture
def model(tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny file in the blocks of SmolLM2's, fewer graphs, and less to ask."""
    path = tmp_path / "model.gguf"
    save_gguf(tiny_teacher, path, "Q4_1")
    monkeypatch.setattr(fetch, "model", lambda: path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lookups = "lookup:chain:3,lookup:chain:7"
    for name, value in (
        ("SLOTS", 512),
        ("PREFILL_ROWS", (32,)),
        ("SEQUENCES", 2),
        ("DRAFTER", None),
        ("TREES", lookups),
    ):
        monkeypatch.setattr(language_model, name, value)
    for name, value in (("TUNE_SECONDS", 0.1), ("NEW_TOKENS", 16)):
        monkeypatch.setattr(command, name, value)
    return path


@pytest.mark.parametrize("file", ["contract.py", "trees/walk.py", "model.gguf"])
def test_its_bundle_is_named_by_all_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "tools" / "demo")
    (tmp_path / "trees").mkdir()
    (tmp_path / file).touch()
    (tmp_path / "model.gguf").touch()
    request = BuildRequest(model=tmp_path / "model.gguf", drafter=None, trees=(), slots=())
    before = command._cache_folder(request)
    assert command._cache_folder(request) == before
    (tmp_path / file).write_text("changed")
    assert command._cache_folder(request) != before


def test_it_builds_times_and_asks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="demo: not built yet"):
        demo.bundle("demo")
    earlier = [model.parent / "draftwood" / f"{demo.KEPT}-{number}" for number in range(3)]
    for number, folder in enumerate(earlier):
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    assert main(["demo", "--json"]) == 0
    assert [folder.exists() for folder in earlier] == [False, False, True]
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["prompts"]) == 12 and sum(gear["fixed"] for gear in report["gears"]) == 1
    assert all(
        gear[figure] > 0 for gear in report["gears"] for figure in ("accept_length", "ms_a_step", "tokens_per_s")
    )
    assert set(report["speedup"]) == {"fixed", "adaptive"}
    bundle = Bundle.open(Path(report["bundle"]))
    assert bundle.manifest.packed and max(graph.batch for graph in bundle.manifest.graphs_of("onnx")) == 2
    assert tuned_times(bundle, "cpu", None)
    # The same bundle again, as text; demo stands for it wherever a bundle is asked for.
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "12 of 12 answers are plain decoding's" in said and all(f"The answer to '{one}'" in said for one in SHOWN)
    newer = bundle.folder.with_name(f"{demo.KEPT}-of-another-version")
    newer.mkdir()
    (newer / "manifest.json").write_text('{"schema_version": 1}')
    assert demo.bundle("demo") == bundle.folder


def test_its_name_is_the_model_where_one_is_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.resolve("demo") == model
    assert main(["inspect", "demo"]) == 0 and "llama" in capsys.readouterr().out
    table = tmp_path / "table.json"
    device = ["profile", "--device", "ascend-910b3", "--rows", "1,4", "--kv", "128"]
    assert main([*device, "demo", "--out", str(table)]) == 0
    assert json.loads(table.read_text())["teacher"]["name"] == "model.gguf"
    assert main(["build", "demo", "--drafter", "demo-eagle4", "--out", str(tmp_path / "b")]) == 2
    assert "demo-eagle4: no drafter; expected a folder" in capsys.readouterr().err
    texts = tmp_path / "texts"
    texts.mkdir()
    assert main(["distill", "demo", "--out", str(texts), "--data", str(texts)]) == 2
    assert main(["train", "medusa", "demo", str(texts), "--out", str(tmp_path / "heads")]) == 2
    assert all(str(texts) in line for line in capsys.readouterr().err.splitlines())
    # A folder of that name is a folder.
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert demo.resolve("demo") == demo.bundle("demo") == Path("demo")


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle", "medusa"])
def test_the_drafters_that_are_shipped_are_smollm2s(tmp_path: Path, kind: str) -> None:
    """SmolLM2's sizes stand here, since its file is not at hand."""
    sizes = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
        "rope_theta": 1e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    folder = demo.resolve(f"demo-{kind}")
    drafter = open_drafter(folder, Checkpoint.describe(tmp_path))
    assert drafter.model.kind == kind
    assert kind == "medusa" or len(drafter.checkpoint.ids) == 8192
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12_000_000
    assert (folder == language_model.DRAFTER) == (kind == "eagle3")


@pytest.mark.parametrize("command", ["bench", "chat", "check", "run", "tune"])
def test_commands_take_the_demos_bundle(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [command, "demo", *(["--prompt", "Hello"] if command == "run" else [])]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "draftwood: error: demo: not built yet by this version; draftwood demo builds it, in two minutes\n"
    )


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A container may run as a user that it does not know."""

    def nowhere() -> Path:
        raise OSError("this user has no home")

    monkeypatch.setattr(demo, "cache_home", nowhere)
    assert main(["tune", "demo"]) == 2
    assert capsys.readouterr().err == (
        "draftwood: error: demo: its bundle is in the user's cache, but this user has no home; set XDG_CACHE_HOME\n"
    )
