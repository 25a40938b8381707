"""The seeds of mutations: small, correct files of every kind that Draftwood reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.sentencepiece_file import message_class
from draftwood.compiler.ge.weights import plan_weights, write_index, write_npu_weights
from draftwood.compiler.quantisation.writing import Layout, write
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.quantised import linear_layers
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.trace import StepEvent, Trace
from draftwood.runtime.tuned import VERSION, Tuned, bundle_digest, machine_name, releases_here
from draftwood.tests.gguf_files import save_gguf
from draftwood.tests.packed_checkpoints import LAYOUTS, save_packed
from draftwood.tests.random_models import (
    SIZES,
    block,
    save_drafter,
    save_eagle3,
    save_fasteagle,
    save_medusa,
    save_teacher,
)
from draftwood.tests.tree_texts import written
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration
from draftwood.trees.calibration_file import write_calibration
from draftwood.trees.frozen import freeze
from draftwood.trees.latency import LatencyEntry, LatencyTable
from draftwood.trees.plan import make_plan
from draftwood.trees.plan_file import Limits, format_plan
from draftwood.trees.spec import Budget, read_specs

HIDDEN, VOCABULARY = 32, 280
TEACHER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
# The weights' standard deviation.
SPREAD = 0.15
# Of a teacher whose layers an NPU's kernel of four bits takes, too.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
# Layouts of int8 matrices, besides those of packed ones.
INT8: dict[str, Layout] = {"int-quantized": "compressed-tensors", "msmodelslim": "msmodelslim"}
RAGGED = Topology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])


def make_seeds(folder: Path, bundles: Mapping[str, Path] | None = None) -> None:
    """Writes all seeds below ``folder``: teachers, drafters, files of statistics and trees, and bundles by the kind of
    their drafter, which are copied where they are given."""
    torch.set_num_threads(1)
    save_teacher(folder / "teacher", TEACHER, SPREAD)
    make_layouts(folder)
    make_gguf(folder)
    make_sentencepiece(folder / "sentencepiece")
    rest = shutil.ignore_patterns("config.json", "*.safetensors")
    shutil.copytree(folder / "teacher", folder / "tokenizer", ignore=rest)
    save_medusa(folder / "medusa", TEACHER)
    save_eagle3(folder / "eagle3", TEACHER)
    save_fasteagle(folder / "fasteagle", TEACHER, levels=2)
    make_peagle(folder / "peagle")
    make_dflash(folder / "dflash")
    make_torch_files(folder)
    make_files(folder / "files")
    make_npu_weights(folder / "npu")
    for kind in ("medusa", "eagle3", "fasteagle"):
        if bundles is not None:
            shutil.copytree(bundles[kind], folder / "bundles" / kind)
            continue
        trees: list[tuple[str, Topology | Budget]] = [("plain", Topology.plain()), ("ragged", RAGGED)]
        if kind == "eagle3":
            trees.append(("budget", Budget(6, 2, 3)))
        request = BuildRequest(
            model=folder / "teacher", drafter=folder / kind, trees=tuple(trees), slots=(128,), prefill_rows=(16,)
        )
        build(request, folder / "bundles" / kind)
    make_tuned(folder / "bundles" / "medusa", folder / "tuned")
    make_lookup(folder)


def _noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_sentencepiece(folder: Path) -> None:
    """A tokenizer.model of every kind of piece, and a configuration that names some."""
    folder.mkdir()
    words = ["<unk>", "<s>", "</s>", "<0x41>", "<|user|>", *"\u2581theca", "th", "the", "\u2581the"]
    kinds = [2, 3, 3, 6, 4, *[1] * (len(words) - 5)]
    pieces = [{"piece": word, "score": -at, "type": kinds[at]} for at, word in enumerate(words)]
    model = message_class()(pieces=pieces, trainer={"model_type": 2, "byte_fallback": True})
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    added = {"4": {"content": "<|user|>", "special": True}, str(len(words)): {"content": "<|more|>"}}
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_eos_token": True, "legacy": True}
    config |= {"added_tokens_decoder": added, "additional_special_tokens": ["<|user|>"], "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_gguf(folder: Path) -> None:
    """A teacher in a GGUF file, in blocks with a minimum and without."""
    for kind in ("Q4_1", "Q8_0"):
        (folder / "gguf" / kind).mkdir(parents=True)
        save_gguf(folder / "wide", folder / "gguf" / kind / "model.gguf", kind)


def make_layouts(folder: Path) -> None:
    """A teacher in every quantised layout. Packed layouts come in two forms: with zeros in groups of 64, and with a
    scale a row, in eight bits if the layout has them."""
    save_teacher(folder / "wide", TEACHER | WIDE, SPREAD)
    for layout in LAYOUTS:
        bits = 4 if layout.endswith("awq") else 8
        save_packed(folder / "wide", folder / "layouts" / layout, layout, group=64)
        rows: dict[str, Any] = {"bits": bits, "group": -1, "symmetric": True, "dtype": torch.bfloat16}
        save_packed(folder / "wide", folder / "layouts" / f"{layout}-rows", layout, **rows)
    opened = Checkpoint.open(folder / "wide")
    layers = tuple(layer for layer in linear_layers(opened.parts) if layer != "lm_head")
    for name, form in INT8.items():
        (folder / "layouts" / name).mkdir()
        write(folder / "layouts" / name, opened, layers, {}, form, lambda _: None)


def make_peagle(folder: Path) -> None:
    """A random block with a mask row, as speculators writes it."""
    random = _noise(4)
    tensors = block(TEACHER, random, "layers.0", 2 * HIDDEN)
    tensors["layers.0.hidden_norm.weight"] = torch.ones(HIDDEN)
    tensors["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN, generator=random) * 0.1
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN, generator=random)
    own = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 3}
    sizes = {name: TEACHER[name] for name in SIZES} | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    fields = own | {"num_depths": 2, "transformer_layer_config": sizes}
    save_drafter(folder, TEACHER, fields, tensors, torch.arange(20, VOCABULARY))


def make_dflash(folder: Path) -> None:
    """Two random layers over a block of three rows, as z-lab writes them."""
    random = _noise(5)
    tensors = block(TEACHER, random, "layers.0", heads=True) | block(TEACHER, random, "layers.1", heads=True)
    tensors["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN, generator=random) * 0.1
    tensors["hidden_norm.weight"] = torch.ones(HIDDEN)
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    nested = {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}, "sliding_window": None}
    save_drafter(folder, TEACHER, own | nested, tensors, torch.arange(20, VOCABULARY))


def make_torch_files(folder: Path) -> None:
    """The drafters that are also published as torch files, in that form."""
    for kind, name in (("medusa", "medusa_lm_head.pt"), ("eagle3", "pytorch_model.bin")):
        source = next((folder / kind).glob("*.safetensors"))
        target = folder / f"{kind}-torch"
        target.mkdir(parents=True)
        torch.save(load_file(source), target / name)
        if (folder / kind / "config.json").exists():
            (target / "config.json").write_bytes((folder / kind / "config.json").read_bytes())


def make_lookup(folder: Path) -> None:
    """A bundle without a drafter, and an operator's text in which it looks tokens up."""
    corpus, trees = folder / "files" / "corpus.txt", read_specs("lookup:chain:3").trees
    corpus.write_text("the cat sat on the mat and the hat\n" * 9)
    request = BuildRequest(
        model=folder / "teacher", drafter=None, trees=trees, slots=(128,), prefill_rows=(16,), corpus=corpus
    )
    build(request, folder / "bundles" / "lookup")


