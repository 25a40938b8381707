"""Other programs that decode the teacher's own checkpoint, if they read it and are installed (extra ``peers``)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.telemetry import import_openvino
from draftwood.tools.made_from import stamps_of

if TYPE_CHECKING:
    from draftwood.compiler.teachers.config import TeacherConfig

# Ids of a prompt, how many tokens at most and a temperature, 0 for greedy: the new tokens, the end token counted. No
# token is cut off before sampling.
Generate = Callable[[Sequence[int], int, float], Sequence[int]]
# Opens a checkpoint's folder with a number of threads; may write exports into the second folder.
Open = Callable[[Path, Path, int], Generate]
LOOKED_UP = 8  # tokens that others' speculation takes from the text so far


def transformers_generate(model: Path, work: Path, threads: int, **options: Any) -> Generate:
    """Transformers' own loop, fp32, eager PyTorch, default attention, a GGUF file dequantised. Its prompt lookup is
    speculation without a drafter, from n-grams of the text so far."""
    from draftwood.environment import hide_torch_npu

    hide_torch_npu()
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    file = gguf_file(model)
    where = {"gguf_file": file.name} if file else {}
    opened = AutoModelForCausalLM.from_pretrained(file.parent if file else model, dtype=torch.float32, **where).eval()
    # A publisher's generation_config.json may punish repetition or cut tokens off: of it only the end tokens count.
    # Nothing is padded; unset, the token is warned of.
    opened.generation_config = GenerationConfig(eos_token_id=opened.generation_config.eos_token_id, pad_token_id=0)

    def generate(ids: Sequence[int], count: int, temperature: float) -> list[int]:
        prompt = torch.tensor([list(ids)])
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.inference_mode():
            mask = torch.ones_like(prompt)
            out = opened.generate(prompt, attention_mask=mask, max_new_tokens=count, **how, **options)
        answer: list[int] = out[0, len(ids) :].tolist()
        return answer

    return generate


def genai(model: Path, work: Path, threads: int, precision: str = "fp32") -> Generate:
    """onnxruntime-genai on its own export of a folder; it takes one thread by default.

    Raises: RequestError: the checkpoint is a GGUF file; its builder looks for the tokenizer and configuration on a hub.
    """
    import onnxruntime_genai

    if gguf_file(model):
        raise RequestError("its builder looks for a GGUF file's tokenizer and configuration on a hub")

    # Kept from run to run: another checkpoint may have the same name, and this one may change.
    content = hashlib.sha256(json.dumps(stamps_of(model)).encode()).hexdigest()[:16]
    folder = work / f"genai-{model.name}-{content}{'' if precision == 'fp32' else f'-{precision}'}"
    if not (folder / "genai_config.json").exists():
        arguments = [
            "-i",
            str(model),
            "-o",
            str(folder),
            "-p",
            precision,
            "-e",
            "cpu",
            "-c",
            str(work / "genai-cache"),
        ]
        subprocess.run([sys.executable, "-c", BUILDER, *arguments], check=True, capture_output=True)
    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
    file.write_text(json.dumps(config, indent=1))
    opened = onnxruntime_genai.Model(str(folder))

    def generate(ids: Sequence[int], count: int, temperature: float) -> list[int]:
        params = onnxruntime_genai.GeneratorParams(opened)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        # Its configuration has what the publisher's generation_config.json says.
        plain = {"do_sample": False, "repetition_penalty": 1.0}
        params.set_search_options(max_length=len(ids) + count, **(plain | how))
        generator = onnxruntime_genai.Generator(opened, params)
        generator.append_tokens(list(ids))
        answer: list[int] = []
        while len(answer) < count and not generator.is_done():
            generator.generate_next_token()
            answer.append(int(generator.get_next_tokens()[0]))
        return answer

    return generate


def llama(model: Path, work: Path, threads: int, lookup: bool = False) -> Generate:
    """llama.cpp on the GGUF file itself; ``lookup`` is its speculation from n-grams of the text."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    file, config = read_gguf(model)
    # Row by row below 64 rows with flash attention: slower if rows are verified.
    opened = llama_cpp.Llama(
        str(file),
        n_ctx=min(config.max_positions, 2048),
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=False,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP) if lookup else None,
        verbose=False,
    )

    def generate(ids: Sequence[int], count: int, temperature: float) -> list[int]:
        opened.reset()  # or it would find the prompt in its cache
        answer: list[int] = []
        how = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in opened.generate(list(ids), **how):
            answer.append(int(token))
            if len(answer) == count or answer[-1] in config.eos:
                break
        return answer

    return generate


