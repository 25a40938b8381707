"""The report for readers who have no device: written on any machine, with nothing private in it."""

import getpass
import json
import socket
import tempfile
from pathlib import Path

import pytest

from draftwood.tools.cli import main
from draftwood.tools.doctor.npu_report import without_names
from draftwood.tools.machine import probed


def test_a_laptop_is_told_what_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    out = tmp_path / "report.json"
    assert main(["doctor", "--npu", str(out)]) == 1
    text = capsys.readouterr().out
    assert "CANN          absent" in text and "atc           absent" in text
    assert "no     AscendCL: --engine acl: libascendcl.so cannot be loaded" in text
    assert "no     an NPU: torch_npu finds none" in text
    found = json.loads(out.read_text())
    assert found["probes"]["acl"][0]["works"] is False and found["doctor"]["can"]["run bundles"]["ok"]
    private = [socket.gethostname(), str(Path.home()), str(tmp_path), str(Path.cwd())]
    assert [name for name in private if name in out.read_text()] == []
    assert found["running"] is None and found["left"] == [] and found["minutes"] == 60
    assert main(["doctor", "--npu", str(tmp_path / "no" / "report.json")]) == 2


def test_a_probe_that_takes_its_process_along_is_told() -> None:
    (verdict,) = probed("draftwood.no_such_module")
    assert not verdict["works"] and "exit code 1: " in verdict["seen"] and "No module named" in verdict["seen"]


def test_names_and_folders_are_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    said = "alice@node17: /home/alice/models/om/a.om: cannot be read (~/x/y.so, ../up/z); 3/4 of it, and https"
    assert without_names({"a": [said, 3, None]}) == {
        "a": ["USER@MACHINE: .../a.om: cannot be read (.../y.so, .../z); 3/4 of it, and https", 3, None]
    }


def test_a_folder_with_a_blank_is_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the hour's bundles lie in, under a person's name."""
    monkeypatch.setattr(tempfile, "tempdir", "/data/Jane Doe/tmp")
    said = "/data/Jane Doe/tmp/draftwood-npu-1/wide/manifest.json: no such file; '/data/Jane Doe/tmp/x'"
    assert without_names(said) == ".../manifest.json: no such file; '.../x'"