def make_tuned(bundle: Path, folder: Path) -> None:
    """Step times of a bundle's gears as ``tune`` keeps them."""
    folder.mkdir(parents=True)
    opened = Bundle.open(bundle, "fast")
    times = tuple(StepTime(gear=gear.name, length=16, us=900.0) for gear in opened.manifest.gears)
    tuned = Tuned(
        version=VERSION, machine=machine_name(), bundle=bundle_digest(opened), engine="cpu", threads=1,
        releases=releases_here("cpu"), times=times,
    )  # fmt: skip
    (folder / "tuned.json").write_bytes(msgspec.json.encode(tuned))


def make_npu_weights(folder: Path) -> None:
    """The weights of an NPU's graphs with their index, as a bundle's ``npu`` folder has them."""
    folder.mkdir(parents=True)
    values = {"embed.weight": torch.randn(16, 8, generator=_noise(4)), "norm.weight": torch.ones(8)}
    values["ids"] = torch.arange(6)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    index = plan_weights(shapes, torch.bfloat16, "weights.bin", {}, {}, {"ids": torch.int64})
    write_index(folder / "weights.json", index)
    write_npu_weights(folder / "weights.bin", index, values.__getitem__)


def make_files(folder: Path) -> None:
    """Trees in every form, statistics, a latency table, a plan, prompts, rows, a conversation and a trace."""
    (folder / "trees").mkdir(parents=True)
    for form in ("draftwood", "medusa", "tuples", "nxdi"):
        (folder / "trees" / f"{form}.json").write_text(written(RAGGED, form))
    (folder / "trees" / "frozen.json").write_text(freeze(RAGGED))
    (folder / "trees" / "choices.py").write_text(f"one = {list(RAGGED.paths)}\ntwo = [[0], [1]]\n")
    calibration = Calibration()
    for i in range(60):
        path = (i % 3, i % 2, 0)[: i % 4]
        calibration.add(path, group=f"text {i % 9}", context=i * 70, task="ab"[i % 2])
    write_calibration(calibration, folder / "statistics.cal")
    table = _latency()
    (folder / "latency.json").write_text(table.to_json())
    (folder / "plan.json").write_text(format_plan(make_plan(calibration, Limits(6, 3, 3, 3), table)))
    rows = [{"prompt": "the cat", "id": "a"}, {"prompt": "the hat", "conversation": "c"}, {"turns": ["sat", "on"]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"id": "a", "text": "the cat"}, {"id": "b", "messages": [{"role": "user", "content": "the hat"}]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (folder / "chat.json").write_text(json.dumps([{"role": "user", "content": "the cat"}]))
    _trace().write(folder / "trace.jsonl")


def _latency() -> LatencyTable:
    entries = [
        LatencyEntry(
            kind="decode" if rows == 1 else "verify", rows=rows, slots=slots, seconds=1e-3 + rows * 1e-4,
            parts={"attention": rows * 1e-4, "rest": 1e-3}, bytes=1000,
        )
        for rows, slots in ((1, 128), (4, 128), (7, 128), (1, 256), (7, 256))
    ]  # fmt: skip
    draft = LatencyEntry(kind="draft", depth=3, width=3, seconds=2e-4, parts={"all": 2e-4})
    return LatencyTable(source="modelled", entries=(*entries, draft), machine={"name": "none"}, notes=("made up",))


def _trace() -> Trace:
    trace = Trace({"bundle": "tiny"})
    for step in range(5):
        event = StepEvent(
            kind="verify" if step else "prefill", step=step, gear="ragged-kv128", position=4 + 2 * step, rows=7,
            accepted=2, path=(0,), tokens=(5, 6), start_us=100.0 * step, draft_us=1.0, verify_us=50.0,
            accept_us=2.0, host_us=3.0,
        )  # fmt: skip
        trace.add(event)
    return trace
