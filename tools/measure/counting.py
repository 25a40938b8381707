"""Counts the rank paths of a teacher's own answers to prompts: text by text, in as many processes as are given.

The teacher (transformers) answers in batches; then every context of the answers is ranked at once along the true
text, as draft trees that hold the true path would rank it: an EAGLE-3 layer is fed the true tokens and its own
states, Medusa heads and FastEagle layers rank a token by its distance alone. Sampled text was drawn with noise, and
candidates are ranked with the same noise, as engines rank them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.environment import hide_torch_npu
from draftwood.errors import RequestError
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.prompts import Prompt, chat_ids
from draftwood.tools.training.visited import REFERENCE_ROWS, path_of, visited
from draftwood.trees.calibration import Calibration

# Candidates a node that are looked at; a truth that is none of them ends the path.
CANDIDATES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Some conversations to be answered at one temperature and counted; what a process needs to know, no more."""

    name: str
    teacher: Path
    drafter: Path
    conversations: tuple[tuple[Prompt, ...], ...]
    temperature: float
    max_new_tokens: int
    seed: int
    # How deep an EAGLE-3 layer drafts; the other kinds know themselves.
    levels: int


def jobs(
    prompts: Sequence[Prompt],
    teacher: Path,
    drafter: Path,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
    levels: int,
    size: int = 16,
) -> list[Job]:
    """The prompts in jobs of ``size`` conversations, each temperature apart; a name stands for all that is in one."""
    turns: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        turns.setdefault(prompt.conversation, []).append(prompt)
    whole = [tuple(part) for part in turns.values()]
    digests = f"{Checkpoint.open(teacher).digest()} {drafter_digest(drafter)} {max_new_tokens} {levels}"
    made = []
    for temperature in temperatures:
        for at in range(0, len(whole), size):
            part = tuple(whole[at : at + size])
            content = f"{digests} {REFERENCE_ROWS} coupled {temperature} {seed if temperature else 0} {part}"
            made.append(
                Job(
                    name=f"answers-{zlib.crc32(content.encode()):08x}",
                    teacher=teacher,
                    drafter=drafter,
                    conversations=part,
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                    levels=levels,
                )
            )
    return made


def drafter_digest(folder: Path) -> int:
    """A number of a drafter's files; RequestError where there are none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt", ".bin"))
    if not files:
        raise RequestError(f"--drafter {folder}: no weights; expected the folder of a drafter")
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


def count_all(work: Sequence[Job], calibration: Calibration, executor: Executor | None) -> Iterator[Job]:
    """Runs the jobs that ``calibration`` has not counted yet, and adds each as it is done.

    ``executor`` is any of ``concurrent.futures``, a Dask client's among them; None runs them here, one by one.
    """
    missing = [job for job in work if job.name not in calibration.sources]
    answers = map(count, missing) if executor is None else executor.map(count, missing)
    for job, data in zip(missing, answers, strict=True):
        calibration.merge(Calibration.from_bytes(data, job.name))
        yield job


def count(job: Job, factor: float = 1.0) -> bytes:
    """One job's statistics, as ``Calibration.to_bytes`` writes them.

    Sampled text's candidates are ranked as an engine's: with the noise that the teacher drew with. Other factors of it
    are there for comparison, 0 for none.
    """
    hide_torch_npu()
    from draftwood.compiler.training.batch import NONE, Batch
    from draftwood.tools.training.shared_noise import SharedNoise
    from draftwood.tools.training.states import States
    from draftwood.tools.training.trainer import ranks_of

    text, model, drafter = loaded(job.teacher, job.drafter, job.levels)
    turns, texts = answers(job, text, model)
    calibration = Calibration()
    calibration.sources[job.name] = 1
    if not len(texts.index_W):
        return calibration.to_bytes()
    ended_W, states = texts.ended(), States(model, texts, drafter.aux)
    found: dict[int, list[_Context]] = {}
    every_W = np.arange(len(texts.index_W))

    def noise_of(text_B: np.ndarray, batch: Batch) -> SharedNoise:
        samplings = [sampling_of(job, turns[number]) for number in text_B]
        return SharedNoise(batch, samplings, drafter.ids_V, model.config.vocab_size, factor)

    shared = noise_of if job.temperature and factor else None
    for text_B, batch, features_NIH, ranks_NI in ranks_of(drafter, states, every_W, CANDIDATES, shared):
        noise = shared(text_B, batch) if shared else None
        confidence_N = drafter.confidence(features_NIH, noise).tolist()
        known_N = (batch.targets(drafter.levels) != NONE).all(1).tolist()
        rows, places = (part.tolist() for part in batch.there_BC.nonzero().unbind(1))
        for n, (row, place) in enumerate(zip(rows, places, strict=True)):
            number = int(text_B[row])
            # Near the end of a text that was cut short what comes next is unknown.
            path = path_of(ranks_NI[n].tolist(), CANDIDATES) if known_N[n] or ended_W[number] else None
            context = int(batch.slot_BC[row, place]) + 2
            found.setdefault(number, []).append(_Context(path, context, confidence_N[n]))
    for number, at in visited({number: [one.path for one in contexts] for number, contexts in found.items()}):
        turn, context = turns[number], found[number][at]
        assert context.path is not None
        calibration.add(
            context.path,
            group=turn.conversation,
            context=context.length,
            confidence=context.confidence,
            task=turn.source,
            sampled=job.temperature > 0,
        )
    return calibration.to_bytes()


class _Context(NamedTuple):
    """A position of an answer: its rank path (None where unknown), the tokens before it, the root's confidence."""

    path: tuple[int, ...] | None
    length: int
    confidence: float


