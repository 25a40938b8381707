"""The Ray Serve application of a bundle: replicas with one engine each. Nothing in it listens on HTTP.

Ray imports this module on every machine of a cluster; ``draftwood deploy`` and Serve's own files name ``application``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from draftwood.errors import RequestError
from draftwood.runtime.engines.registry import engine_kind
from draftwood.tools.cluster.replica import Deployed, Replica

IMPORT_PATH = "draftwood.tools.cluster.application:application"
# Ray counts the NPUs of a machine by this name, and shows a replica its own alone.
NPU = "NPU"
# A line for every text is the front's.
QUIET = {"log_level": "WARNING", "enable_access_log": False}
# Between looks at whether a replica is alive; Ray notices the end of its process at once.
HEALTH_SECONDS = 5.0


class SessionRouter(ConsistentHashRouter):
    """A session's texts go to the replica that its name falls to; texts without a session go to the replica with the
    fewest."""

    # Of a replica that is asked how many texts it has. Ray's own tenth is less than a busy machine takes at times, and
    # then the session would go elsewhere.
    queue_len_response_deadline_s = max_queue_len_response_deadline_s = 2.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None and pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        return [candidate_replicas]


def application(values: dict[str, Any]) -> serve.Application:
    """The application that Ray Serve runs, from the fields of ``Deployed``.

    Raises:
        RequestError: one is missing, unknown, or makes no sense.
    """
    try:
        deployed = msgspec.convert(values, Deployed, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"application: {error}") from None
    engine = deployed.opening.engine
    resources = {NPU: 1} if engine is not None and engine_kind(engine).npu else {}
    sizes: dict[str, Any] = {"num_replicas": deployed.replicas}
    if deployed.most_replicas > deployed.replicas:
        sizes = {
            "autoscaling_config": {
                "min_replicas": deployed.replicas,
                "max_replicas": deployed.most_replicas,
                "target_ongoing_requests": deployed.texts,
            }
        }
    deployment = serve.deployment(
        Replica,
        max_ongoing_requests=deployed.texts,
        ray_actor_options={"num_cpus": deployed.threads, "resources": resources},
        health_check_period_s=HEALTH_SECONDS,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
        **sizes,
    )
    return deployment.bind(msgspec.to_builtins(deployed))


def config(deployed: list[Deployed]) -> dict[str, Any]:
    """The applications as Serve's own files have them, for ``serve run`` and ``serve deploy``."""
    return {
        "proxy_location": "Disabled",
        "applications": [
            {"name": each.name, "route_prefix": None, "import_path": IMPORT_PATH, "args": msgspec.to_builtins(each)}
            for each in deployed
        ],
    }
