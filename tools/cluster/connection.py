"""A connection to Ray that strangers cannot use.

Ray runs everything that it is sent, as pickles. By default its processes listen on every interface, and a cluster's ask
for no token. Here our own Ray listens only on loopback, and asks for a random token. It keeps its sockets in a folder
that other users cannot enter. A cluster that others have started has to ask for a token and to encrypt; the first is
tried before the cluster is used.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from draftwood.errors import InvariantError, RequestError

# Set before Ray is imported, which reads them once, and inherited by all its processes.
_ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Ray's name for it notwithstanding: without clusters a node's address is 127.0.0.1, to which all then bind.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_OBJECT_BYTES = 100 << 20
# Of Ray's own sockets, which have to be no longer than 107 bytes with their folder.
_FOLDER = "/tmp"
_SECONDS = 60
TOKEN_LINE = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE (made by: ray get-auth-token --generate)"
TLS_LINE = "RAY_USE_TLS=1 with RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"


@contextlib.contextmanager
def own_ray(processors: int) -> Iterator[None]:
    """A Ray on this machine alone, which ends with the block."""
    if "ray" in sys.modules:
        raise InvariantError("Ray reads its settings when it is imported, so it has to be imported after them")
    os.environ.update(_ALONE, RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    folder = tempfile.mkdtemp(prefix="ray-", dir=_FOLDER)  # of mode 0700; its own Ray opens to everyone
    try:
        try:
            ray.init(
                "local",
                num_cpus=processors,
                include_dashboard=False,
                object_store_memory=_OBJECT_BYTES,
                _temp_dir=f"{folder}/ray",
                configure_logging=False,
            )
        except Exception as error:  # it has no family for this; 30 s are its own limit
            why = str(error).partition("\n")[0].partition(". ")[0]
            raise RequestError(
                f"Ray does not start here: {why}; try again when the machine has less to do, or use draftwood serve,"
                " which needs no Ray"
            ) from error
        address = ray.util.get_node_ip_address()
        if not ipaddress.ip_address(address).is_loopback:
            raise RequestError(f"Ray listens on {address}, beyond this machine; install the release of constraints.txt")
        yield
        _must_be_here()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def joined(address: str, trusted_network: bool | None = None) -> Iterator[None]:
    """The Ray of a cluster that this machine belongs to; it goes on after the block.

    ``trusted_network`` True takes one without TLS, None says that this cannot be asked for.

    Raises:
        RequestError: it is not there, or does not keep strangers out.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise RequestError(f"{address}: Ray would run what anyone sends; on every machine set {TOKEN_LINE}")
    if not trusted_network and os.environ.get("RAY_USE_TLS", "0") != "1":
        raise RequestError(
            f"{address}: token and texts would go unencrypted; on every machine set {TLS_LINE}"
            f"{'' if trusted_network is None else ', or say --trusted-network'}"
        )
    if answers_strangers(address):
        raise RequestError(f"{address}: this Ray answers without a token; start it anew, with {TOKEN_LINE}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    try:
        ray.init(address, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RequestError(f"{address}: {str(error).partition(chr(10))[0]}") from error
    try:
        yield
        _must_be_here()
    finally:
        ray.shutdown()


def here() -> bool:
    """Whether the Ray of this machine lives."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return any(machine["NodeID"] == node and machine["Alive"] for machine in ray.nodes())


def _must_be_here() -> None:
    if not here():
        raise RequestError("Ray on this machine has ended before this command; its log says why, and so may dmesg")


def answers_strangers(address: str) -> bool:
    """Whether Ray at an address answers someone who has no token."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(
            command,
            env=environment | {"RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