@lru_cache(maxsize=1)
def loaded(teacher: Path, drafter: Path, levels: int):  # type: ignore[no-untyped-def]
    """Once a process: tokenizer, teacher and drafter."""
    from draftwood.tools.training.generate import load_teacher
    from draftwood.tools.training.students import load

    model = load_teacher(teacher)
    return Tokenizer.load(teacher), model, load(drafter, model, levels)


def answers(job: Job, text: Tokenizer, model):  # type: ignore[no-untyped-def]
    """The answers to every turn, a later one behind the answer to the one before: the turns, and their texts.

    A conversation ends where it grows too long for the teacher.
    """
    from draftwood.tools.training.generate import generate

    checkpoint = Checkpoint.open(job.teacher)
    ends, answered, whole = checkpoint.config.eos, [], []
    histories: list[list[dict[str, str]]] = [[] for _ in job.conversations]
    longest = checkpoint.config.max_positions - job.max_new_tokens
    for turn in range(max(map(len, job.conversations))):
        asked, prompts = [], []
        for i, turns in enumerate(job.conversations):
            if turn < len(turns) and len(histories[i]) == 2 * turn:  # all turns before it were answered
                messages = [*histories[i], {"role": "user", "content": turns[turn].text}]
                if len(ids := chat_ids(text, messages)) <= longest:  # the teacher has room for it and its answer
                    histories[i] = messages
                    asked.append(i)
                    prompts.append(ids)
        if not asked:
            break
        samplings = [sampling_of(job, job.conversations[i][turn]) for i in asked]
        written = generate(model, prompts, samplings, job.max_new_tokens, ends)
        for i, prompt, new in zip(asked, prompts, written, strict=True):
            histories[i].append({"role": "assistant", "content": text.decode(new)})
            answered.append(job.conversations[i][turn])
            whole.append((prompt, new))
    return answered, _distilled(whole, job.temperature, checkpoint)


def sampling_of(job: Job, turn: Prompt) -> Sampling:
    """Each turn has a seed of its own, so that no two share their noise."""
    return Sampling(temperature=job.temperature, seed=(job.seed % 2**32 << 32) + zlib.crc32(turn.id.encode()))


def _distilled(texts, temperature: float, checkpoint: Checkpoint):  # type: ignore[no-untyped-def]
    """(prompt, answer) pairs in the form that the trainers read."""
    from draftwood.tools.training.texts import INDEX, Distilled

    index_W = np.zeros(len(texts), INDEX)
    index_W["prompt"] = [len(prompt) for prompt, _ in texts]
    index_W["length"] = [len(prompt) + len(new) for prompt, new in texts]
    index_W["start"] = np.cumsum(index_W["length"]) - index_W["length"]
    index_W["temperature"] = temperature
    tokens_N = np.array([token for prompt, new in texts for token in (*prompt, *new)], np.uint16)
    return Distilled(tokens_N, index_W, checkpoint.digest(), tuple(checkpoint.config.eos))
