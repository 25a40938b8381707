"""Trains Medusa heads for a frozen teacher on the teacher's own texts (Medusa-1; Cai et al., 2024).

    python -m draftwood.tools.training.medusa --teacher DIR --distilled DIR --out DIR --steps 6000

The loss is the sum over heads of 0.8^i times the cross-entropy of the token that the teacher wrote i + 2 places
on. Resumable with the same settings and more or fewer ``--steps``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.checkpoint import Checkpoint
from draftwood.compiler.medusa import MedusaHeads
from draftwood.compiler.medusa_checkpoint import MedusaCheckpoint
from draftwood.errors import RequestError
from draftwood.tools.script import refusing
from draftwood.tools.training.contexts import Contexts, Distilled, contexts_of
from draftwood.tools.training.generate import load_teacher
from draftwood.tools.training.medusa_heads import accuracy, loss_of, ranks_of, save_heads, start_heads
from draftwood.tools.training.schedule import stable_decay

# N contexts, I heads, H hidden size, V vocabulary

# Held-out contexts that are looked at on the way; at the end all of them are.
_GLANCE = 8192


class _Run:
    """The state that outlives a stop: heads, optimiser, step; and the log."""

    def __init__(self, out: Path, heads: MedusaHeads, learning_rate: float, settings: dict) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.heads, self.settings, self.step = out, heads, settings, 0
        self.rate = learning_rate
        self.optimizer = torch.optim.AdamW(
            heads.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        path = out / "checkpoint.pt"
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True, map_location=next(heads.parameters()).device)
        differ = [name for name in settings if state["settings"].get(name) != settings[name]]
        if differ:
            raise RequestError(
                f"{out}: was begun with other settings ({', '.join(differ)}); repeat them or name another --out"
            )
        heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def update(self, factor: float) -> None:
        """One optimiser step at ``factor`` times the learning rate; clears the gradients."""
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def save(self) -> None:
        part = self.out / "checkpoint.part"
        state = {"heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": self.step, "settings": self.settings}, part)
        part.replace(self.out / "checkpoint.pt")

    def log(self, record: dict) -> None:
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), file=sys.stderr, flush=True)


def batches(count: int, size: int, seed: int, start: int) -> Iterator[Tensor]:
    """Endless shuffled batches of context numbers, int64 [size]; ``start`` of them are skipped."""
    size = min(size, count)
    epoch, skip = divmod(start, count // size)
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(count)[: count // size * size]
        yield from (torch.from_numpy(picked) for picked in order.reshape(-1, size)[skip:])
        epoch, skip = epoch + 1, 0


def train(
    teacher: Path, distilled: Path, out: Path, *, heads: int = 4, blocks: int = 1, own_output: bool = False,
    steps: int = 6000, batch: int = 2048, learning_rate: float = 1e-3, seed: int = 0, log_every: int = 50,
    save_every: int = 1000,
) -> dict:  # fmt: skip
    """Runs or resumes the training, writes checkpoints, a log and the heads; returns the final accuracy.

    Raises:
        RequestError: the texts are of another teacher or too few, or ``out`` holds a run of other settings.
    """
    if min(heads, steps, batch, log_every, save_every) < 1 or blocks < 0 or learning_rate <= 0:
        raise RequestError("expected 1 or more heads, steps and contexts a batch, and a positive learning rate")
    checkpoint = Checkpoint.open(teacher)
    texts = Distilled.open(distilled, checkpoint.digest())
    settings = {
        "teacher": texts.teacher, "texts": len(texts.index_W), "heads": heads, "blocks": blocks,
        "own_output": own_output, "batch": batch, "learning_rate": learning_rate, "seed": seed,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = load_teacher(teacher)
    output_VH = model.lm_head.weight.detach().to(torch.bfloat16)
    started = start_heads(output_VH, heads, blocks, own_output)
    run = _Run(out, started, learning_rate, settings)
    began = time.monotonic()
    data, held = (contexts_of(model, texts, chosen_W, heads) for chosen_W in (~texts.held_out(), texts.held_out()))
    if not len(data.text_N) or not len(held.text_N):
        raise RequestError(f"{distilled}: too few texts to train on and to validate with; distill more")
    run.log({"contexts": len(data.text_N), "held_out": len(held.text_N), "s": round(time.monotonic() - began, 1)})
    greedy_N = texts.index_W["temperature"][held.text_N] == 0

    def validated(limit: int | None = None) -> dict:
        return accuracy(started, held, greedy_N, output_VH, limit)

    for record in _steps(run, data, output_VH, steps, batch, seed, log_every):
        run.log(record)
        if run.step % save_every == 0:
            run.save()
            run.log({"step": run.step, **validated(_GLANCE)})
    run.save()
    save_heads(started, out, blocks, teacher.resolve().name)
    MedusaCheckpoint.open(out, checkpoint.config)  # what was written is what the compiler reads
    final = validated()
    run.log({"step": run.step, "final": final})
    return final


def _steps(
    run: _Run, data: Contexts, output_VH: Tensor, steps: int, batch: int, seed: int, log_every: int
) -> Iterator[dict]:
    """Trains up to ``steps``; yields what to log, at every ``log_every``-th step and the last."""
    feed = batches(len(data.text_N), batch, seed, run.step)
    began, seen = time.monotonic(), 0
    while run.step < steps:
        picked = next(feed)
        hidden_NH, targets_NI = data.hidden_NH[picked], data.targets_NI[picked]
        loss, loss_I = loss_of(run.heads, hidden_NH.to(output_VH.device), targets_NI.to(output_VH.device), output_VH)
        loss.backward()
        run.update(stable_decay(run.step, steps, warmup=min(100, steps // 10 + 1), decay_share=0.5))
        seen += len(picked)
        if run.step % log_every == 0 or run.step == steps:
            first_NI = ranks_of(run.heads, hidden_NH, targets_NI, output_VH, 1) == 0
            yield {
                "step": run.step, "nats": [round(nats, 4) for nats in loss_I.tolist()],
                "top1": [round(share, 4) for share in first_NI.float().mean(0).tolist()],
                "contexts_per_s": round(seen / (time.monotonic() - began)),
            }  # fmt: skip


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True, help="model folder of the teacher")
    parser.add_argument("--distilled", type=Path, required=True, help="folder that distill wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the heads, checkpoint and log")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks a head")
    parser.add_argument(
        "--own-output", action="store_true", help="train an output matrix a head (as published), not the teacher's"
    )
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=2048, help="contexts a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(arguments))
    print(json.dumps(train(args.pop("teacher"), args.pop("distilled"), args.pop("out"), **args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
