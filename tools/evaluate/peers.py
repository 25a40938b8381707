"""Other programs that decode the teacher's checkpoint, as far as they are installed (extra ``peers``)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines import Engine
from draftwood.runtime.policy import Policies
from draftwood.runtime.speculation.sampling import Sampling

# Ids of a prompt and how many tokens at most; the new tokens, greedy, the end token counted.
Generate = Callable[[Sequence[int], int], Sequence[int]]
# Opens a checkpoint's folder with so many threads; may write what it exports into the second folder.
Open = Callable[[Path, Path, int], Generate]


def ours(engine: Engine, policies: Policies, ids: Sequence[int], count: int) -> Sequence[int]:
    """Our own program as a `Generate`, with engine and policies given."""
    options = Options(max_new_tokens=count, sampling=Sampling())
    return Decoding(engine, ids, options, policies.new(True)).run().token_ids


def transformers_generate(model: Path, work: Path, threads: int, **options: Any) -> Generate:
    """Transformers' own loop, fp32, eager PyTorch with its default attention."""
    from draftwood.environment import hide_torch_npu

    hide_torch_npu()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    opened = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    opened.generation_config.pad_token_id = 0  # nothing is padded; unset, it is warned of

    def generate(ids: Sequence[int], count: int) -> list[int]:
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            mask = torch.ones_like(given)
            out = opened.generate(given, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
        found: list[int] = out[0, len(ids) :].tolist()
        return found

    return generate


def prompt_lookup(model: Path, work: Path, threads: int) -> Generate:
    """Transformers' speculation without a drafter: n-grams of the text so far."""
    return transformers_generate(model, work, threads, prompt_lookup_num_tokens=8)


def genai(model: Path, work: Path, threads: int, precision: str = "fp32") -> Generate:
    """onnxruntime-genai on its own export of the checkpoint; it takes one thread unless told."""
    import onnxruntime_genai

    folder = work / f"genai-{model.name}{'' if precision == 'fp32' else f'-{precision}'}"
    if not (folder / "genai_config.json").exists():
        given = ["-i", str(model), "-o", str(folder), "-p", precision, "-e", "cpu", "-c", str(work / "genai-cache")]
        subprocess.run([sys.executable, "-c", BUILDER, *given], check=True, capture_output=True)
    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
    file.write_text(json.dumps(config, indent=1))
    opened = onnxruntime_genai.Model(str(folder))

    def generate(ids: Sequence[int], count: int) -> list[int]:
        params = onnxruntime_genai.GeneratorParams(opened)
        params.set_search_options(max_length=len(ids) + count, do_sample=False)
        generator = onnxruntime_genai.Generator(opened, params)
        generator.append_tokens(list(ids))
        found: list[int] = []
        while len(found) < count and not generator.is_done():
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
        return found

    return generate


def llama(model: Path, work: Path, threads: int, form: str, lookup: bool = False) -> Generate:
    """llama.cpp on every matrix in a format of its own; ``lookup`` is its speculation from n-grams of the text."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.evaluate.gguf_file import write_gguf

    teacher, path = Checkpoint.open(model), work / f"{model.name}-{form}.gguf"
    if not path.exists():
        write_gguf(teacher, path, form)
    # Row by row below 64 rows with flash attention: slower where rows are verified.
    opened = llama_cpp.Llama(
        str(path),
        n_ctx=min(teacher.config.max_positions, 2048),
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=False,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=8) if lookup else None,
        verbose=False,
    )

    def generate(ids: Sequence[int], count: int) -> list[int]:
        opened.reset()  # or it would find the prompt in its cache
        found: list[int] = []
        for token in opened.generate(list(ids), temp=0.0, repeat_penalty=1.0):
            found.append(int(token))
            if len(found) == count or found[-1] in teacher.config.eos:
                break
        return found

    return generate


# The builder as a program of its own: it imports transformers, which must not see a torch_npu that has no CANN.
BUILDER = """
import runpy
from draftwood.environment import hide_torch_npu
hide_torch_npu()
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""

# By name: the package that must be there, and what opens it; None where nothing here exports to it.
PEERS: dict[str, tuple[str, Open | None]] = {
    "transformers generate": ("transformers", transformers_generate),
    "transformers prompt lookup": ("transformers", prompt_lookup),
    "onnxruntime-genai": ("onnxruntime_genai", genai),
    "llama.cpp": ("llama_cpp", None),
    "OpenVINO GenAI": ("openvino_genai", None),
}
# The same programs at fewer bits.
QUANTISED_PEERS: dict[str, tuple[str, Open | None]] = {
    "onnxruntime-genai int4": ("onnxruntime_genai", partial(genai, precision="int4")),
    "llama.cpp Q8_0": ("llama_cpp", partial(llama, form="Q8_0")),
    "llama.cpp Q4_0": ("llama_cpp", partial(llama, form="Q4_0")),
    "llama.cpp Q4_0 prompt lookup": ("llama_cpp", partial(llama, form="Q4_0", lookup=True)),
    "OpenVINO GenAI int8": ("openvino_genai", None),
}
INSTALL = "pip install 'draftwood[peers]'"


def open_peer(name: str, model: Path, work: Path, threads: int) -> Generate | str:
    """What decodes with a peer, or why it cannot: somebody else's program must not end a run of ours."""
    if why := why_missing(name):
        return why
    opens = (PEERS | QUANTISED_PEERS)[name][1]
    assert opens is not None, "a peer that is not missing"
    try:
        return opens(model, work, threads)
    except Exception as error:  # whatever it raises
        told = getattr(error, "stderr", None) or b""
        last = told.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        return f"cannot open the checkpoint: {last[0]:.200}"


def why_missing(name: str) -> str:
    """Why a peer is not there; empty if it is."""
    package, opens = (PEERS | QUANTISED_PEERS)[name]
    if opens is None:
        return "no export of the checkpoint to it yet"
    install = "pip install llama-cpp-python gguf" if package == "llama_cpp" else INSTALL
    return "" if importlib.util.find_spec(package) else f"not installed: {install}"
