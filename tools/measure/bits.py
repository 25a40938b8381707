"""How many rows of tree steps have the bits of plain decoding, by the kind of row, and why the others have not.

    python -m draftwood.tools.measure.bits BUNDLE [--bitwise] [--temperature T] [--json]

Every row of every step, accepted or not, is held against plain decoding of its own path: one row a step, and one row
beside an idle second one, which tells a one-row kernel from all else. Rows are the root; the principal chain, whose
ancestors lie in the slots that plain decoding uses; others, whose ancestors do not; and the last row of a prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import StagedEngine, open_engine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.speculation.step import Draft, accept
from draftwood.tools.commands.arguments import add_decoding_arguments, add_engine_argument, options
from draftwood.tools.comparison import single
from draftwood.tools.measure.bench import turn_prompts
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.trees import Topology, TreeBuffers, tensorize

# T tree rows, V vocabulary

KINDS = ("root", "principal", "other", "prompt")
# What plain decoding runs: a row alone, or one that is not.
ONE, TWO = tensorize(Topology.plain()), tensorize(Topology.chain(1))


class Row(NamedTuple):
    """A row's kind, the position that it draws for, its logits, and those of plain steps of one row and of two."""

    kind: str
    position: int
    got_V: NDArray[np.float32]
    one_V: NDArray[np.float32]
    two_V: NDArray[np.float32] | None


@dataclass(kw_only=True, slots=True)
class Count:
    """Rows of a kind; how many have the bits of a plain step of one row and of two; how far they are from that of one
    at most, and how many draw another token."""

    rows: int = 0
    equal_one: int = 0
    equal_two: int = 0
    apart: float = 0.0
    redrawn: int = 0

    def add(self, row: Row, sampling: Sampling) -> None:
        same = _same(row.got_V, row.one_V)
        self.rows += 1
        self.equal_one += same
        self.equal_two += row.two_V is not None and _same(row.got_V, row.two_V)
        if not same:
            self.apart = max(self.apart, float(np.abs(row.got_V - row.one_V).max()))
            got, one = (draw(logits_V, sampling, row.position) for logits_V in (row.got_V, row.one_V))
            self.redrawn += got != one


class Plain:
    """Plain decoding of a text by steps of one tree, whose first row alone counts."""

    def __init__(self, engine: StagedEngine, tree: TreeBuffers, text: list[int], slots: int) -> None:
        self.engine, self.tree, self.state = engine, tree, engine.begin(slots)
        self.state.draft = None  # nothing is drafted from it
        engine.prefill(self.state, np.array(text, np.int64))

    def follow(self, tokens: Iterable[int]) -> NDArray[np.float32]:
        """Commits tokens; the logits behind the last."""
        for token in tokens:
            logits_V = single.verify(self.engine, self.state, np.full(self.tree.rows, token), self.tree).logits_RV[0]
            self.state.commit([0])
        return logits_V.copy()

    def rows(self, draft: Draft) -> list[NDArray[np.float32]]:
        """Logits of every row of a tree by its path alone; nothing stays committed."""
        length, tree = self.state.length, draft.tree
        found: dict[int, NDArray[np.float32]] = {}
        # A path's rows follow each other, so that what is above a row is there already.
        for row in sorted(range(tree.rows), key=lambda row: tree.paths[row, : tree.depths[row] + 1].tolist()):
            self.state.rollback(length + int(tree.depths[row]))
            found[row] = self.follow([int(draft.tokens_T[row])])
        self.state.rollback(length)
        return [found[row] for row in range(tree.rows)]


