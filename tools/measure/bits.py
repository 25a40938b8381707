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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import StagedEngine, open_engine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.step import Draft, accept
from draftwood.tools.commands.arguments import add_engine_argument
from draftwood.tools.comparison import single
from draftwood.tools.prompts import read_prompts
from draftwood.tools.script import refusing
from draftwood.trees import Topology, TreeBuffers, tensorize

# T tree rows, V vocabulary

# A row's kind, its logits, and those of plain steps of one row and of two.
Row = tuple[str, NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]

# What plain decoding runs: a row alone, or one that is not.
ONE, TWO = tensorize(Topology.plain()), tensorize(Topology.chain(1))


@dataclass(kw_only=True, slots=True)
class Count:
    """Rows of a kind; how many have the bits of a plain step of one row and of two; the largest difference."""

    rows: int = 0
    equal_one: int = 0
    equal_two: int = 0
    apart: float = 0.0

    def add(self, got_V: NDArray[np.float32], one_V: NDArray[np.float32], two_V: NDArray[np.float32]) -> None:
        self.rows += 1
        self.equal_one += _same(got_V, one_V)
        self.equal_two += _same(got_V, two_V)
        self.apart = max(self.apart, float(np.abs(got_V - one_V).max()))


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


def measure(
    engine: StagedEngine,
    texts: Sequence[list[int]],
    sampling: Sampling,
    gear: Gear,
    new: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Counts by the kind of row, over ``new`` tokens behind every text; ``say`` takes the progress."""
    found = {kind: Count() for kind in ("root", "principal", "other", "prompt")}
    for number, text in enumerate(texts):
        for kind, *logits in _rows(engine, text, sampling, gear, new):
            found[kind].add(*logits)
        say(f"{number + 1}/{len(texts)} texts")
    return {kind: asdict(count) for kind, count in found.items()}


def _rows(engine: StagedEngine, text: list[int], sampling: Sampling, gear: Gear, new: int) -> Iterator[Row]:
    """Every row of the steps behind a text, and the last row of a prompt that holds as much as each step committed."""
    state, known = engine.begin(gear.slots, sampling), [*text]
    engine.start(state, np.array(text, np.int64))
    one, two = (Plain(engine, tree, text, gear.slots) for tree in (ONE, TWO))
    room = gear.slots - 2 * engine.bundle.manifest.dims.branch_rows
    while state.length < min(len(text) + new, room):
        draft = engine.draft([state], gear)[0]
        logits_TV = engine.verify([state], [draft]).logits_BRV[0].copy()
        for row, plain in enumerate(zip(logits_TV, one.rows(draft), two.rows(draft), strict=True)):
            yield _kind(draft.tree, row), *plain
        path = accept(state, draft, logits_TV)
        state.commit(path.rows, root=path.bonus)
        tokens = draft.tokens_T[list(path.rows)].tolist()
        known += tokens
        prompt_V = single.prefill(engine, engine.begin(gear.slots), np.array(known)).logits_RV[0].copy()
        yield "prompt", prompt_V, one.follow(tokens), two.follow(tokens)


def _kind(tree: TreeBuffers, row: int) -> str:
    """The root; a row whose ancestors lie in consecutive slots; any other."""
    return "root" if row == 0 else "principal" if tree.depths[row] == row else "other"


def _same(a_V: NDArray[np.float32], b_V: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(a_V.view(np.int32), b_V.view(np.int32)))


def _print(report: dict[str, Any]) -> None:
    print(f"{report['engine']}, {report['gear']}, T = {report['temperature']}: rows with the bits of a plain step of")
    print(f"{'kind':10} {'rows':>7} {'one row':>8} {'two rows':>9} {'apart at most':>14}")
    for kind, count in report["rows"].items():
        print(f"{kind:10} {count['rows']:7} {count['equal_one']:8} {count['equal_two']:9} {count['apart']:14.1e}")


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="prompts to use (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="tokens a prompt (default: 32)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 decodes greedily (default)")
    parser.add_argument("--gear", metavar="NAME", help="default: the largest tree, at the largest KV length")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")
    add_engine_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    args = parser.parse_args(arguments)
    bundle = Bundle.open(args.bundle)
    if bundle.tokenizer is None:
        raise RequestError(f"{args.bundle}: has no tokenizer, so text prompts cannot be used")
    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    gear = max(bundle.manifest.gears, key=lambda gear: (rows[gear.tree], gear.slots))
    gear = bundle.gear(args.gear) if args.gear else gear
    share_threads(args.threads)
    engine = open_engine(bundle, args.engine)
    texts = [bundle.tokenizer.encode(prompt.text) for prompt in read_prompts(args.prompts, args.limit)]
    say = partial(print, file=sys.stderr, flush=True)
    found = measure(engine, texts, Sampling(temperature=args.temperature), gear, args.max_new_tokens, say)
    report = {"engine": args.engine or "cpu", "gear": gear.name, "temperature": args.temperature, "rows": found}
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
