"""Counting rank paths: at the contexts of a decoding's steps, the ranks of the true tokens among candidates.

There are two ways to the same statistics:

* `count_traffic`: a bundle answers, and its own steps are counted. Nodes that its tree does not have were never
  proposed, so a plan from such counts can shape trees better or make them smaller, not larger.
* `count_all`: a teacher, run eagerly, answers in batches. Every context of its answers is ranked along the true text,
  as draft trees that hold the true path would rank it. Sampled text was drawn with noise, and candidates are ranked
  with the same noise, as engines rank them.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Result
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies, widest_gear
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.measure.conversations import Conversation, by_conversation, turn_prompts
from draftwood.tools.measure.runner import Way, decode
from draftwood.tools.prompts import Prompt
from draftwood.trees.calibration import Calibration
from draftwood.trees.search import search

if TYPE_CHECKING:
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.training.texts import Distilled

# Candidates a node that are looked at; a truth that is none of them ends the path.
CANDIDATES = 32
# How deep an EAGLE-3 layer is followed; the other kinds know themselves.
LEVELS = 8
# Rows of the tree whose steps decide which contexts are counted; trees of like size stand at nearly the same ones.
REFERENCE_ROWS = 16
# Conversations of a job.
JOB_SIZE = 16

RankPath = tuple[int, ...]


def path_of(ranks: Sequence[int], candidates: int) -> RankPath:
    """The ranks up to the first token that was no candidate."""
    stop = next((i for i, rank in enumerate(ranks) if rank >= candidates), len(ranks))
    return tuple(ranks[:stop])


def visited(texts: Mapping[int, Sequence[RankPath | None]]) -> Iterator[tuple[int, int]]:
    """The contexts at which a decoding drafts: (number of the text, position among its contexts).

    A step passes over the tokens that it accepts, so fewer steps begin where acceptance is long. Counting every
    position would overrate it: half of a text at 1 token a step and half at 5 is 1.7 tokens a step, not 3. The steps
    are those of the best tree of ``REFERENCE_ROWS`` rows on all of these contexts.

    Args:
        texts: every context's path, in the order of the text; None if the next token is unknown.
    """
    every, nodes = Calibration(), REFERENCE_ROWS - 1
    for known in (path for paths in texts.values() for path in paths if path is not None):
        every.add(known, group="")
    if not every.contexts.total:
        return
    tree = set(search(every.contexts, nodes).paths(nodes))
    for number, paths in texts.items():
        at = 0
        while at < len(paths):
            path = paths[at]
            if path is not None:
                yield number, at
            depth = next((level for level in range(len(path or ()), 0, -1) if (path or ())[:level] in tree), 0)
            at += depth + 1


def drafting_alone(bundle: Bundle) -> Bundle:
    """The bundle without its gears that look tokens up: what the text offers is no candidate of the drafter's, and
    takes the place of some."""
    gears = tuple(gear for gear in bundle.manifest.gears if not gear.looks_up)
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, gears=gears))


def count_traffic(
    engine: Engine, prompts: Sequence[Prompt], options: Options, calibration: Calibration
) -> Iterator[tuple[Prompt, Result]]:
    """Answers every turn with the bundle's largest tree and adds its steps to ``calibration``. The bundle looks nothing
    up (`drafting_alone`).

    A turn that is counted already is answered again, since later turns build on it, but not counted twice.
    """
    answers: dict[str, Sequence[int]] = {}
    way = Way(engine, Policies(engine.bundle, widest_gear(engine.bundle)))
    for prompt, ids in turn_prompts(engine, prompts, answers):
        text = decode(way, ids, options)
        answers[prompt.conversation] = text.result.token_ids
        name = _turn_name(engine.bundle, prompt, ids, options)
        if name not in calibration.sources:
            for event in (event for event in text.trace.events if event.kind == "verify"):
                calibration.add(
                    event.path,
                    group=prompt.conversation,
                    context=event.position + 1,
                    task=prompt.source,
                    sampled=not options.sampling.greedy,
                )
            calibration.sources[name] = 1
        yield prompt, text.result


def _turn_name(bundle: Bundle, prompt: Prompt, ids: Sequence[int], options: Options) -> str:
    """Stands for all that decides a turn's steps: ``ids`` hold the conversation so far."""
    drafter = bundle.manifest.drafter.digest if bundle.manifest.drafter else ""
    trees = [
        (tree.name, bundle.manifest.files[tree.file].sha256 if tree.file else None) for tree in bundle.manifest.trees
    ]
    teacher = bundle.manifest.teacher  # its digest is that of the files, whatever precision they were built in
    content = f"{teacher.digest} {teacher.config} {drafter} {trees} {options} {prompt} {list(ids)}"
    return f"traffic-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Some conversations to be answered at one temperature and counted: all that a process needs to know."""

    teacher: Path
    drafter: Path
    # By the name of what they give, under which they are counted once.
    conversations: Mapping[str, tuple[Prompt, ...]]
    temperature: float
    max_new_tokens: int
    # Digests of teacher and drafter.
    models: Mapping[str, str]


