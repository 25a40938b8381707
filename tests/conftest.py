"""Shared by all tests, and loaded before any of them imports torch or transformers."""

import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# `python -m pytest` puts the checkout on the path; transformers would then take our kernels/ for its own `kernels`. The
# installed draftwood is tested, so nothing is lost.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from draftwood.environment import hide_torch_npu  # noqa: E402
from draftwood.threads import share_threads  # noqa: E402

hide_torch_npu()
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # tests import openvino by themselves

# Proofs of opened bundles are remembered next to the tests' own files, not in a home.
_cache = tempfile.TemporaryDirectory(prefix="draftwood-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
os.environ["PIP_NO_INDEX"] = "1"  # the demo's model is never downloaded by a test

# Threads only quarrel over work this small: on a busy machine the suite takes minutes more with them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
share_threads(1)

settings.register_profile("draftwood", derandomize=True, deadline=None)
settings.load_profile("draftwood")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers have to collect tests of the same ids, and an object's address is another one in each."""
    if unlike := [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]{6}", item.nodeid)]:
        raise pytest.UsageError(f"{unlike[0]}: an id has an object's address; expected a name")


def pytest_collection_finish() -> None:
    """What the tests' modules have loaded stays, so it is not looked at again. What traces leave is hardly garbage:
    looking for some after every 700 objects takes a tenth of the run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {blocked!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Runs code in a fresh interpreter outside the checkout and returns its output.

    Modules in ``blocked``, and all below them, look as if they were not installed. ``environment`` is added
    to the inherited variables; None removes one.
    """

    def run(code: str, blocked: Iterable[str] = (), environment: Mapping[str, str | None] | None = None) -> str:
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(
            [sys.executable, "-c", BLOCKER.format(blocked=tuple(blocked)) + code],
            cwd=tmp_path,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
RAGGED = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return save_teacher(tmp_path_factory.mktemp("teacher"), TINY)


@pytest.fixture(scope="session")
def three_layer_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that drafters with features can learn from: they read three layers."""
    return save_teacher(tmp_path_factory.mktemp("deeper"), TINY | {"num_hidden_layers": 3})


@pytest.fixture(scope="session")
def save_tiny() -> Callable[..., Path]:
    """Writes a tiny teacher of any family, as config.json's fields say, into a folder that is there."""
    return lambda folder, **fields: save_teacher(folder, TINY | fields)


def save_teacher(folder: Path, config: dict) -> Path:
    # torch is imported after torch_npu is hidden, and by tests that need it alone.
    from draftwood.tests import random_models

    return random_models.save_teacher(folder, config)


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draftwood.tests import random_models

    return random_models.save_medusa(tmp_path_factory.mktemp("heads"), TINY)


@pytest.fixture(scope="session")
def kept(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder once for all workers, and for later runs of the same sources. Read only."""
    from draftwood.compiler.bundle.staging import exclusive

    def of(name: str, make: Callable[[Path], object]) -> Path:
        store = getattr(pytestconfig, "cache", None)
        place = store.mkdir("bundles") if store else tmp_path_factory.mktemp("bundles")
        folder = place / f"{name}-{_sources()}"
        with exclusive(folder):
            if not folder.exists():
                for old in place.glob(f"{name}-*"):
                    shutil.rmtree(old)
                make(folder)
        return folder

    return of


@cache
def _sources() -> str:
    """A digest of all that a bundle of the tests is made by."""
    files = {ROOT / "constraints.txt", *Path(__file__).parent.glob("*.py"), *ROOT.glob("*.py")}
    files |= {path for folder in ("trees", "kernels", "compiler") for path in (ROOT / folder).rglob("*.py")}
    files |= {path for path in Path(__file__).parent.rglob("*.py") if b"kept(" in path.read_bytes()}  # with its request
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]


@pytest.fixture(scope="session")
def tiny_bundle(tiny_teacher: Path, tiny_heads: Path, kept: Callable[..., Path]) -> Path:
    """Gears of three trees at two KV lengths. Read only: tests that alter a bundle copy it."""
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.trees import Topology

    trees = (("plain", Topology.plain()), ("chain-2", Topology.chain(2)), ("ragged", Topology.from_paths(RAGGED)))
    request = BuildRequest(model=tiny_teacher, drafter=tiny_heads, trees=trees, slots=(128, 256), bitwise=True, texts=4)
    return kept("tiny", lambda folder: build(request, folder))


@pytest.fixture(scope="session")
def tiny_eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draftwood.tests import random_models

    return random_models.save_eagle3(tmp_path_factory.mktemp("eagle3"), TINY)


@pytest.fixture(scope="session")
def tiny_fasteagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draftwood.tests import random_models

    return random_models.save_fasteagle(tmp_path_factory.mktemp("fasteagle"), TINY)


@pytest.fixture(scope="session")
def tiny_drafters(tiny_eagle3: Path, tiny_fasteagle: Path) -> dict[str, Path]:
    """The drafters with caches, by kind."""
    return {"eagle3": tiny_eagle3, "fasteagle": tiny_fasteagle}


@pytest.fixture(scope="session")
def tiny_draft_bundles(
    tiny_teacher: Path, tiny_drafters: dict[str, Path], kept: Callable[..., Path]
) -> dict[str, Path]:
    """A bundle for each drafter with caches; all trees have seven rows, so one graph verifies them. Read only.

    FastEagle's has two KV lengths, EAGLE-3's, whose every tree has a draft graph, one.
    """
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.trees import Topology
    from draftwood.trees.spec import Budget

    fixed = (
        ("plain", Topology.plain()),
        ("backbone", Topology.backbone(3, 2)),
        ("planned", Topology.from_paths(((0,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 2)))),
    )
    folders, kinds = {}, [*tiny_drafters]
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        kinds.reverse()  # two workers build one each, and neither waits for the other
    for kind in kinds:
        drafter, trees, slots = tiny_drafters[kind], fixed, (128, 256)
        if kind == "eagle3":
            trees, slots = (*fixed, ("budget", Budget(6, 3, 3))), (128,)
        request = BuildRequest(
            model=tiny_teacher, drafter=drafter, trees=trees, slots=slots, prefill_rows=(16,), bitwise=True, texts=4
        )
        folders[kind] = kept(kind, partial(build, request))
    return folders


@pytest.fixture(scope="session")
def tiny_bundles(tiny_bundle: Path, tiny_draft_bundles: dict[str, Path]) -> dict[str, Path]:
    """A bundle of every kind that drafts another way: Medusa's heads, a tree that grows, a cascade. Read only."""
    return {"medusa": tiny_bundle, **tiny_draft_bundles}


@pytest.fixture(scope="session")
def npu_bundle(tiny_teacher: Path, tiny_heads: Path, kept: Callable[..., Path]) -> Path:
    """Plain decoding and a tree of Medusa heads at one KV length, for CPUs and for an NPU. Read only."""
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.trees import Topology

    trees = (("plain", Topology.plain()), ("backbone", Topology.backbone(2, 3)))
    request = BuildRequest(
        model=tiny_teacher, drafter=tiny_heads, trees=trees, slots=(128,), prefill_rows=(16,), targets=("onnx", "ge")
    )
    return kept("npu", partial(build, request))


@pytest.fixture(scope="session")
def whole_bundle(tiny_teacher: Path, tiny_heads: Path, kept: Callable[..., Path]) -> Path:
    """Plain decoding, a tree of Medusa heads and one that is looked up, for an NPU alone; a step of the first two is
    one graph as well. Read only."""
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.trees import Topology
    from draftwood.trees.spec import read_specs

    lookup = read_specs("lookup:chain:6").trees[-1]  # as many rows as the other
    trees = (("plain", Topology.plain()), ("fixed", Topology.from_paths(RAGGED)), lookup)
    request = BuildRequest(
        model=tiny_teacher,
        drafter=tiny_heads,
        trees=trees,
        slots=(128,),
        prefill_rows=(16,),
        targets=("ge",),
        whole=True,
    )
    return kept("whole", partial(build, request))


@pytest.fixture(scope="session")
def save_quantised() -> Callable[..., Path]:
    """Copies a teacher's folder with its linear layers in int8, as a publisher of compressed-tensors would.

    The nearest of 255 steps, nothing of ours in between; ``head`` says whether the output matrix is one of them.
    """
    import torch
    from safetensors.torch import load_file, save_file

    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }

    def save(teacher: Path, folder: Path, head: bool = True) -> Path:
        shutil.copytree(teacher, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((teacher / "config.json").read_text())
        said = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
        said |= {"config_groups": {"group_0": group}, "ignore": [] if head else ["lm_head"]}
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        tensors = load_file(teacher / "model.safetensors")
        for name in [name for name, value in tensors.items() if value.dim() == 2 and "embed" not in name]:
            if head or name != "lm_head.weight":
                scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (tensors[name].float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale
        save_file(tensors, folder / "model.safetensors")
        return folder

    return save


@pytest.fixture(scope="session")
def quantised_teacher(
    tiny_teacher: Path, save_quantised: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny teacher, all of its linear layers in int8."""
    return save_quantised(tiny_teacher, tmp_path_factory.mktemp("quantised") / "teacher")


@pytest.fixture(scope="session")
def save_one_pass() -> dict[str, Callable[[Path], None]]:
    """Writes a random drafter of a kind, for the tiny teacher, into a folder, which it makes."""
    from draftwood.tests import random_models

    kinds = ("peagle", "dflash", "dspark")
    return {kind: partial(getattr(random_models, f"save_{kind}"), sizes=TINY) for kind in kinds}
