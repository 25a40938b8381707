"""``draftwood serve``: bundles over an HTTP interface that clients of OpenAI's speak."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.files import real_path
from draftwood.manifest import read_manifest
from draftwood.tools import demo
from draftwood.tools.commands.arguments import add_opening_arguments, opening_of

if TYPE_CHECKING:
    from draftwood.tools.serve.metrics import ModelMetrics
    from draftwood.tools.serve.model import ServedModel

KEYS = "DRAFTWOOD_API_KEYS"
# By name: the least, the most and the default of each, and what it bounds.
LIMITS = {
    "waiting": (0, 10**6, 64, "requests that wait for room, more get 503"),
    "per-key": (0, 10**6, 0, "requests of a key at once, more get 429, 0: any number"),
    "tokens": (1, 2**31 - 1, 4096, "tokens of an answer"),
    "caches": (0, 1 << 50, 0, "bytes of all caches, 0: for twice the sequences of a launch"),
    "body": (1, 1 << 30, 4 << 20, "bytes of a request"),
    "deadline": (1, 3600, 20, "seconds for a request to be whole"),
    "drain": (0, 86400, 30, "seconds for answers at SIGTERM"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="a folder, NAME=FOLDER, or demo")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=number(0, 65535), default=8000, help="default: %(default)s; 0: any")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"keys, one a line; else those of {KEYS}, by commas"
    )
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="listen beyond this machine without keys; deploy also takes a cluster without TLS",
    )
    parser.add_argument(
        "--limit",
        action="append",
        type=_limit,
        default=[],
        metavar="NAME=N",
        help="; ".join(f"{name}: {what} ({default})" for name, (*_, default, what) in LIMITS.items()) + "; repeatable",
    )
    parser.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="web page's origin that may call; repeatable"
    )
    add_opening_arguments(parser, "threads", "no-prefixes")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.serve.messages import EngineArguments
    from draftwood.tools.serve.model import ServedModel

    opening = opening_of(args, waiting=limits_of(args)["waiting"], cache_bytes=cache_bytes_of(args))

    def served(name: str, bundle: Path, metrics: ModelMetrics) -> ServedModel:
        return ServedModel(name, EngineArguments(bundle=str(bundle), opening=opening), metrics)

    return run(args, keys_given(args), served)


def run(
    args: argparse.Namespace, keys: tuple[str, ...], served: Callable[[str, Path, ModelMetrics], ServedModel]
) -> int:
    """Serves the bundles that were given until a signal, each as ``served`` makes it."""
    import asyncio
    import logging

    from draftwood.tools.serve.app import Service, Settings, is_local
    from draftwood.tools.serve.life import listening, serve
    from draftwood.tools.serve.metrics import Metrics, ModelMetrics

    local = is_local(args.host)
    if not (local or keys or args.trusted_network):
        raise RequestError(
            f"--host {args.host}: anyone who reaches it could use it; give --api-key-file, or say --trusted-network"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.raiseExceptions = False  # a log that cannot be written stops nobody's text
    limits = limits_of(args)
    settings = Settings(
        keys=keys,
        most_body=limits["body"],
        most_tokens=limits["tokens"],
        deadline=limits["deadline"],
        per_key=limits["per-key"],
        origins=tuple(args.cors),
        any_host=not local,
    )
    metrics = Metrics()
    models = {name: served(name, bundle, ModelMetrics(metrics, name)) for name, bundle in named(args.bundles).items()}
    with listening(args.host, args.port) as listener:
        asyncio.run(serve(Service(models, settings, metrics), listener, limits["drain"]))
    return 0


def limits_of(args: argparse.Namespace) -> dict[str, int]:
    """Every limit by its name; of one that is given twice the last."""
    return {name: default for name, (*_, default, _) in LIMITS.items()} | dict(args.limit)


def cache_bytes_of(args: argparse.Namespace) -> int | None:
    """The budget for caches; None if the engine chooses it."""
    return limits_of(args)["caches"] or None


def named(entries: list[str]) -> dict[str, Path]:
    """Bundles by the names that requests know them by.

    Raises:
        RequestError: two have one name.
        BundleError: one is no bundle.
    """
    bundles: dict[str, Path] = {}
    for entry in entries:
        # A folder's own path may have the sign.
        name, separator, folder = (entry, "", "") if Path(entry).is_dir() else entry.partition("=")
        path = demo.bundle(folder or entry)
        name = name if separator else entry if entry == demo.NAME else real_path(path).name
        if name in bundles:
            raise RequestError(f"{entry}: two bundles are named {name}; give NAME=FOLDER")
        read_manifest(path)  # a folder that no engine could open is refused here, in one line
        bundles[name] = path
    return bundles


def keys_given(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys of the file, or else of the environment. That has them no longer: the processes that are started later,
    to run a bundle's template and strangers' grammars, would inherit them."""
    from draftwood.tools.serve.life import read_keys

    keys = os.environ.pop(KEYS, "")
    if args.api_key_file:
        return read_keys(args.api_key_file)
    return tuple(key for part in keys.split(",") if (key := part.strip()))


def _limit(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=N, of {', '.join(LIMITS)}")
    least, most, *_ = LIMITS[name]
    if not value.isdecimal() or not least <= int(value) <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {least} to {most}")
    return name, int(value)


def number(least: int, most: int) -> type[int]:
    """For argparse: whole numbers within bounds."""

    def read(text: str) -> int:
        if not least <= int(text) <= most:
            raise ValueError
        return int(text)

    read.__name__ = f"number from {least} to {most}"
    return read  # type: ignore[return-value]