class Held:
    """Texts of a gear's tree, held against plain decoding row by row; ``beside`` also against steps of two rows."""

    def __init__(self, engine: StagedEngine, gear: Gear, sampling: Sampling, beside: bool = True) -> None:
        self.engine, self.gear, self.sampling = engine, gear, sampling
        self.plain = (ONE, TWO) if beside else (ONE,)
        self.rows = {kind: Count() for kind in KINDS}
        self.texts = self.steps = self.tokens = 0

    def answer(self, text: list[int], new: int) -> list[int]:
        """Counts the rows of the steps behind a text; returns the tokens that they gained, at most ``new``."""
        known, ends = [*text], frozenset(self.engine.bundle.manifest.teacher.eos)
        for rows, gained in self._steps(text, new):
            for row in rows:
                self.rows[row.kind].add(row, self.sampling)
            self.steps += bool(rows)
            end = next((at for at, token in enumerate(gained) if token in ends), None)
            known += gained if end is None else gained[: end + 1]
            if end is not None:
                break
        answer = known[len(text) :][:new]
        self.texts, self.tokens = self.texts + 1, self.tokens + len(answer)
        return answer

    def counts(self) -> dict[str, dict[str, Any]]:
        """Those of every kind of row; nothing is said of steps of two rows where none were taken."""
        left_out = () if len(self.plain) > 1 else ("equal_two",)
        return {
            kind: {name: value for name, value in asdict(count).items() if name not in left_out}
            for kind, count in self.rows.items()
        }

    def _steps(self, text: list[int], new: int) -> Iterator[tuple[list[Row], list[int]]]:
        """Of every step behind a text its rows, the last one of a prompt that holds as much, and the tokens gained."""
        engine, known = self.engine, [*text]
        state = engine.begin(self.gear.slots, self.sampling)
        root = engine.start(state, np.array(text, np.int64)).tokens[0]
        plains = [Plain(engine, tree, text, self.gear.slots) for tree in self.plain]
        room = self.gear.slots - 2 * engine.bundle.manifest.dims.branch_rows
        yield [], [root]
        while state.length < min(len(text) + new, room):
            draft = engine.draft([state], self.gear)[0]
            logits_TV = single.verify(engine, state, draft.tokens_T, draft.tree).logits_RV.copy()
            each = zip(*(plain.rows(draft) for plain in plains), strict=True)
            position_T = state.length + 1 + draft.tree.depths
            rows = [
                Row(_kind(draft.tree, row), int(position_T[row]), logits_TV[row], *_pair(plain))
                for row, plain in enumerate(each)
            ]
            path = accept(state, draft, logits_TV)
            state.commit(path.rows, root=path.bonus)
            tokens = draft.tokens_T[list(path.rows)].tolist()
            known += tokens
            prompt_V = single.prefill(engine, engine.begin(self.gear.slots), np.array(known)).logits_RV[0].copy()
            rows.append(Row("prompt", len(known), prompt_V, *_pair([plain.follow(tokens) for plain in plains])))
            yield rows, [*tokens[1:], path.bonus]


def measure(
    engine: StagedEngine, texts: Sequence[list[int]], sampling: Sampling, gear: Gear, new: int
) -> dict[str, dict[str, Any]]:
    """Counts by the kind of row, over ``new`` tokens behind every text."""
    held = Held(engine, gear, sampling)
    for text in texts:
        held.answer(text, new)
    return held.counts()


def _pair(logits: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Logits of a step of one row, and of one of two rows where that was taken."""
    return logits[0], logits[1] if len(logits) > 1 else None


def _kind(tree: TreeBuffers, row: int) -> str:
    """The root; a row whose ancestors lie in consecutive slots; any other."""
    return "root" if row == 0 else "principal" if tree.depths[row] == row else "other"


def _same(a_V: NDArray[np.float32], b_V: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(a_V.view(np.int32), b_V.view(np.int32)))


def _print(report: dict[str, Any]) -> None:
    sampling = " ".join(f"{name} {value}" for name, value in report["sampling"].items())
    print(f"{report['engine']}, {report['gear']}, {sampling}: {report['texts']} texts of {report['tokens']} tokens in")
    print(f"{report['steps']} steps. Rows with the bits of a plain step of")
    print(f"{'kind':10} {'rows':>8} {'one row':>8} {'two rows':>9} {'apart at most':>14} {'drawn otherwise':>16}")
    for kind, count in report["rows"].items():
        beside = count.get("equal_two", "-")
        print(
            f"{kind:10} {count['rows']:8} {count['equal_one']:8} {beside:>9} {count['apart']:14.1e}"
            f" {count['redrawn']:16}"
        )


def answer_all(held: Held, prompts: list[Prompt], new: int) -> None:
    """Every turn, each behind those before it in its conversation and their answers; says how far it is."""
    answers: dict[str, list[int]] = {}
    for prompt, text in turn_prompts(held.engine, prompts, answers):
        answers[prompt.conversation] = held.answer(text, new)
        rows, equal = (sum(getattr(count, of) for count in held.rows.values()) for of in ("rows", "equal_one"))
        print(f"{held.texts}/{len(prompts)} texts, {equal} of {rows} rows equal", file=sys.stderr, flush=True)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="turns to run (default: all)")
    parser.add_argument("--gear", metavar="NAME", help="default: the largest tree, at the largest KV length")
    parser.add_argument("--one", action="store_true", help="hold rows against steps of one row alone: half the time")
    add_decoding_arguments(parser)
    add_engine_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    args = parser.parse_args(arguments)
    bundle, chosen = Bundle.open(args.bundle), options(args)
    if bundle.tokenizer is None:
        raise RequestError(f"{args.bundle}: has no tokenizer, so text prompts cannot be used")
    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    gear = max(bundle.manifest.gears, key=lambda gear: (rows[gear.tree], gear.slots))
    gear = bundle.gear(args.gear) if args.gear else gear
    share_threads(args.threads)
    held = Held(open_engine(bundle, args.engine), gear, chosen.sampling, beside=not args.one)
    answer_all(held, read_prompts(args.prompts, args.limit), chosen.max_new_tokens)
    report = {
        "engine": args.engine or "cpu", "gear": gear.name, "sampling": asdict(chosen.sampling), "texts": held.texts,
        "tokens": held.tokens, "steps": held.steps, "rows": held.counts(),
    }  # fmt: skip
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
