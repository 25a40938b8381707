"""Shared by all tests, and loaded before any of them imports torch or transformers."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# `python -m pytest` puts the checkout on the path; transformers would then take our kernels/ for its own `kernels`. The
# installed draftwood is tested, so nothing is lost.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from draftwood.environment import hide_torch_npu  # noqa: E402
from draftwood.runtime.engines.sessions import share_threads  # noqa: E402

hide_torch_npu()

# Proofs of opened bundles are remembered next to the tests' own files, not in a home.
_cache = tempfile.TemporaryDirectory(prefix="draftwood-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
os.environ["PIP_NO_INDEX"] = "1"  # the demo's model is never downloaded by a test

# Threads only quarrel over work this small: on a busy machine the suite takes minutes more with them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
share_threads(1)

settings.register_profile("draftwood", derandomize=True, deadline=None)
settings.load_profile("draftwood")

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
    """A random teacher whose output matrix nearly is its embedding, so that its text repeats and drafts hit."""
    import torch
    from safetensors.torch import save_file

    from draftwood.compiler.teachers.checkpoint import expected_tensors
    from draftwood.compiler.teachers.registry import read_config
    from draftwood.tests.bpe import save_tokenizer, train_tokenizer

    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=random) * 0.12
        for name, shape in expected_tensors(read_config(folder)).items()
    }
    noise = torch.randn(tensors["lm_head.weight"].shape, generator=random) * 0.05
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + noise
    save_file(tensors, folder / "model.safetensors")
    rows = [{"id": "0", "text": "the cat sat on the mat and the hat"}] * 9
    save_tokenizer(train_tokenizer(rows, config["vocab_size"]), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random Medusa heads, tied to the teacher's output matrix."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("heads")
    random = torch.Generator().manual_seed(1)
    blocks = {f"{i}.0.linear.weight": torch.randn(64, 64, generator=random) * 0.05 for i in range(2)}
    blocks |= {f"{i}.0.linear.bias": torch.zeros(64) for i in range(2)}
    save_file(blocks, folder / "medusa_lm_head.safetensors")
    return folder


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
    files = [ROOT / "constraints.txt", Path(__file__), *ROOT.glob("*.py")]
    files += [path for folder in ("trees", "kernels", "compiler") for path in (ROOT / folder).rglob("*.py")]
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


def drafter_block(width: int, random: object) -> dict:
    """A decoder block as wide as the tiny teacher's, random, its q, k and v reading ``width`` features."""
    import torch

    rows = {"q": 64, "k": 32, "v": 32}
    tensors = {f"self_attn.{side}_proj.weight": torch.randn(n, width, generator=random) for side, n in rows.items()}
    tensors |= {f"mlp.{side}_proj.weight": torch.randn(96, 64, generator=random) for side in ("gate", "up")}
    tensors["self_attn.o_proj.weight"] = torch.randn(64, 64, generator=random)
    tensors["mlp.down_proj.weight"] = torch.randn(64, 96, generator=random)
    norms = {name: torch.ones(64) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    return {name: tensor * 0.05 for name, tensor in tensors.items()} | norms


def save_drafter(folder: Path, fields: dict, tensors: dict, ids: object) -> Path:
    """A drafter that proposes the teacher's tokens ``ids``, reads all its states and has its output matrix."""
    import torch
    from safetensors.torch import save_file

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {name: TINY[name] for name in (*names, "rms_norm_eps", "rope_theta")}
    config |= {"draft_vocab_size": len(ids), "target_hidden_size": 64, "aux_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(
        tensors | {"d2t": ids - torch.arange(len(ids)), "norm.weight": torch.ones(64)}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture(scope="session")
def tiny_eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 drafter that mostly proposes the last token again, of most of the teacher's tokens."""
    import torch

    random = torch.Generator().manual_seed(2)
    tensors = {f"midlayer.{name}": tensor for name, tensor in drafter_block(128, random).items()}
    tensors["midlayer.hidden_norm.weight"] = torch.ones(64)
    tensors["fc.weight"] = torch.cat((torch.eye(64), torch.randn(64, 128, generator=random) * 0.02), 1)
    ids = torch.arange(300)[torch.arange(300) % 7 != 6]
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return save_drafter(tmp_path_factory.mktemp("eagle3"), fields, tensors, ids)


@pytest.fixture(scope="session")
def tiny_fasteagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random FastEagle cascade of three levels of the same habit."""
    import torch

    random = torch.Generator().manual_seed(3)
    tensors = {f"layers.{i}.{name}": tensor for i in range(3) for name, tensor in drafter_block(64, random).items()}
    tensors["fc.weight"] = torch.randn(64, 192, generator=random) * 0.1
    tensors["proj.weight"] = torch.cat((torch.eye(64) * 0.05, torch.eye(64)), 1)
    fields = {"architectures": ["FastEagleDrafter"], "model_type": "fasteagle", "num_hidden_layers": 3}
    return save_drafter(tmp_path_factory.mktemp("fasteagle"), fields, tensors, torch.arange(20, 300))


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
    from draftwood.trees import RankPaths, Topology
    from draftwood.trees.spec import Budget

    paths = RankPaths()
    for path, count in {(0, 0, 0): 9, (0, 1): 4, (2,): 3, (0, 0, 2): 2}.items():
        paths.add(path, count)
    fixed = (
        ("plain", Topology.plain()),
        ("backbone", Topology.backbone(3, 2)),
        ("planned", paths.best_tree(6)),
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


# The mask token of the drafters below: the tiny teacher's last one.
MASK = 299


def small_block(random: Any, at: str, width: int, scale: float = 0.05) -> dict:
    import torch

    rows = {"q": 64, "k": 32, "v": 32}
    made = {f"self_attn.{side}_proj.weight": torch.randn(n, width, generator=random) for side, n in rows.items()}
    made |= {f"mlp.{side}_proj.weight": torch.randn(96, 64, generator=random) for side in ("gate", "up")}
    made["self_attn.o_proj.weight"] = torch.randn(64, 64, generator=random)
    made["mlp.down_proj.weight"] = torch.randn(64, 96, generator=random)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), 64) | dict.fromkeys(
        ("self_attn.q_norm", "self_attn.k_norm"), 16
    )
    ones = {f"{at}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    return {f"{at}.{name}": tensor * scale for name, tensor in made.items()} | ones


def save_peagle(folder: Path, sizes: dict) -> None:
    """Two layers, Qwen3's; the root's row often proposes the token before it again."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(2)
    tensors = small_block(random, "layers.0", 128) | small_block(random, "layers.1", 64)
    tensors |= {"layers.0.hidden_norm.weight": torch.ones(64), "norm.weight": torch.ones(64)}
    tensors["fc.weight"] = torch.cat((torch.eye(64), torch.randn(64, 128, generator=random) * 0.02), 1)
    tensors["mask_hidden"] = torch.randn(1, 1, 192, generator=random)
    own = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK}
    block = sizes | {"num_hidden_layers": 2, "model_type": "qwen3"}
    rest = {"draft_vocab_size": 300, "num_depths": 3, "aux_layer_ids": [0, 1, 2], "transformer_layer_config": block}
    (folder / "config.json").write_text(json.dumps(own | rest))
    save_file(tensors, folder / "model.safetensors")


def save_dflash(folder: Path, sizes: dict) -> None:
    """Two layers over three states; the root's row often proposes the root again."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(3)
    tensors = small_block(random, "layers.0", 64, 0.1) | small_block(random, "layers.1", 64, 0.1)
    tensors |= {"hidden_norm.weight": torch.ones(64), "norm.weight": torch.ones(64)}
    tensors["fc.weight"] = torch.randn(64, 192, generator=random) * 0.1
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    nested = {"dflash_config": {"mask_token_id": MASK, "shift_label": True}, "aux_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(sizes | own | nested))
    save_file(tensors, folder / "model.safetensors")


def save_dspark(folder: Path, sizes: dict) -> None:
    """DFlash's drafter above with a recurrent head and a confidence head, in DeepSpec's layout."""
    import torch
    from safetensors.torch import load_file, save_file

    save_dflash(folder, sizes)
    random, tensors = torch.Generator().manual_seed(5), load_file(folder / "model.safetensors")
    shapes = {"markov_head.markov_w1.weight": (300, 16), "markov_head.markov_w2.weight": (300, 16)}
    shapes |= {"markov_head.joint_proj.weight": (48, 96), "markov_head.joint_proj.bias": (48,)}
    shapes |= {"confidence_head.proj.weight": (1, 80), "confidence_head.proj.bias": (1,)}
    tensors |= {name: torch.randn(shape, generator=random) * 0.05 for name, shape in shapes.items()}
    own = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    heads = {"markov_rank": 16, "markov_head_type": "rnn", "enable_confidence_head": True}
    nested = {"mask_token_id": MASK, "aux_layer_ids": [0, 1, 2], "confidence_head_with_markov": True}
    (folder / "config.json").write_text(json.dumps(sizes | own | heads | nested))
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="session")
def save_one_pass(tiny_teacher: Path) -> dict[str, Callable[[Path], None]]:
    """Writes a random drafter of a kind, for the tiny teacher, into a folder, which it makes."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = json.loads((tiny_teacher / "config.json").read_text())
    sizes = {name: config[name] for name in (*names, "rms_norm_eps", "rope_theta")}

    def saver(save: Callable[[Path, dict], None]) -> Callable[[Path], None]:
        def into(folder: Path) -> None:
            folder.mkdir()
            save(folder, sizes)

        return into

    savers = {"peagle": save_peagle, "dflash": save_dflash, "dspark": save_dspark}
    return {name: saver(save) for name, save in savers.items()}