def openvino(model: Path, work: Path, threads: int, lookup: bool = False) -> Generate:
    """OpenVINO GenAI on the GGUF file itself; ``lookup`` is its speculation from n-grams of the text."""
    import numpy as np

    openvino = import_openvino()  # first: openvino_genai imports it, too
    import openvino_genai
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    from draftwood.compiler.teachers.formats import write_tokenizer

    file, config = read_gguf(model)
    # It wants a tokenizer to open, and is given ids.
    folder = work / f"{file.stem}-openvino"
    folder.mkdir(exist_ok=True)
    write_tokenizer(file, folder)
    words = convert_tokenizer(
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")), with_detokenizer=True
    )
    for name, part in zip(("tokenizer", "detokenizer"), words, strict=True):
        openvino.save_model(part, folder / f"openvino_{name}.xml")
    # Else a prompt that comes twice is not computed again.
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, "scheduler_config": scheduler}
    opened = openvino_genai.LLMPipeline(
        str(file),
        openvino_genai.Tokenizer(str(folder)),
        "CPU",
        **properties,
        **({"prompt_lookup": True} if lookup else {}),
    )
    generation = openvino_genai.GenerationConfig(stop_token_ids=set(config.eos))
    generation.eos_token_id = min(config.eos, default=0)
    generation.ignore_eos = not config.eos
    if lookup:
        generation.num_assistant_tokens, generation.max_ngram_size = LOOKED_UP, 3

    def generate(ids: Sequence[int], count: int, temperature: float) -> list[int]:
        generation.max_new_tokens, generation.do_sample, generation.temperature = (
            count,
            temperature > 0,
            temperature or 1.0,
        )
        row = np.array([list(ids)], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(row), openvino.Tensor(np.ones_like(row)))
        answer: list[int] = opened.generate(inputs, generation).tokens[0]
        return answer

    return generate


def gguf_file(model: Path) -> Path | None:
    """The GGUF file of a checkpoint, of several parts the first one; None if it is a folder of safetensors."""
    from draftwood.compiler.teachers.gguf import gguf_files

    return next(iter(gguf_files(model)), None)


def read_gguf(model: Path) -> tuple[Path, TeacherConfig]:
    """The GGUF file of a checkpoint and its description.

    Raises:
        RequestError: the checkpoint is no GGUF file.
    """
    from draftwood.compiler.teachers.checkpoint import Checkpoint

    file = gguf_file(model)
    if file is None:
        raise RequestError(f"{model}: this program reads GGUF files; expected MODEL.gguf, the file that ours reads")
    return file, Checkpoint.describe(model).config


# The builder as a program of its own: it imports transformers, which must not see a torch_npu that has no CANN.
BUILDER = """
import runpy
from draftwood.environment import hide_torch_npu
hide_torch_npu()
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""

# By name: the package that must be there, and the function that opens it.
PEERS: dict[str, tuple[str, Open]] = {
    "transformers generate": ("transformers", transformers_generate),
    "transformers prompt lookup": ("transformers", partial(transformers_generate, prompt_lookup_num_tokens=LOOKED_UP)),
    "onnxruntime-genai": ("onnxruntime_genai", genai),
    "onnxruntime-genai int4": ("onnxruntime_genai", partial(genai, precision="int4")),
    "llama.cpp": ("llama_cpp", llama),
    "llama.cpp prompt lookup": ("llama_cpp", partial(llama, lookup=True)),
    "OpenVINO GenAI": ("openvino_genai", openvino),
    "OpenVINO GenAI prompt lookup": ("openvino_genai", partial(openvino, lookup=True)),
}
# How to get a package; others are in our own extra.
INSTALL = {
    "llama_cpp": "pip install llama-cpp-python",
    "openvino_genai": "pip install openvino-genai",
}


def open_peer(name: str, model: Path, work: Path, threads: int) -> Generate | str:
    """A decoder with a peer, or the reason against it: somebody else's program must not end a run of ours.

    It answers once in a process of its own first, which it may end as it likes.
    """
    if why := why_missing(name):
        return why
    arguments = PEERS[name][1], model, work, threads
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as aside:
            aside.submit(_answer_once, *arguments).result()
        return PEERS[name][1](model, work, threads)
    except BrokenProcessPool:
        return "ends its process before its first token, as a segmentation fault does"
    except Exception as error:  # whatever it raises
        stderr = getattr(error, "stderr", None) or b""
        last = stderr.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        return f"cannot open the checkpoint: {last[0]:.200}"


def _answer_once(opens: Open, model: Path, work: Path, threads: int) -> None:
    opens(model, work, threads)([1, 2, 3], 1, 0.0)


def why_missing(name: str) -> str:
    """Why a peer is not there; empty if it is."""
    package, _ = PEERS[name]
    install = INSTALL.get(package, "pip install 'draftwood[peers]'")
    return "" if importlib.util.find_spec(package) else f"not installed: {install}"


def compiled_with() -> str:
    """The instructions that llama.cpp, which is there, was compiled for."""
    import llama_cpp

    return ", ".join(re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode()))
