"""``draftwood deploy``: what ``serve`` does, with engines on Ray, on this machine or on a cluster's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.manifest import read_manifest
from draftwood.runtime.engines.registry import engine_kind
from draftwood.threads import default_threads
from draftwood.tools.commands import serve
from draftwood.tools.commands.arguments import opening_of

if TYPE_CHECKING:
    from draftwood.tools.cluster.replica import Deployed
    from draftwood.tools.serve.metrics import ModelMetrics
    from draftwood.tools.serve.model import ServedModel

# Texts that a replica takes at the same time if each has launches of its own. Taking one after the other would keep a
# short answer waiting for the long ones before it.
TEXTS_IN_TURNS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    parser.add_argument(
        "--replicas",
        type=_replicas,
        default=(1, 1),
        metavar="N[:M]",
        help="engines of a bundle; with M, from N to M as requests need (default: 1)",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of a running Ray cluster (default: Ray on this machine)"
    )
    parser.add_argument("--print", action="store_true", help="print the configuration for Ray Serve, and end")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.cluster.connection import joined, own_ray

    deployed = {name: _deployed(args, bundle) for name, bundle in serve.named(args.bundles).items()}
    if args.print:
        from draftwood.tools.cluster.application import config

        print(json.dumps(config(_applications(deployed)), indent=2))
        return 0

    def served(name: str, bundle: Path, metrics: ModelMetrics) -> ServedModel:
        from draftwood.tools.cluster.model import RayModel  # imports Ray, which is set up by then

        return RayModel(name, deployed[name], serve.limits_of(args)["waiting"], metrics)

    keys = serve.keys_given(args)  # before Ray is started, whose processes inherit the environment
    with joined(args.address, args.trusted_network) if args.address else own_ray(_enough(deployed)):
        return serve.run(args, keys, served)


def _deployed(args: argparse.Namespace, bundle: Path) -> Deployed:
    from draftwood.tools.cluster.replica import Deployed, manifest_digest

    manifest = read_manifest(bundle)  # a bundle that no replica could open is refused here, in one line
    if args.engine and (kind := engine_kind(args.engine)).target and not kind.runs(manifest):
        raise RequestError(
            f"--engine {kind.name}: {bundle} has no graphs for it; name another, or build it for that one"
        )
    least, most = args.replicas
    largest = max(graph.batch for lowered in manifest.graph_sets for graph in lowered.graphs)
    return Deployed(
        bundle=str(bundle.resolve()),
        manifest=manifest_digest(bundle),
        replicas=least,
        most_replicas=most,
        texts=largest if largest > 1 else TEXTS_IN_TURNS,
        opening=opening_of(
            args,
            threads=_shared_out(most * len(args.bundles)) if args.threads is None else args.threads,
            cache_bytes=serve.cache_bytes_of(args),
        ),
    )


def _applications(deployed: dict[str, Deployed]) -> list[Deployed]:
    """Each once: a bundle under two names is one application."""
    return list({each.name: each for each in deployed.values()}.values())


def _shared_out(engines: int) -> int:
    """The processors of this machine for each of so many engines."""
    return max(1, default_threads() // engines)


def _enough(deployed: dict[str, Deployed]) -> int:
    """The processors of this machine; RequestError if the replicas need more when all of them run."""
    needed = sum(each.most_replicas * each.threads for each in _applications(deployed))
    if needed > default_threads():
        raise RequestError(
            f"--replicas, --threads: the engines need {needed} processors, this machine has {default_threads()};"
            " ask for fewer, or name a cluster with --address"
        )
    return default_threads()


def _replicas(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    bounds = int(least), int(most or least)
    if not 1 <= bounds[0] <= bounds[1] <= 1000:
        raise ValueError
    return bounds


_replicas.__name__ = "number, or two as 1:4"