def jobs(
    prompts: Sequence[Prompt],
    teacher: Path,
    drafter: Path,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    size: int = JOB_SIZE,
) -> list[Job]:
    """The prompts in jobs of ``size`` conversations, one temperature a job.

    Raises:
        CheckpointError: teacher or drafter cannot be used.
        RequestError: the teacher has no room for answers so long.
    """
    from draftwood.compiler.drafters.registry import open_drafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint

    whole = [tuple(turns) for turns in by_conversation(prompts)]
    checkpoint = Checkpoint.open(teacher)
    if max_new_tokens >= (positions := checkpoint.config.max_positions):
        raise RequestError(f"--max-new-tokens {max_new_tokens}: the teacher has {positions} positions; choose fewer")
    models = {"teacher": checkpoint.digest(), "drafter": open_drafter(drafter, checkpoint).digest()}
    digests = f"{models['teacher']} {models['drafter']} {max_new_tokens} {LEVELS}"
    listed = []
    for temperature in temperatures:
        for at in range(0, len(whole), size):
            settings = f"{digests} {REFERENCE_ROWS} coupled {temperature}"
            listed.append(
                Job(
                    teacher=teacher,
                    drafter=drafter,
                    conversations={_answers_name(settings, turns): turns for turns in whole[at : at + size]},
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    models=models,
                )
            )
    return listed


def _answers_name(settings: str, turns: Sequence[Prompt]) -> str:
    """Stands for all that decides a conversation's answers and drafts."""
    return f"answers-{hashlib.sha256(f'{settings} {turns}'.encode()).hexdigest()[:16]}"


def count_all(work: Sequence[Job], calibration: Calibration, executor: Executor | None) -> Iterator[Job]:
    """Runs the jobs without the conversations that ``calibration`` has counted, and adds each as it is done; None runs
    them here."""
    left = (replace(job, conversations=_uncounted(job, calibration)) for job in work)
    missing = [job for job in left if job.conversations]
    answers = map(count, missing) if executor is None else executor.map(count, missing)
    for job, data in zip(missing, answers, strict=True):
        calibration.merge(Calibration.from_bytes(data, "a job"))
        yield job


def _uncounted(job: Job, calibration: Calibration) -> dict[str, tuple[Prompt, ...]]:
    return {name: turns for name, turns in job.conversations.items() if name not in calibration.sources}


def count(job: Job) -> bytes:
    """One job's statistics, as ``Calibration.to_bytes`` writes them."""
    text, model, drafter = _loaded(job.teacher, job.drafter)
    turns, texts = _answers(job, text, model)
    calibration = Calibration()
    calibration.sources, calibration.models = dict.fromkeys(job.conversations, 1), dict(job.models)
    if not len(texts.index_W):
        return calibration.to_bytes()
    contexts_of = _contexts(job, turns, texts, model, drafter)
    paths_of = {number: [context.path for context in contexts] for number, contexts in contexts_of.items()}
    for number, at in visited(paths_of):
        turn, context = turns[number], contexts_of[number][at]
        assert context.path is not None
        calibration.add(
            context.path,
            group=turn.conversation,
            context=context.length,
            task=turn.source,
            sampled=job.temperature > 0,
        )
    return calibration.to_bytes()


class _Context(NamedTuple):
    """A position of an answer: its rank path (None if unknown), and the tokens before it."""

    path: RankPath | None
    length: int


