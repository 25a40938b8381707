"""What a teacher is worth: bits per byte beside a 4-gram model, and how varied its answers are.

    python -m draftwood.tools.training.quality --teacher DIR --data DIR --prompts FILE.jsonl

A small teacher that repeats itself flatters every drafter; the share of distinct 4-grams tells.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from transformers import LlamaForCausalLM

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.script import refusing
from draftwood.tools.training.corpus import SHIPPABLE, held_out, read_folder, stdlib_rows
from draftwood.tools.training.generate import generate, load_teacher
from draftwood.tools.training.ngram import NGrams
from draftwood.tools.training.teacher import prepare, validate
from draftwood.tools.training.tokenizer import encode_row, texts_of

# N tokens

_ARRAYS = ("train.npy", "valid.npy", "valid.json")
_WINDOW = 512
# Held-out tokens on which the baseline's discounts are tuned; they are scored too, in the baseline's favour.
_TUNED_ON = 50_000
_SAMPLES = 4


def token_arrays(teacher: Path, data: Path, sources: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, int]:
    """Training tokens uint16 [N], held-out tokens uint16 [N], held-out bytes.

    Those that the trainer left beside the model folder are used if its tokenizer is the teacher's; else the
    rows are encoded again.
    """
    tokenizer_file, beside = teacher / "tokenizer.json", teacher.resolve().parent
    if not tokenizer_file.is_file():
        raise RequestError(f"{teacher}: no tokenizer.json; name the model folder of a teacher")
    same = beside / "tokenizer.json"
    there = same.is_file() and all((beside / name).is_file() for name in _ARRAYS)
    if there and same.read_bytes() == tokenizer_file.read_bytes():
        return prepare(data, beside, sources, 0)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    rows = [*read_folder(data, sources), *stdlib_rows()]
    parts = [[row for row in rows if held_out(row) == held] for held in (False, True)]
    train_N, valid_N = (
        np.concatenate([np.asarray(encode_row(tokenizer, row), dtype=np.uint16) for row in part] or [[]])
        for part in parts
    )
    return train_N, valid_N, sum(len(text.encode()) for text in texts_of(parts[1]))


def bits_per_byte(model: LlamaForCausalLM, train_N: np.ndarray, valid_N: np.ndarray, size: int) -> dict:
    """Of the teacher and of the baseline, over the held-out tokens; ``size`` is their length in bytes.

    Raises:
        RequestError: fewer held-out tokens than one window.
    """
    if len(valid_N) <= _WINDOW:
        raise RequestError(f"{len(valid_N)} held-out tokens; expected more than {_WINDOW}; name more data")
    scale = len(valid_N) / size / math.log(2)
    grams = NGrams(train_N, model.config.vocab_size)
    grams.tune(valid_N[:_TUNED_ON])
    return {
        "teacher_bits_per_byte": round(validate(model, valid_N, _WINDOW) * scale, 4),
        "4gram_bits_per_byte": round(grams.nats(valid_N) * scale, 4),
        "4gram_discounts": grams.discounts,
    }


def read_prompts(path: Path) -> list[str]:
    """The field ``prompt`` of every line; RequestError names a line without one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError):
            raise RequestError(f'{path}, line {number}: expected {{"prompt": ...}}, got {line[:60]!r}') from None
    if not prompts:
        raise RequestError(f"{path}: holds no prompts")
    return prompts


def answers(
    model: LlamaForCausalLM, text: Tokenizer, prompts: Sequence[str], ends: Sequence[int], temperature: float, new: int
) -> list[list[int]]:
    """The teacher's answer to every prompt, as a user turn, in the order of the prompts."""
    ids = [text.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    room = model.config.max_position_embeddings - new
    ids = [prompt[-room:] for prompt in ids]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    samplings = [Sampling(temperature=temperature, seed=number) for number in range(len(ids))]
    result: list[list[int]] = [[] for _ in ids]
    for at in range(0, len(order), 64):
        chosen = order[at : at + 64]
        written = generate(model, [ids[i] for i in chosen], [samplings[i] for i in chosen], new, ends)
        for i, answer in zip(chosen, written, strict=True):
            result[i] = answer
    return result


def distinct(texts: Sequence[Sequence[int]], size: int = 4) -> tuple[float, float]:
    """Share of distinct n-grams among all, and its mean over the texts that have any.

    Example:
        >>> distinct([[1, 1, 1, 1, 1], [1, 2, 3, 4]])
        (0.6666666666666666, 0.75)
    """
    grams = [[tuple(text[i : i + size]) for i in range(len(text) - size + 1)] for text in texts]
    grams = [part for part in grams if part]
    flat = [gram for part in grams for gram in part]
    shares = [len(set(part)) / len(part) for part in grams]
    return len(set(flat)) / max(1, len(flat)), sum(shares) / max(1, len(shares))


def report(teacher: Path, data: Path, prompt_file: Path, new_tokens: int, sources: tuple[str, ...] = SHIPPABLE) -> dict:
    """All figures, and a few answers of either temperature."""
    config = Checkpoint.open(teacher).config
    if not 0 < new_tokens < config.max_positions:
        raise RequestError(f"--new-tokens {new_tokens}: expected 1 to {config.max_positions - 1}")
    prompts, text, model = read_prompts(prompt_file), Tokenizer.load(teacher), load_teacher(teacher)
    result = bits_per_byte(model, *token_arrays(teacher, data, sources))
    model.to(torch.bfloat16)
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        written = answers(model, text, prompts, config.eos, temperature, new_tokens)
        share, mean = distinct(written)
        shown = np.linspace(0, len(prompts) - 1, min(_SAMPLES, len(prompts))).astype(int)
        result[name] = {
            "temperature": temperature, "tokens": sum(map(len, written)), "distinct_4grams": round(share, 4),
            "distinct_4grams_per_answer": round(mean, 4),
            "samples": [{"prompt": prompts[i], "answer": text.decode(written[i])} for i in shown],
        }  # fmt: skip
    return result


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True, help="model folder of the teacher")
    parser.add_argument("--data", type=Path, required=True, help="folder of .jsonl[.gz] rows it was trained on")
    parser.add_argument("--prompts", type=Path, required=True, help='.jsonl with a field "prompt"')
    parser.add_argument("--sources", default=",".join(SHIPPABLE), help="file stems to read, separated by commas")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    result = report(args.teacher, args.data, args.prompts, args.new_tokens, tuple(args.sources.split(",")))
    print(json.dumps(result, ensure_ascii=False) if args.json else _table(result))
    return 0


def _table(result: dict) -> str:
    lines = [
        f"held-out bits per byte: teacher {result['teacher_bits_per_byte']}, 4-gram {result['4gram_bits_per_byte']}"
    ]
    for name in ("greedy", "sampled"):
        part = result[name]
        lines.append(
            f"{name} (temperature {part['temperature']}): {part['tokens']} tokens, distinct 4-grams"
            f" {part['distinct_4grams']}, mean per answer {part['distinct_4grams_per_answer']}"
        )
        lines += [f"  {s['prompt'][:70]!r}\n    {s['answer'][:300]!r}" for s in part["samples"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
