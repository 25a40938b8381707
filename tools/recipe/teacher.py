"""Trains the demo's teacher: a small Llama with its own tokenizer, from files of text.

    python -m draftwood.tools.recipe.teacher --data FILE ... --out DIR --steps 4300

Resumable: the newest checkpoint under ``--out`` is continued, with more or fewer ``--steps`` if asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.compiler.training.teacher import default_device
from draftwood.tools.recipe.tokenizer import encode_row, save_tokenizer, texts_of, train_tokenizer
from draftwood.tools.script import refusing
from draftwood.tools.training.rows import Row, held_out, read_data
from draftwood.tools.training.schedule import HybridOptimizer, stable_decay

# N tokens, B windows a batch, S tokens a window, H hidden size, V vocabulary.

VOCABULARY, LEARNING_RATE, SEED = 8192, 4e-3, 0
_FILES = ("train.npy", "valid.npy", "valid.json")


def demo_config() -> LlamaConfig:
    """8.0 M parameters: 8 layers of 256, 4 query and 2 key/value heads of 64, tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def placed(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model itself, moved to the GPU if there is one."""
    torch.nn.Module.to(model, default_device())  # transformers has wrong types for its own
    return model


def prepare(data: Sequence[str], out: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokenizer and token arrays: (training uint16 [N], validation uint16 [N], validation bytes)."""
    train_file, valid_file, size_file = (out / name for name in _FILES)
    if not size_file.is_file():
        rows = read_data(data)
        train, valid = ([row for row in rows if held_out(row) == held] for held in (False, True))
        tokenizer = train_tokenizer(train, VOCABULARY)
        save_tokenizer(tokenizer, out)
        # Chat rows count twice: questions are what the demo answers.
        counted = [i for i, row in enumerate(train) for _ in range(1 + ("messages" in row))]
        order = np.random.default_rng(0).permutation(counted)
        np.save(train_file, _pack(tokenizer, [train[i] for i in order]))
        np.save(valid_file, _pack(tokenizer, valid))
        size_file.write_text(json.dumps({"bytes": sum(len(text.encode()) for text in texts_of(valid))}))
    return np.load(train_file), np.load(valid_file), json.loads(size_file.read_text())["bytes"]


def _pack(tokenizer: tokenizers.Tokenizer, rows: list[Row]) -> np.ndarray:
    return np.concatenate([np.asarray(encode_row(tokenizer, row), dtype=np.uint16) for row in rows])


def batches(tokens_N: np.ndarray, size: int, window: int, seed: int, start: int) -> Iterator[torch.Tensor]:
    """Endless shuffled windows, int64 [size, window + 1]; ``start`` skips batches that a resumed run has seen."""
    count = (len(tokens_N) - 1) // window
    per_epoch = count // size
    while True:
        epoch, skip = divmod(start, per_epoch)
        rng = np.random.default_rng((seed, epoch, window))
        shift = int(rng.integers(0, window)) if epoch else 0
        order = rng.permutation(count - 1)[: per_epoch * size].reshape(-1, size)
        for picked in order[skip:]:
            index = picked[:, None] * window + shift + np.arange(window + 1)
            yield torch.from_numpy(tokens_N[np.minimum(index, len(tokens_N) - 1)].astype(np.int64))
        start += len(order) - skip


def loss_of(model: LlamaForCausalLM, ids_BS: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats."""
    hidden_BSH = model.model(ids_BS[:, :-1]).last_hidden_state
    logits_NV = model.lm_head(hidden_BSH).flatten(0, 1)
    return F.cross_entropy(logits_NV.float(), ids_BS[:, 1:].reshape(-1))


@torch.no_grad()
def validate(model: LlamaForCausalLM, tokens_N: np.ndarray, window: int = 512, limit: int = 10**9) -> float:
    """Mean nats a token over consecutive windows of the held-out tokens."""
    count = min((len(tokens_N) - 1) // window, limit)
    total = 0.0
    for at in range(0, count, 8):
        rows = range(at, min(at + 8, count))
        ids = np.stack([tokens_N[r * window : r * window + window + 1] for r in rows]).astype(np.int64)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            total += float(loss_of(model, torch.from_numpy(ids).to(model.device))) * len(rows)
    return total / count


def train(args: argparse.Namespace) -> None:
    """Runs or resumes the training; writes checkpoints, a log and, at the end, the Hugging Face folder."""
    torch.manual_seed(SEED)
    args.out.mkdir(parents=True, exist_ok=True)
    train_N, valid_N, valid_bytes = prepare(args.data, args.out)
    model = placed(LlamaForCausalLM(demo_config()))
    optimizer = HybridOptimizer(model, LEARNING_RATE)
    checkpoint, step = args.out / "checkpoint.pt", 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True, map_location=model.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    run = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    feed = batches(train_N, args.batch, args.window, SEED, step)
    began, first, seen = time.monotonic(), step, 0.0
    until = min(args.steps, args.until or args.steps)
    while step < until:
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            loss = run(model, next(feed).to(model.device))
        torch.autograd.backward(loss)
        optimizer.step(stable_decay(step, args.steps, warmup=200))
        step += 1
        seen = 0.98 * seen + 0.02 * loss.item() if seen else loss.item()
        if step % 50 == 0 or step == until:
            record = {"step": step, "train_nats": round(seen, 4)}
            if step % 500 == 0 or step == until:
                record["valid_nats"] = round(validate(model, valid_N, limit=128), 4)
                _save(checkpoint, model, optimizer, step)
            rate = (step - first) * args.batch * args.window / (time.monotonic() - began)
            _log(args.out, {**record, "tokens_per_s": round(rate)})
    if step == args.steps:
        _finish(args.out, model, valid_N, valid_bytes)


def _save(path: Path, model: LlamaForCausalLM, optimizer: HybridOptimizer, step: int) -> None:
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def _log(out: Path, record: Mapping[str, float]) -> None:
    with (out / "log.jsonl").open("a") as log:
        log.write(json.dumps(record) + "\n")
    print(json.dumps(record), file=sys.stderr, flush=True)


def _finish(out: Path, model: LlamaForCausalLM, valid_N: np.ndarray, valid_bytes: int) -> None:
    nats = validate(model, valid_N)
    bits = nats / np.log(2) * len(valid_N) / valid_bytes
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(out / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / "model" / name).write_bytes((out / name).read_bytes())
    _log(out, {"valid_nats": round(nats, 4), "valid_bits_per_byte": round(float(bits), 4)})


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH[:TIMES]", help="as draftwood distill")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer, checkpoints, log and model")
    parser.add_argument("--steps", type=int, default=4300)
    parser.add_argument("--until", type=int, help="stop after this step, to be resumed (default: --steps)")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--window", type=int, default=512, help="tokens a window")
    parser.add_argument("--compile", action="store_true", help="compile the step (needs a C++ compiler)")
    train(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
