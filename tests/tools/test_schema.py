"""The published format of a manifest, held against its readers."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from draftwood.errors import BundleError
from draftwood.manifest import Manifest, read_manifest
from draftwood.tests.fuzz.mutate import json_damaged
from draftwood.tests.house.schema import main, manifest_schema

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "bundle-format.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(manifest_schema())


def by_schema(data: bytes) -> bool:
    try:
        return VALIDATOR.is_valid(json.loads(data))
    except (ValueError, RecursionError):  # no JSON at all
        return False


def by_reader(folder: Path, data: bytes) -> Manifest | None:
    (folder / "manifest.json").write_bytes(data)
    try:
        return read_manifest(folder)
    except BundleError:
        return None


def test_the_published_schema_is_that_of_the_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert json.loads(PUBLISHED.read_text()) == json.loads(capsys.readouterr().out) == manifest_schema()


def test_what_a_build_writes_is_valid(tiny_bundles: dict[str, Path]) -> None:
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    for folder in tiny_bundles.values():
        VALIDATOR.validate(json.loads((folder / "manifest.json").read_bytes()))


def test_what_the_schema_refuses_the_reader_refuses(tiny_bundle: Path, tmp_path: Path) -> None:
    data = (tiny_bundle / "manifest.json").read_bytes()
    mutations = [json_damaged(data, random.Random(number)) for number in range(200)]
    read = [mutated for mutated in mutations if by_reader(tmp_path, mutated) is not None]
    for mutated in read:
        assert by_schema(mutated), mutated[:2000]
    # Or the mutations show nothing.
    assert len(read) < 100 and sum(map(by_schema, mutations[:40])) < 20


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../b", "./a", "a//b", "a\\b", "a\nb", "", ".hidden", "a/"])
def test_a_path_out_of_the_bundle_is_refused_by_both(name: str, tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((tiny_bundle / "manifest.json").read_bytes()) | {"weights": name}
    data = json.dumps(manifest).encode()
    assert not by_schema(data) and by_reader(tmp_path, data) is None
