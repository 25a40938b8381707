"""Lets the frozen teacher write the texts its drafter learns from (self-distillation).

Prompts are user turns and beginnings of texts, and those that the teacher writes itself. Resumable: shards that are
there are kept, and a shard depends on the settings and its number alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.training.precision import compute_dtype
from draftwood.compiler.training.teacher import FrozenTeacher, training_device
from draftwood.errors import RequestError
from draftwood.files import write_whole
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.made_from import alone_in, begin_in, read_note
from draftwood.tools.tokenizers import read_tokenizer
from draftwood.tools.training.generate import batch_draws, generate
from draftwood.tools.training.own_prompts import OwnPrompts, own_rows
from draftwood.tools.training.rows import Row
from draftwood.tools.training.states import FOLDER, LARGEST, Writing
from draftwood.tools.training.team import Team
from draftwood.tools.training.texts import INDEX
from draftwood.version import __version__

# B rows of a batch, N new tokens

# By default half of the texts are greedy, the others are sampled: the uses a drafter must serve.
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)
# The file of what was asked for.
SETTINGS = "distill.json"
# The file of the prompts that the teacher has written.
OWN = "prompts.jsonl"
# Tokens of a text row that serve as its prompt, and the longest chat prompt that is used.
TEXT_PROMPT, LONGEST_PROMPT = 48, 384
# Texts written side by side at most, and the bytes that their caches may take.
MOST_TEXTS, CACHE_BYTES = {"cpu": 128, "cuda": 2048}, 32 * 10**9
# Batches of a shard: enough for batches of prompts of like length, few enough to lose little when stopped.
SHARD_BATCHES = {"cpu": 8, "cuda": 4}
_NO_ROWS = "no rows to take prompts from; name more --data"
# Seconds between two lines of progress.
_SAY_EVERY = 10.0


class Prompts:
    """Prompt number i of a seed: the rows in one random order, over and over, with another turn each time."""

    def __init__(self, rows: Sequence[Row], text: Tokenizer, seed: int, longest: int) -> None:
        if not rows:
            raise RequestError(_NO_ROWS)
        self.longest = min(LONGEST_PROMPT, longest)
        self.rows, self.text, self.seed = rows, text, seed
        self.order = np.random.default_rng(seed).permutation(len(rows))
        places, digests = dict[bytes, int](), (hashlib.sha256(_line({**row, "id": ""})).digest() for row in rows)
        self.first = [places.setdefault(digest, place) for place, digest in enumerate(digests)]

    def source(self, number: int) -> int:
        """The place in the corpus of the row that prompt ``number`` is made of; of rows that differ in their id alone,
        the first one's, so that they are held out together."""
        return self.first[self.order[number % len(self.order)]]

    def __call__(self, number: int) -> list[int]:
        row = self.rows[self.source(number)]
        try:
            return self._of(row, number)
        except RequestError as error:
            raise RequestError(f"--data, row {row['id']!r}: {error}; mend the row, or leave it out") from None

    def _of(self, row: Row, number: int) -> list[int]:
        if "text" in row:
            # Only the first tokens are wanted, and no token is as long as 40 characters on average.
            return self.text.encode(row["text"][: 40 * TEXT_PROMPT])[: min(TEXT_PROMPT, self.longest)]
        turns = [at for at, message in enumerate(row["messages"]) if message["role"] == "user"]
        chosen = int(np.random.default_rng((self.seed, number)).integers(len(turns))) if turns else -1
        for turn in reversed(turns[: chosen + 1]):
            prompt = self.text.chat([dict(message) for message in row["messages"][: turn + 1]])
            if len(prompt) <= self.longest:
                return prompt
        return []


