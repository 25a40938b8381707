"""``draftwood export vllm-ascend``: a drafter for vLLM on an Ascend NPU, and the settings that serve it.

vLLM Ascend reads the folder that speculators writes (issue 12947 there serves one), and drafts a chain. Its attention
takes 16 rows a text at most, the root among them (``attention_v1.py``: the limit of the TND layout).
"""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from draftwood.errors import RequestError
from draftwood.tools.commands.export import add_drafter_arguments, described, write_drafter

USUAL_TOKENS, MOST_TOKENS = 5, 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drafter_arguments(parser, tokens=True)


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.drafters.registry import kind_of
    from draftwood.tools.demo import resolve

    if args.tokens is None:
        args.tokens = USUAL_TOKENS
    if args.tokens > MOST_TOKENS:
        raise RequestError(f"--tokens {args.tokens}: expected {MOST_TOKENS} at most, which is all vLLM Ascend verifies")
    kind = kind_of(resolve(args.drafter))
    if kind.name != "eagle3":
        raise RequestError(
            f"vllm-ascend: settings are known for EAGLE-3 alone, not {kind.title}; export to speculators"
        )
    found = write_drafter(args, "speculators") | {"format": args.format}
    found["speculative_config"] = settings(found["folder"], args.tokens)
    serve = f"vllm serve MODEL --speculative-config {shlex.quote(json.dumps(found['speculative_config']))}"
    print(json.dumps(found) if args.json else f"{described(found)}\n{serve}")
    return 0


def settings(folder: str, tokens: int) -> dict[str, Any]:
    """What vLLM takes for ``--speculative-config``."""
    return {"method": "eagle3", "model": folder, "num_speculative_tokens": tokens}
