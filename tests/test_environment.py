"""torch and transformers import where torch_npu is installed without CANN."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from draftwood import environment

# As the real one without CANN: found, announced to torch as a backend, and impossible to import.
BROKEN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
ENTRY_POINTS = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
METADATA = "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"
GENERATE = """
import draftwood, torch
print(int(torch.ones(2).sum()))
draftwood.environment.hide_torch_npu()
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2).shape[1])
"""


@pytest.fixture
def no_cann(tmp_path: Path) -> dict[str, str | None]:
    """Variables of a process that finds a torch_npu, but no CANN."""
    site = tmp_path / "site"
    (site / "torch_npu").mkdir(parents=True)
    (site / "torch_npu" / "__init__.py").write_text(BROKEN)
    metadata = site / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (metadata / "METADATA").write_text(METADATA)
    absent = dict.fromkeys(["LD_LIBRARY_PATH", "ASCEND_HOME_PATH", environment.AUTOLOAD])
    return {**absent, "PYTHONPATH": str(site)}


def fake_library(path: Path) -> None:
    """Any library that loads will do; an extension module with no dependencies is always at hand."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(msgspec._core.__file__, path)


# Undoes the programs that an environment of ./draft runs at its start.
BARE = f"import os, sys; sys.modules.pop('torch_npu', None); os.environ.pop({environment.AUTOLOAD!r}, 0)\n"
BARE += "for name in [name for name in sys.modules if name.startswith('draftwood')]: del sys.modules[name]\n"


def test_torch_alone_does_not_import(python: Callable[..., str], no_cann: dict[str, str | None]) -> None:
    code = BARE + "try:\n import torch\nexcept RuntimeError as error:\n print(error)"
    assert "Failed to load the backend extension: torch_npu" in python(code, environment=no_cann)


def test_torch_and_transformers_import_behind_draftwood(
    python: Callable[..., str], no_cann: dict[str, str | None]
) -> None:
    assert python(BARE + GENERATE, environment=no_cann) == "2\n5\n"


def test_a_users_choice_stands(python: Callable[..., str], no_cann: dict[str, str | None]) -> None:
    code = f"import draftwood, os; print(os.environ[{environment.AUTOLOAD!r}])"
    assert python(code, environment={**no_cann, environment.AUTOLOAD: "1"}) == "1\n"


def test_a_hidden_torch_npu_is_still_found(python: Callable[..., str], no_cann: dict[str, str | None]) -> None:
    code = "from draftwood.environment import *; hide_torch_npu(); print(torch_npu_folder(), cann_available())"
    assert python(code, environment=no_cann) == f"{no_cann['PYTHONPATH']}/torch_npu False\n"


@pytest.mark.parametrize(("installed", "cann"), [(False, False), (True, True)], ids=["absent", "with CANN"])
def test_nothing_is_touched_without_need(installed: bool, cann: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.AUTOLOAD, raising=False)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(environment, "torch_npu_installed", lambda: installed)
    monkeypatch.setattr(environment, "cann_available", lambda: cann)
    environment.hide_torch_npu()
    assert environment.AUTOLOAD not in os.environ
    assert "torch_npu" not in sys.modules


def test_cann_on_the_library_path(python: Callable[..., str], no_cann: dict, tmp_path: Path) -> None:
    fake_library(tmp_path / "cann" / "libhccl.so")
    code = "from draftwood.environment import cann_available; print(cann_available())"
    assert python(code, environment={**no_cann, "LD_LIBRARY_PATH": str(tmp_path / "cann")}) == "True\n"


@pytest.mark.parametrize("missing", [None, "libgraph.so"], ids=["whole", "in part"])
def test_cann_at_its_home(
    missing: str | None, python: Callable[..., str], no_cann: dict[str, str | None], tmp_path: Path
) -> None:
    for name in set(environment.CANN_LIBRARIES) - {missing}:
        fake_library(tmp_path / "cann" / "lib64" / name)
    code = "from draftwood.environment import cann_available; print(cann_available())"
    home = {**no_cann, "ASCEND_HOME_PATH": str(tmp_path / "cann")}
    assert python(code, environment=home) == f"{missing is None}\n"


@pytest.mark.parametrize(
    ("said", "lacks"),
    [
        ("libascend_hal.so: cannot open shared object file: No such file or directory", "libascend_hal.so"),
        ("/cann/lib64/libhccl.so: cannot open shared object file: No such file or directory", ""),
        ("/cann/lib64/libhccl.so: undefined symbol: HcclX", ""),
    ],
)
def test_what_cann_lacks(said: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without the driver has all of CANN, and none of it loads."""

    def refused(name: str) -> None:
        raise OSError(said)

    monkeypatch.setattr(ctypes, "CDLL", refused)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment.cann_lacks() == ""  # it has no libraries at all
    (tmp_path / "lib64").mkdir()
    assert environment.cann_lacks() == lacks


# Files as installed releases have them: besides the release a build, the layout's own version, older releases.
TOOLKIT = """package_name=Ascend-cann-toolkit
version={version}
innerversion=V100R001C21SPC001B238
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21]
arch=aarch64
os=linux
path=/usr/local/Ascend/ascend-toolkit/{version}/aarch64-linux
"""
CFG = "# version: 1.0\nruntime_running_version=[7.7.0.1.238:{version}]\nopp_running_version=[7.7.0.1.238:{version}]\n"
INFO = "Version=7.7.0.1.238\nversion_dir={version}\ntimestamp=20250410_000213\n"


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"version.cfg": CFG, "runtime/version.info": INFO}, "8.1.RC1"),
        ({"compiler/version.info": INFO}, "8.1.RC1"),
        ({"version.cfg": CFG, "aarch64-linux/ascend_toolkit_install.info": TOOLKIT}, "8.3.RC2"),
        ({"x86_64-linux/ascend_toolkit_install.info": TOOLKIT}, "9.1.0"),
        ({"aarch64-linux/ascend_toolkit_install.info": TOOLKIT}, "9.2.0-beta.2"),
        ({"opp/version.info": "Version={version}\nversion_dir=cann-{version}\nrequired_driver=25.2\n"}, "8.5.0"),
        ({"runtime/version.info": "Version={version}\nother=1.2\n"}, "8.5.0.alpha002"),
        ({"runtime/version.info": "Version=7.7.0.1.238\n", "version.cfg": "# version: 1.0\n"}, None),
        ({}, None),
    ],
)
def test_the_release_of_cann(
    files: dict[str, str], version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.format(version=version))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment.cann_version() == version


def test_a_repairs_number_is_no_other_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.cfg").write_text(CFG.format(version="8.5.0.1"))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment.cann_version() == "8.5.0"


@pytest.mark.parametrize("home", ["", "nowhere", "/etc/passwd", "/a" * 3000])
def test_a_home_that_is_none_is_no_cann(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", home)
    assert environment.cann_folder() is None and environment.cann_version() is None


def test_windows_is_told(python: Callable[..., str]) -> None:
    code = "sys.platform = 'win32'\ntry:\n import draftwood\nexcept ImportError as error: print(error)"
    assert python(BARE + code).startswith("draftwood runs on Linux and macOS, and not on Windows")


def test_importing_draftwood_imports_nothing_heavy(python: Callable[..., str]) -> None:
    code = "import draftwood, sys; print({'numpy', 'torch', 'msgspec', 'onnxruntime'} & set(sys.modules))"
    assert python(code) == "set()\n"
