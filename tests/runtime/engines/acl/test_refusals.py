"""Faults of a machine or a compiled bundle: one line, what and the way out, and nothing left open."""

import platform
import shutil
import subprocess
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from draftwood.errors import RequestError, UserError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.acl import AclEngine
from draftwood.runtime.engines.acl.engine import compiled
from draftwood.runtime.engines.acl.library import LEAST_CANN, Library
from draftwood.versions import LEAST

from .test_decoding import decoded


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_no_library(compiled_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    said = refused(lambda: AclEngine(Bundle.open(compiled_bundle)))
    assert said.startswith("--engine acl: libascendcl.so cannot be loaded (") and "CANN 8.5.0 or later" in said


def test_a_library_of_an_older_cann() -> None:
    said = refused(lambda: Library(CDLL(None), "libascendcl.so"))
    assert said.startswith("libascendcl.so: has no function aclInit; expected AscendCL of CANN 8.5.0 or later")
    assert next(need.cann for need in LEAST if need.feature == "weights shared by all .om files") == LEAST_CANN


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (107001, "no such device, or it is not open; look at npu-smi info and at ASCEND_RT_VISIBLE_DEVICES"),
        (507033, "the driver cannot open the device; npu-smi info says if another container holds it"),
        (507035, "a kernel failed on the device; the device may need a restart"),  # of a vector core
        (207006, "this user may not use the device; add it to the driver's group, HwHiAiUser"),
    ],
)
def test_codes_that_users_report(code: int, said: str) -> None:
    from .ascendcl import AscendCL

    acl = AscendCL()
    acl.fails = {"aclrtSetDevice": (1, code)}
    assert said in refused(lambda: Library(acl.handle)) and acl.done() == []


def with_sets(folder: Path, **fields: int | str) -> Bundle:
    """The bundle as if its graph sets were other ones."""
    bundle = Bundle.open(folder)
    sets = tuple(msgspec.structs.replace(one, **fields) for one in bundle.manifest.graph_sets)
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, graph_sets=sets))


def test_a_path_that_cann_does_not_read(tmp_path: Path) -> None:
    assert "move the bundle" in refused(lambda: compiled(tmp_path / "my models"))
    assert "holds no .om files" in refused(lambda: compiled(tmp_path / "模型"))


def test_a_bundle_that_is_not_for_one_npu(compiled_bundle: Path) -> None:
    assert refused(lambda: AclEngine(with_sets(compiled_bundle, target="onnx"))).endswith("with --target onnx,ge")
    said = refused(lambda: AclEngine(with_sets(compiled_bundle, ranks=2)))
    assert "is for 2 devices, which ATC cannot compile for" in said


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda om: shutil.rmtree(om), "holds no .om files, or not all; run"),
        (lambda om: (om / "manifest.sha256").unlink(), "holds no .om files, or not all; run"),
        (lambda om: (om / "manifest.sha256").write_text("0" * 64), "made of another build of the bundle"),
        (
            lambda om: (om / "manifest.sha256").write_text(
                (om / "manifest.sha256").read_text().replace("Ascend910B3", "Ascend910B4")
            ),
            "npu/om: compiled for Ascend910B4, and the device is Ascend910B3; run SOC_VERSION=Ascend910B3 sh ",
        ),
        (lambda om: (om / "decode-kv128.om").unlink(), "decode-kv128.om: missing; run"),
        (lambda om: shutil.rmtree(om / "weight"), "weight: no weights; expected the files that atc.sh makes"),
        (lambda om: (om / "draft.om").write_bytes(b"other"), "draft.om: aclmdlQuerySize: error 100016, this CANN"),
        (
            lambda om: shutil.copy(om / "draft.om", om / "decode-kv128.om"),
            "decode-kv128.om: inputs features, noise; expected ",
        ),
        (
            lambda om: shutil.copy(om / "prefill-t16-kv128.om", om / "verify-t7-kv128.om"),
            "verify-t7-kv128.om: inputs",
        ),
    ],
)  # fmt: skip
def test_a_bundle_that_was_not_compiled_as_it_is(altered: Path, opened: Callable, alter: Callable, said: str) -> None:
    alter(altered / "npu" / "om")
    assert said in refused(lambda: opened(altered))


def test_a_model_is_found_by_the_name_that_has_the_hosts_system(altered: Path, opened: Callable) -> None:
    """ATC names it so if the model holds code for the host."""
    om = altered / "npu" / "om"
    (om / "draft.om").rename(om / f"draft_linux_{platform.machine()}.om")
    opened(altered)


def test_a_model_of_another_type(altered: Path, opened: Callable) -> None:
    """As ATC makes it where its default precision is not overruled."""
    path = altered / "npu" / "om" / "draft.om"
    path.write_bytes(path.read_bytes().replace(b'"described": {}', b'"described": {"features": "float16"}'))
    said = refused(lambda: opened(altered))
    assert "draft.om: input features is float16 of" in said and "expected bfloat16" in said


def test_a_device_without_room(compiled_bundle: Path, opened: Callable) -> None:
    said = refused(lambda: opened(compiled_bundle, room=100_000))
    assert said.startswith("weights, ") and "error 207001, the device's memory is full" in said
    engine, acl = opened(compiled_bundle, room=700_000)
    assert "a buffer [" in refused(lambda: [engine.begin(128) for _ in range(9)]) and acl.misuses == []


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("aclrtSynchronizeStream", 507015, "graph decode-kv128: aclrtSynchronizeStream: error 507015, a kernel failed"),
        (
            "aclmdlExecuteAsync",
            12345,
            "error 12345, see aclError in CANN's documents (why it failed); take --engine ge",
        ),
    ],
)
def test_a_code_is_told(compiled_bundle: Path, opened: Callable, function: str, code: int, said: str) -> None:
    engine, acl = opened(compiled_bundle)
    decoded(engine, 0.0, plain=True, tokens=2)
    acl.fails, acl.message = {function: (acl.calls.count(function) + 2, code)}, "why it\n failed"
    with pytest.raises(RequestError) as raised:
        decoded(engine, 0.0, plain=True, tokens=8)
    assert said in str(raised.value)
    acl.fails = {}


def test_a_model_that_cannot_be_loaded_leaves_nothing(compiled_bundle: Path, opened: Callable) -> None:
    from .ascendcl import AscendCL

    acl = AscendCL()
    acl.fails = {"aclmdlLoadWithConfig": (3, 245000)}
    library = Library(acl.handle)
    said = refused(lambda: AclEngine(Bundle.open(compiled_bundle), library=library))
    assert "verify-t7-kv128.om: aclmdlLoadWithConfig: error 245000, the device's memory is full" in said
    library.finish()
    assert acl.done() == []


def test_atc_is_missing(altered: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", str(altered / "npu" / "atc.sh")], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"{altered}/npu/atc.sh: atc is not on the path; source CANN's set_env.sh first"]
    assert (altered / "npu" / "om" / "draft.om").is_file(), "what was there before is kept"
