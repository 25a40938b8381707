"""The files that docs/cluster.md points to, as far as they can be tried without a cluster."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwood.tools import cli
from draftwood.tools.commands import serve

FILES = Path(__file__).resolve().parents[1] / "docs" / "deploy"
# Of Kubernetes; what it takes newer ones take.
RELEASE = "1.33"


def understood(words: list[str]) -> Any:
    """The command line's parse of the words; SystemExit if it refuses them."""
    return cli._parse(cli.DRAFTWOOD, words[0], importlib.import_module(f"draftwood.tools.commands.{words[0]}"), words)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("room=3", "expected NAME=N, of waiting, per-key"),
        ("body", "expected a number from 1 to 1073741824"),
        ("drain=-1", "expected a number from 0 to 86400"),
        ("tokens=0", "expected a number from 1"),
        ("deadline=1.5", "expected a number"),
    ],
)
def test_limits_are_known_and_within_bounds(limit: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        understood(["serve", "bundle", "--limit", limit])
    assert said in capsys.readouterr().err
    args = understood(["serve", "bundle", "--limit", "drain=1", "--limit", "per-key=2", "--limit", "drain=3"])
    found = {name: default for name, (_, _, default, _) in serve.LIMITS.items()} | {"per-key": 2, "drain": 3}
    assert serve.limits_of(args) == found


def test_keys_of_the_environment_are_inherited_by_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(serve.KEYS, "one,two")
    assert cli.main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 2  # no bundle; without keys the host is refused
    assert serve.KEYS not in os.environ


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: manifest["kind"])
def test_kubernetes_takes_the_manifest(manifest: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(manifest, RELEASE, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(manifest | {"spce": {}}, RELEASE, strict=True)


def test_the_pod_says_what_the_command_takes() -> None:
    deployment, service, *_ = manifests()
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = understood(container["args"])
    assert args.threads == int(container["resources"]["limits"]["cpu"])
    assert serve.limits_of(args)["drain"] + 5 < pod["spec"]["terminationGracePeriodSeconds"]
    assert {str(args.api_key_file.parent), *args.bundles} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
    # A scraper that follows annotations has no key, and gets 401.
    assert "prometheus.io/scrape" not in pod["metadata"].get("annotations", {}) or not args.api_key_file
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]


def test_the_container_says_what_the_command_takes() -> None:
    text = (FILES / "Containerfile").read_text()
    lines = dict(line.split(" ", 1) for line in text.splitlines() if line[:1] != "#")
    assert json.loads(lines["ENTRYPOINT"]) == ["tini", "--", "draftwood"]
    assert " install -y --no-install-recommends tini " in text
    assert understood(json.loads(lines["CMD"])).port == int(lines["EXPOSE"])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (FILES / "draftwood.service").read_text()
    (line,) = re.findall(r"^ExecStart=\S+/draftwood (.*)$", text, re.MULTILINE)
    drain = serve.limits_of(understood(shlex.split(line)))["drain"]
    assert drain < int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "draftwood.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text))
    for given, code in ((unit.read_text(), 0), (unit.read_text().replace("mixed", "mixture"), 1)):
        unit.write_text(given)
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=300)
        assert bool(done.returncode or done.stderr.strip()) == code, done.stderr
