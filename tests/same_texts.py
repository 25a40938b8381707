"""Whether a bundle's texts are functions of their requests: each prompt fresh, with its beginning kept, after a shared
beginning, together with seven others, and after a restart. Also a program:

    python -m draftwood.tests.same_texts BUNDLE --prompts FILE [--limit 200] [--new 32]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import draftwood
from draftwood.runtime.opened import OpenedBundle
from draftwood.tools.prompts import read_families

Texts = list[tuple[int, ...]]
TOGETHER = 8


def differences(folder: Path, prompts: Sequence[Sequence[int]], new: int) -> dict[str, list[int]]:
    """By way, the prompts whose greedy text is not that of plain steps from nothing, in a process of its own."""
    want = fresh(folder, prompts, new, policy="plain")
    found: dict[str, list[int]] = {}

    def hold(way: str, texts: Texts) -> None:
        found[way] = [number for number, pair in enumerate(zip(texts, want, strict=True)) if pair[0] != pair[1]]

    with draftwood.open(folder) as model:
        own = partial(_text, model, new)
        shared, kept, together = [], [], []
        for number, prompt in enumerate(prompts):
            # Another text with half of the prompt, so that the prompt is read from its middle on.
            model.generate([*prompt[: len(prompt) // 2], *prompts[number - 1][:2]], max_new_tokens=1)
            shared.append(own(prompt))
            kept.append(own(prompt))
        hits = model.figures().prefix_hits
        # Short prompts keep nothing, and the oldest beginnings make room for new ones.
        if hits < len(prompts) // 2:
            raise AssertionError(f"{hits} beginnings were kept for {2 * len(prompts)} texts")
    hold("after a shared beginning", shared)
    hold("with its beginning kept", kept)
    with draftwood.open(folder, prefixes=False) as model, ThreadPoolExecutor(TOGETHER) as threads:
        for begin in range(0, len(prompts), TOGETHER):
            group = [prompts[(begin + i) % len(prompts)] for i in range(TOGETHER)]
            together += list(threads.map(partial(_text, model, new), group))
    hold("together with seven others", together[: len(prompts)])
    with ProcessPoolExecutor(1, get_context("spawn")) as restarted:
        hold("after a restart", restarted.submit(fresh, folder, prompts, new).result())
    return found


def fresh(folder: Path, prompts: Sequence[Sequence[int]], new: int, policy: str = "adaptive") -> Texts:
    """Texts without kept beginnings, one after the other."""
    with draftwood.open(folder, prefixes=False) as model:
        return [_text(model, new, prompt, policy) for prompt in prompts]


def _text(model: OpenedBundle, new: int, prompt: Sequence[int], policy: str = "adaptive") -> tuple[int, ...]:
    return tuple(model.generate(list(prompt), policy=policy, max_new_tokens=new, ignore_eos=True).token_ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", required=True, help="a file of prompts, as bench takes it")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--new", type=int, default=32)
    given = parser.parse_args()
    began = time.perf_counter()
    with draftwood.open(given.bundle) as model:
        tokenizer = model.bundle.tokenizer
        assert tokenizer is not None
        prompts = [tokenizer.encode(prompt.text) for prompt in read_families([given.prompts])[: given.limit]]
    found = differences(given.bundle, prompts, given.new)
    for way, numbers in found.items():
        print(f"{way}: {len(numbers)} of {len(prompts)} differ {numbers or ''}".rstrip())
    print(f"{given.new} new tokens each, {time.perf_counter() - began:.0f} s")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