def write_shard(
    model: FrozenTeacher, prompts: Prompts, ends: Sequence[int], folder: Path, shard: int, rows: int,
    new_tokens: int, batch: int, temperatures: Sequence[float], told: Callable[[int], None], states: Writing,
) -> int:  # fmt: skip
    """Generates texts ``shard * rows`` and on, and writes tokens, index and the teacher's states; how many texts.

    ``told`` is called as ``generate`` does.

    Raises:
        RequestError: there is no prompt for any of them.
    """
    heat_of = partial(_heat, temperatures, len(prompts.rows))
    numbers = range(shard * rows, (shard + 1) * rows)
    prompt_ids = {number: prompt for number in numbers if (prompt := prompts(number))}
    if not prompt_ids:
        raise RequestError(
            f"prompts {numbers.start + 1} to {numbers.stop}: none has a user's turn of 1 to {prompts.longest} tokens;"
            " expected shorter ones, or others"
        )
    texts: dict[int, list[int]] = {}
    ordered = sorted(prompt_ids, key=lambda number: (len(prompt_ids[number]), number))
    for at in range(0, len(ordered), batch):
        chosen = ordered[at : at + batch]
        # No two batches of a run share their noise.
        draws = batch_draws([heat_of(n) for n in chosen], (prompts.seed % 2**31 << 32) + chosen[0], model.device)
        keep = partial(_keep, states, chosen, [len(prompt_ids[n]) for n in chosen])
        written = generate(model, [prompt_ids[n] for n in chosen], draws, new_tokens, ends, told, keep, states.aux)
        texts.update({n: prompt_ids[n] + new for n, new in zip(chosen, written, strict=True)})
    index = np.zeros(len(prompt_ids), INDEX)
    index["length"] = [len(texts[n]) for n in prompt_ids]
    index["start"] = np.cumsum(index["length"]) - index["length"]
    index["prompt"] = [len(prompt_ids[n]) for n in prompt_ids]
    index["temperature"] = [heat_of(n) for n in prompt_ids]
    index["source"] = [prompts.source(n) for n in prompt_ids]
    tokens = np.concatenate([np.asarray(texts[n], dtype=np.uint32) for n in prompt_ids])
    states.save(list(prompt_ids), index["length"].tolist(), tokens)
    save_array(folder / f"shard-{shard:04}.npy", tokens)
    save_array(folder / f"shard-{shard:04}.index.npy", index)  # last: its presence says that the shard is whole
    return len(prompt_ids)


class WritingProgress:
    """Tokens written by this process and how fast, said to stderr every ten seconds and whenever a shard is whole."""

    def __init__(self, log: Path, shards: int) -> None:
        """``shards``: how many the texts are in; before the first one the teacher writes prompts."""
        self.log, self.shards, self.tokens, self.longest = log, shards, 0, LONGEST_PROMPT
        self.shard: int | None = None
        self.began = self.said = time.monotonic()

    def told(self, tokens: int) -> None:
        """So many more are written."""
        self.tokens += tokens
        if time.monotonic() - self.said >= _SAY_EVERY:
            self.said = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def whole(self, left_out: int = 0) -> None:
        """The shard is on disk, but for so many texts whose prompts were not taken; the log gets a line."""
        with self.log.open("a") as log:
            log.write(json.dumps(self._record() | {"left_out": left_out}) + "\n")
        without = f" without {left_out} texts: no user's turn of 1 to {self.longest} tokens" if left_out else ""
        print(f"{self._line()}; the shard is written{without}", file=sys.stderr, flush=True)

    def _record(self) -> dict[str, int | None]:
        return {"shard": self.shard, "new_tokens": self.tokens, "tokens_per_s": self._rate()}

    def _line(self) -> str:
        place = "prompts" if self.shard is None else f"shard {self.shard + 1} of {self.shards}"
        return f"{place}: {self.tokens} tokens so far, {self._rate()} tokens/s"

    def _rate(self) -> int:
        return round(self.tokens / max(1e-9, time.monotonic() - self.began))


def _keep(states: Writing, texts: Sequence[int], prompts: Sequence[int], rows: Sequence[int], fed_BTA: Tensor) -> None:
    """Takes the states of ``rows`` of a batch, which are of ``texts``."""
    states.take([texts[row] for row in rows], [prompts[row] for row in rows], fed_BTA)