def _contexts(
    job: Job, turns: Sequence[Prompt], texts: Distilled, model: Any, drafter: Any
) -> dict[int, list[_Context]]:
    """Every context of the answers, by the number of the text; sampled text is ranked with the noise of its draw."""
    from draftwood.compiler.training.batch import NONE, Batch
    from draftwood.tools.training.shared_noise import BatchNoise
    from draftwood.tools.training.states import States
    from draftwood.tools.training.trainer import ranks_of

    def noise_of(text_B: np.ndarray, batch: Batch) -> BatchNoise:
        samplings = [sampling_of(job, turns[number]) for number in text_B]
        return BatchNoise(batch, samplings, drafter.ids_V, model.config.vocabulary)

    shared = noise_of if job.temperature else None
    ended_W, states = texts.ended(), States(model, texts, drafter.aux)
    contexts: dict[int, list[_Context]] = {}
    for text_B, batch, ranks_NI in ranks_of(drafter, states, np.arange(len(texts.index_W)), CANDIDATES, shared):
        known_N = (batch.targets(drafter.levels) != NONE).all(1).tolist()
        rows, places = (part.tolist() for part in batch.there_BC.nonzero().unbind(1))
        for n, (row, place) in enumerate(zip(rows, places, strict=True)):
            number = int(text_B[row])
            # Near the end of a text that was cut short the next tokens are unknown.
            path = path_of(ranks_NI[n].tolist(), CANDIDATES) if known_N[n] or ended_W[number] else None
            length = int(batch.slot_BC[row, place]) + 2
            contexts.setdefault(number, []).append(_Context(path, length))
    return contexts


@lru_cache(maxsize=1)
def _loaded(teacher: Path, drafter: Path) -> tuple[Tokenizer, Any, Any]:
    """Once a process: tokenizer, teacher and drafter."""
    from draftwood.compiler.training.teacher import FrozenTeacher
    from draftwood.tools.tokenizers import tokenizer_of
    from draftwood.tools.training.students import load

    model = FrozenTeacher.open(teacher)
    return tokenizer_of(teacher), model, load(drafter, model, LEVELS)


def _answers(job: Job, text: Tokenizer, model: Any) -> tuple[list[Prompt], Distilled]:
    """The answers to every turn, a later one after the answer to the one before: the turns, and their texts.

    A conversation ends when it grows too long for the teacher, which is said.
    """
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.training.generate import engine_draws, generate

    checkpoint = Checkpoint.open(job.teacher)
    longest = checkpoint.config.max_positions - job.max_new_tokens
    answered: list[Prompt] = []
    whole: list[tuple[list[int], list[int]]] = []
    going = [(Conversation(text), turns) for turns in job.conversations.values()]
    for turn in range(max(map(len, job.conversations.values()))):
        questions = [
            (conversation, turns[turn], conversation.ask(turns[turn]), turns)
            for conversation, turns in going
            if turn < len(turns)
        ]
        for _, prompt, ids, _ in questions:
            if len(ids) > longest:
                print(f"prompt {prompt.id}: left out with what follows it: {_too_long(ids, job)}", file=sys.stderr)
        questions = [question for question in questions if len(question[2]) <= longest]
        if not questions:
            break
        samplings = [sampling_of(job, prompt) for _, prompt, _, _ in questions]
        prompts = [ids for _, _, ids, _ in questions]
        written = generate(model, prompts, engine_draws(samplings), job.max_new_tokens, checkpoint.config.eos)
        for (conversation, prompt, ids, _), new in zip(questions, written, strict=True):
            conversation.answer(new)
            answered.append(prompt)
            whole.append((ids, new))
        going = [(conversation, turns) for conversation, _, _, turns in questions]
    return answered, _distilled(whole, job.temperature, checkpoint)


def _too_long(ids: Sequence[int], job: Job) -> str:
    return f"{len(ids)} tokens and {job.max_new_tokens} of the answer are more than the teacher's positions"


def sampling_of(job: Job, turn: Prompt) -> Sampling:
    """Each turn has a seed of its own, so that no two share their noise."""
    return Sampling(temperature=job.temperature, seed=zlib.crc32(turn.id.encode()))


def _distilled(texts: Sequence[tuple[list[int], list[int]]], temperature: float, checkpoint: Checkpoint) -> Distilled:
    """(prompt, answer) pairs in the form that the trainers read."""
    from draftwood.tools.training.texts import INDEX, Distilled

    index_W = np.zeros(len(texts), INDEX)
    index_W["prompt"] = [len(prompt) for prompt, _ in texts]
    index_W["length"] = [len(prompt) + len(new) for prompt, new in texts]
    index_W["start"] = np.cumsum(index_W["length"]) - index_W["length"]
    index_W["temperature"] = temperature
    tokens_N = np.array([token for prompt, new in texts for token in (*prompt, *new)], np.uint32)
    return Distilled(tokens_N, index_W, (len(index_W),), checkpoint.digest(), "", tuple(checkpoint.config.eos))
