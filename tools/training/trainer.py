"""Trains a drafter for a frozen teacher on the teacher's own texts: one loop for every kind.

All kinds see the same batches of texts in the same order, so equal steps are equal data. A run can be stopped and goes
on from its last checkpoint. Started by torchrun, the processes share every batch and add up their gradients.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.drafters.registry import kind_named
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.training.batch import NONE, Batch
from draftwood.compiler.training.precision import compute_dtype
from draftwood.compiler.training.student import LevelNoise, Student
from draftwood.compiler.training.teacher import FrozenTeacher, training_device
from draftwood.errors import RequestError
from draftwood.files import whole
from draftwood.tools.made_from import alone_in, begin_in, damaged
from draftwood.tools.training.draft_vocabulary import coverage, most_frequent
from draftwood.tools.training.schedule import HybridOptimizer, stable_decay
from draftwood.tools.training.states import FOLDER, LARGEST, States
from draftwood.tools.training.students import Start, begin
from draftwood.tools.training.team import Team
from draftwood.tools.training.texts import Distilled, by_length, shuffled
from draftwood.version import __version__

# W texts, N contexts, I levels

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
# Held-out texts that are looked at on the way; at the end all of them are.
_GLANCE = 128
# Texts a batch when nothing is trained.
_WIDE = 32
# Seconds of training after which the next logged step is saved, however few steps they were.
_UNSAVED_S = 600


class Run:
    """The state that outlives a stop: drafter, optimiser, step, seconds spent; and the log."""

    def __init__(self, out: Path, drafter: Student, learning_rate: float, settings: dict[str, Any]) -> None:
        self.out, self.drafter, self.settings, self.step, self.seconds = out, drafter, settings, 0, 0.0
        self.optimizer = HybridOptimizer(drafter, learning_rate)
        path = out / CHECKPOINT
        if not path.is_file():
            return
        state = _loaded(path, drafter.output_VH.device)
        before = state["settings"]
        differ = [name for name in sorted({*settings, *before}) if before.get(name) != settings.get(name)]
        if differ:
            raise RequestError(
                f"{out}: was begun with other settings ({', '.join(differ)}); repeat them or name another --out"
            )
        drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        parts = {"drafter": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict()}
        state = {**parts, "step": self.step, "seconds": self.seconds, "settings": self.settings}
        write_state(self.out / CHECKPOINT, state)

    def log(self, record: dict[str, Any]) -> None:
        with (self.out / LOG).open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Length:
    """How long a training takes: a number of steps, or of minutes."""

    steps: int
    minutes: float | None

    def share(self, run: Run, team: Team) -> float:
        """How much of it is done, the same in all processes; 1 or more at the end."""
        if self.minutes is None:
            return run.step / self.steps
        done = torch.tensor([run.seconds / (60 * self.minutes) / team.size], device=run.drafter.output_VH.device)
        team.add_up([done])
        return float(done)

    def told(self) -> dict[str, float]:
        """For the log."""
        return {"of": self.steps} if self.minutes is None else {"minutes": self.minutes}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a file that is there once it is whole; OSError if the disk is full, say."""
    with whole(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's own, raised while the system's is handled
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _loaded(path: Path, device: torch.device) -> dict[str, Any]:
    """A state that ``Run.save`` wrote.

    Raises:
        RequestError: it is damaged.
    """
    try:
        state = torch.load(path, weights_only=True, map_location=device)
    except Exception as error:  # what a damaged pickle says to its reader may fail in any way
        raise damaged(path, (str(error).splitlines() or [type(error).__name__])[0][:100]) from None
    if not isinstance(state, dict) or not {"drafter", "optimizer", "step", "seconds", "settings"} <= state.keys():
        raise damaged(path, "not the state of a training")
    return state


def train(
    kind: str, teacher: Path, distilled: Path, out: Path, *, steps: int = 1500, minutes: float | None = None,
    batch: int = 16, learning_rate: float = 2e-3, seed: int = 0, log_every: int = 25, save_every: int = 250,
    start: Path | None = None, team: Team | None = None, device: torch.device | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Runs or resumes the training, writes checkpoints, a log and the drafter; returns the accuracy.

    Args:
        minutes: a time for the training instead of ``steps``, which it sets once some steps have been timed.
        batch: texts a step, over all processes.
        start: folder of a trained drafter to go on from, with its sizes and its draft vocabulary unless options say
            others. Levels that it lacks begin as they do without.
        device: by default the GPU if there is one.
        options: those of the kind.

    Raises:
        RequestError: the texts are of another teacher or too few, ``out`` holds a run of other settings, or ``start`` a
            drafter that such a training does not make.
    """
    team, complete = team or Team(), kind_named(kind).complete
    complete(options)  # refused before a teacher is opened
    if min(steps, log_every, save_every) < 1 or batch < team.size or min(learning_rate, minutes or 1) <= 0:
        raise RequestError(
            "expected 1 or more steps, a text a batch for every process, and a positive learning rate and time"
        )
    texts = Distilled.open(distilled, Checkpoint.open(teacher).digest())
    train_W, valid_W = _shares(texts, distilled, team)
    torch.manual_seed(seed)
    device = device or training_device()
    model = FrozenTeacher.open(teacher, compute_dtype(device), device)
    started = None if start is None else Start.read(start, kind, model, options.get("levels"))
    options = complete({**(started.student.shape() if started else {}), **options})
    drafter = begin(kind, options, model, _draft_ids(texts, train_W, options, model.config.vocabulary, started))
    settings = {
        "version": __version__, "kind": kind, "teacher": texts.teacher, "texts": texts.digest, "batch": batch,
        "learning_rate": learning_rate, "seed": seed, **options,
    }  # fmt: skip
    if started is not None:
        started.give(drafter)
        settings["start"] = started.digest
    begin_in(out, (CHECKPOINT, LOG))
    with nullcontext() if team.rank else alone_in(out):
        run = Run(out, drafter, learning_rate, settings)
        states = States(model, texts, drafter.aux, distilled / FOLDER, LARGEST[device.type])
        _fill(run, states, train_W, valid_W, team)
        saved, saved_s = run.step, run.seconds
        for record in _steps(run, states, train_W, Length(steps, minutes), batch, seed, log_every, team):
            if team.rank == 0:
                run.log(record)
                if run.step - saved >= save_every or run.seconds - saved_s >= _UNSAVED_S:
                    run.save()
                    saved, saved_s = run.step, run.seconds
                    run.log({"step": run.step, **accuracy(drafter, states, valid_W[:_GLANCE])})
        final = _finish(run, states, valid_W) if team.rank == 0 else {}
        team.wait()
        return final


def _shares(texts: Distilled, folder: Path, team: Team) -> tuple[np.ndarray, np.ndarray]:
    """The texts to train on and those that are held out."""
    held_W, some_W = texts.held_out(), texts.spans() > 0
    train_W, valid_W = (~held_W & some_W).nonzero()[0], (held_W & some_W).nonzero()[0]
    if len(train_W) < team.size or not len(valid_W):
        rows = len(np.unique(texts.index_W["source"]))
        raise RequestError(
            f"{folder}: {len(train_W)} texts to train on and {len(valid_W)} held out, of prompts from {rows} data rows;"
            " expected one a process, and one of another row; distill from more --data, or longer texts"
        )
    return train_W, valid_W


def _draft_ids(
    texts: Distilled, train_W: np.ndarray, options: dict[str, Any], vocabulary: int, started: Start | None
) -> Tensor | None:
    """The teacher's ids that the drafter may propose, int64 [V]; None for all of them.

    A drafter that goes on keeps its own, unless another number is asked for.
    """
    size = options.get("draft_vocab")
    own_V = None if started is None else started.student.ids_V
    if own_V is not None and size in (None, len(own_V)):
        return own_V.cpu()
    return torch.from_numpy(most_frequent(texts, train_W, size, vocabulary)) if size else None


def _fill(run: Run, states: States, train_W: np.ndarray, valid_W: np.ndarray, team: Team) -> None:
    """Computes the teacher's states, each process its share, and logs the training's size."""
    began, texts, ids_V = time.monotonic(), states.texts, run.drafter.ids_V
    states.fill(team.rank, team.size)
    team.wait()
    if team.rank == 0:
        run.log({
            "texts": len(train_W), "contexts": int(texts.spans()[train_W].sum()), "held_out": len(valid_W),
            "states_s": round(time.monotonic() - began, 1), "processes": team.size,
            "parameters": sum(p.numel() for p in run.drafter.parameters()),
            **({} if ids_V is None else {"coverage": round(coverage(texts, valid_W, ids_V.cpu().numpy()), 4)}),
        })  # fmt: skip


def _finish(run: Run, states: States, valid_W: np.ndarray) -> dict[str, Any]:
    """Writes the checkpoint and the drafter; returns the accuracy on all held-out texts."""
    run.save()
    run.drafter.save(run.out)
    final = accuracy(run.drafter, states, valid_W)
    run.log({"step": run.step, "seconds": round(run.seconds), "final": final})
    return final


def _steps(
    run: Run, states: States, train_W: np.ndarray, length: Length, batch: int, seed: int, log_every: int, team: Team
) -> Iterator[dict[str, Any]]:
    """Trains to the end; yields the figures to log: of the first step, of every ``log_every``-th and of the last."""
    feed = shuffled(states.texts.index_W["length"], train_W, batch, seed, run.step)
    began, first, seconds, logged = time.monotonic(), run.step + 1, run.seconds, []
    parameters = [parameter for parameter in run.drafter.parameters() if parameter.requires_grad]
    share = length.share(run, team)
    while share < 1:
        part = states.batch(next(feed)[team.rank :: team.size])
        count_I = (part.targets(run.drafter.levels) != NONE).sum(0)
        team.add_up([count_I])
        run.drafter.step = run.step
        loss, sums = run.drafter.loss(part, count_I)
        torch.autograd.backward(loss)
        team.add_up([_gradient(parameter) for parameter in parameters])
        if not run.optimizer.step(stable_decay(run.step, share)):
            raise RequestError(
                f"{run.out}: step {run.step + 1}: the gradient is not finite; train anew with another --out and a lower"
                f" --learning-rate (this one is {run.optimizer.learning_rate:g})"
            )
        run.step += 1
        run.seconds = seconds + time.monotonic() - began
        logged.append({**sums, "contexts": count_I})
        share = length.share(run, team)
        if run.step == first or run.step % log_every == 0 or share >= 1:
            yield {"step": run.step, **length.told(), **_means(logged, team), "seconds": round(run.seconds, 1)}
            logged = []


def _gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient, zeros if the loss did not reach it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _means(logged: list[dict[str, Tensor]], team: Team) -> dict[str, list[float]]:
    """Each part of the loss a context, level by level, over the steps since the last record."""
    sums = {name: torch.stack([record[name] for record in logged]).sum(0) for name in logged[0]}
    count_I = sums.pop("contexts").clamp(min=1)  # already that of all processes
    team.add_up(list(sums.values()))
    return {name: [round(value, 4) for value in (sum_I / count_I).tolist()] for name, sum_I in sums.items()}


def ranks_of(
    drafter: Student, states: States, text_W: np.ndarray, candidates: int,
    noise_of: Callable[[np.ndarray, Batch], LevelNoise] | None = None,
) -> Iterator[tuple[np.ndarray, Batch, Tensor]]:  # fmt: skip
    """Batches of the texts in order of length, each as (texts, batch, ranks of the true tokens). The ranks are int64
    [N, I], on the host. ``noise_of`` gives the noise that a batch's texts share with their teacher."""
    for text_B in by_length(states.texts.index_W["length"], text_W, _WIDE):
        batch = states.batch(text_B)
        noise = noise_of(text_B, batch) if noise_of else None
        yield text_B, batch, drafter.ranks(batch, candidates, drafter.frozen(batch), noise).cpu()


def accuracy(drafter: Student, states: States, text_W: np.ndarray) -> dict[str, dict[str, list[float]]]:
    """Per level the share of targets that are first, and among the first five; greedy and sampled texts apart."""
    result = {}
    greedy_W = states.texts.index_W["temperature"][text_W] == 0
    for name, chosen_W in (("greedy", text_W[greedy_W]), ("sampled", text_W[~greedy_W])):
        count_I = torch.zeros(drafter.levels, dtype=torch.int64)
        hits = {1: count_I, 5: count_I}
        for _, batch, ranks_NI in ranks_of(drafter, states, chosen_W, 5):
            there_NI = (batch.targets(drafter.levels) != NONE).cpu()
            count_I = count_I + there_NI.sum(0)
            hits = {k: hit_I + ((ranks_NI < k) & there_NI).sum(0) for k, hit_I in hits.items()}
        if len(chosen_W):
            result[name] = {
                f"top{k}": [round(s, 4) for s in (h / count_I.clamp(min=1)).tolist()] for k, h in hits.items()
            }
    return result