def _heat(temperatures: Sequence[float], rows: int, number: int) -> float:
    """The temperature of a text by its number. A row has the next one whenever it comes again: an even number of rows
    would otherwise be half greedy ones, whose text is the same each time."""
    return temperatures[(number % rows + number // rows) % len(temperatures)]


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes an array's file, whole; OSError if the disk is full, say."""
    content = BytesIO()  # numpy's own error of a full disk has no number
    np.save(content, array)
    write_whole(path, content.getvalue())


def distill(
    teacher: Path, corpus: Sequence[Row], out: Path, *, rows: int, own: int = 0, new_tokens: int = 160,
    batch: int | None = None, seed: int = 0, shard_rows: int | None = None,
    temperatures: Sequence[float] = TEMPERATURES, team: Team | None = None, device: torch.device | None = None,
) -> None:  # fmt: skip
    """Writes the shards that are missing for ``rows`` texts (rounded up to whole shards) to ``out``.

    The processes of a team write every so-many-th shard each; without a device it is the GPU if there is one.

    Args:
        own: prompts that the teacher writes itself, besides those of the corpus; about as many, see ``OwnPrompts``.

    Raises:
        RequestError: ``out`` holds shards of other settings, or other files; there is no prompt.
    """
    checkpoint, device = Checkpoint.open(teacher), device or training_device()
    batch = batch or texts_at_once(checkpoint.config, device.type, new_tokens)
    shard_rows = shard_rows or SHARD_BATCHES[device.type] * batch
    if min(rows, new_tokens, batch) < 1:
        raise RequestError(f"rows {rows}, new tokens {new_tokens}, batch {batch}: expected 1 or more of each")
    if new_tokens >= (positions := checkpoint.config.max_positions):
        raise RequestError(f"--max-new-tokens {new_tokens}: the teacher has {positions} positions; choose fewer")
    if not corpus and not own:
        raise RequestError(_NO_ROWS)
    text, text_digest = read_tokenizer(teacher)
    settings = {
        "version": __version__, "teacher": (digest := checkpoint.digest()), "tokenizer": text_digest,
        "corpus": _digest(corpus), "own": own, "new_tokens": new_tokens, "batch": batch, "seed": seed,
        "shard_rows": shard_rows, "ends": list(checkpoint.config.eos), "temperatures": list(temperatures),
    }  # fmt: skip
    team, shards = team or Team(), -(-rows // shard_rows)
    progress = WritingProgress(out / "log.jsonl", shards)
    # bf16 if it is fast: text that a bf16 teacher would write as well.
    model = cache(partial(FrozenTeacher.open, teacher, compute_dtype(device), device))
    if team.rank:
        team.wait()  # until the first has written the settings and its own prompts
    begin_in(out, (SETTINGS,))
    with nullcontext() if team.rank else alone_in(out):
        _check_settings(out, settings)
        if not team.rank:
            print(f"{shards * shard_rows} texts, in shards of {shard_rows}", file=sys.stderr, flush=True)
        if own:
            writer = partial(OwnPrompts, text=text, seed=seed, batch=batch, told=progress.told)
            written = own_rows(out / OWN, own, lambda: writer(model()))
            if not team.rank:
                _check_own(out, _digest(written))
            corpus = [*corpus, *written]
        if not team.rank:
            team.wait()
        prompts = Prompts(corpus, text, seed, positions - new_tokens)
        progress.longest = prompts.longest
        for shard in range(shards)[team.rank :: team.size]:
            if (out / f"shard-{shard:04}.index.npy").is_file():
                continue
            progress.shard = shard
            texts = write_shard(
                model(), prompts, checkpoint.config.eos, out, shard, shard_rows, new_tokens, batch, temperatures,
                progress.told, Writing(model(), digest, out / FOLDER, LARGEST[device.type]),
            )  # fmt: skip
            progress.whole(shard_rows - texts)


def texts_at_once(config: TeacherConfig, device: str, new_tokens: int) -> int:
    """A power of two, by the teacher alone and not by the free memory, so that another machine goes on with a run."""
    token = 2 * sum(rows.elements() for rows in config.buffers)  # of a half type
    text = token * (LONGEST_PROMPT + max(new_tokens, 1))
    return min(MOST_TEXTS[device], 1 << max(0, (CACHE_BYTES // text).bit_length() - 1))


def _digest(corpus: Sequence[Row]) -> str:
    """SHA-256, in hex, of all rows in their order."""
    digest = hashlib.sha256()
    for row in corpus:
        digest.update(_line(row))
    return digest.hexdigest()


def _line(row: Row) -> bytes:
    """Equal rows have equal lines."""
    return json.dumps(row, sort_keys=True).encode() + b"\n"


def _check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Writes the settings, or refuses others than those that prompts or texts were written with."""
    stored = read_note(out / SETTINGS, dict)
    differ = [name for name in settings if stored.get(name) != settings[name]]
    if differ and (_begun(out) or (out / OWN).is_file()):
        raise RequestError(
            f"{out}: was begun with other settings ({', '.join(differ)}); repeat them or name another --out"
        )
    if differ:
        write_whole(out / SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())


def _check_own(out: Path, digest: str) -> None:
    """Notes the digest of the prompts that the teacher has written; they must stay once texts are made of them."""
    stored = read_note(out / SETTINGS, dict)
    if stored.get("own_prompts", digest) != digest and _begun(out):
        raise RequestError(f"{out / OWN}: has changed since texts were made of it; put it back or name another --out")
    write_whole(out / SETTINGS, (json.dumps({**stored, "own_prompts": digest}, indent=2) + "\n").encode())


def _begun(out: Path) -> bool:
    """Whether a shard is whole."""
    return any(out.glob("shard-*.index.npy"))
