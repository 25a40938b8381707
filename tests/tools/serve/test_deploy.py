"""Engines on Ray: a printed application is what was asked for, and two replicas bear what one engine bears."""

import contextlib
import http.client
import importlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import draftwood
from draftwood.errors import RequestError
from draftwood.tools import cli

from .conftest import LONG, WAIT, until

pytest.importorskip("ray", reason="needs the extra cluster")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own code

SLOW_RAY = """
def init(*given, **named):
    raise Exception("The current node timed out during startup. This could happen because ...")

def shutdown():
    pass
"""
STARTED = """
from draftwood.errors import RequestError
from draftwood.tools.cluster.connection import own_ray
try:
    with own_ray(1):
        pass
except RequestError as error:
    print(error)
"""

# So many that with two replicas all fall to one of them once in two thousand times.
SESSIONS = "abcdefghijkl"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.main(["deploy", *map(str, arguments), "--print"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_ray_that_does_not_start_is_one_line(python: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(SLOW_RAY)
    said = python(STARTED)
    assert said.startswith("Ray does not start here: The current node timed out during startup; try again")
    assert said.count("\n") == 1


def test_the_printed_application_is_importable_and_as_asked(
    npu_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.serve.schema import ServeDeploySchema

    asked = ("--replicas", "2:5", "--threads", 3, "--engine", "npu")
    config = printed(capsys, npu_bundle, *asked)
    (one,) = ServeDeploySchema.model_validate(config).applications
    assert one.route_prefix is None
    module, _, name = one.import_path.partition(":")
    deployment = getattr(importlib.import_module(module), name)(one.args)._bound_deployment
    assert deployment.max_ongoing_requests == 8  # of a launch
    assert deployment.ray_actor_options == {"num_cpus": 3, "resources": {"NPU": 1}}
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 8)
    assert printed(capsys, npu_bundle, *asked) == config
    more = (4 if word == 3 else word for word in asked)
    assert printed(capsys, npu_bundle, *more)["applications"][0]["name"] != one.name


def test_a_fixed_number_of_replicas_on_processors(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from draftwood.tools.cluster.application import application

    (one,) = printed(capsys, tiny_bundle, "--replicas", 2, "--threads", 1)["applications"]
    deployment = application(one["args"])._bound_deployment
    assert (deployment.num_replicas, deployment.ray_actor_options) == (2, {"num_cpus": 1, "resources": {}})
    with pytest.raises(RequestError, match="texst"):
        application(one["args"] | {"texst": 1})
    with pytest.raises(RequestError, match="thread"):
        application(one["args"] | {"opening": {"thread": 1}})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "1000", "--threads", "1000"], "the engines need 1000000 processors"),
        (["--replicas", "3:2"], "invalid number, or two as 1:4 value"),
        (["--replicas", "1", "--threads", "0"], "threads: Expected `int` >= 1"),
        (["--engine", "ge"], "--engine ge: "),
        (["--address", "127.0.0.1:1"], "RAY_AUTH_MODE=token"),
    ],
)
def test_what_cannot_be_deployed_is_one_line(
    tiny_bundle: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["deploy", str(tiny_bundle), *arguments]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_bundle_of_another_version_is_told_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": 1}')
    assert cli.main(["deploy", str(tmp_path), "--print"]) == 2
    assert "schema version 1, expected" in capsys.readouterr().err


def test_a_cluster_without_encryption_is_not_joined(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert cli.main(["deploy", str(tiny_bundle), "--address", "127.0.0.1:1"]) == 2
    assert "RAY_USE_TLS=1" in capsys.readouterr().err


class Cluster:
    """A running ``draftwood deploy``, seen through its processes."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def processes(self, name: str) -> list[int]:
        return [one for one in processes_of(self.server.process.pid) if name in command(one).partition(" ")[0]]

    def replicas(self) -> list[int]:
        return replicas_of(self.server.process.pid)

    def engines(self) -> dict[int, int]:
        """By their replicas, those that have started theirs."""
        below = {replica: children(replica) for replica in self.replicas()}
        worker = "draftwood.tools.serve.worker"
        return {replica: child for replica in below for child in below[replica] if worker in command(child)}

    def sessions(self) -> dict[int, str]:
        """One of each replica, once the front knows them both."""
        found: dict[int, str] = {}

        def all_known() -> bool:
            found.update({self.served_by(session): session for session in SESSIONS})
            return len(found) == 2

        until(all_known)
        assert set(found) == set(self.replicas())
        return found

    def served_by(self, session: str) -> int:
        """The replica whose engine worked while a session's text was decoded."""
        engines = self.engines()
        before = {replica: ticks(engine) for replica, engine in engines.items()}
        status, answer, _ = self.server.ask("/v1/completions", LONG, x_session_id=session)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 240)
        worked = {replica: ticks(engine) - before[replica] for replica, engine in engines.items()}
        return max(worked, key=lambda replica: worked[replica])


def processes_of(first: int) -> list[int]:
    """A process, all that it has started, and all that those have."""
    found = [first]
    for process in found:
        found += children(process)
    return found


def replicas_of(first: int) -> list[int]:
    return sorted(one for one in processes_of(first) if command(one).startswith("ray::ServeReplica"))


def children(process: int) -> list[int]:
    """Children of all its threads; each may end at any moment."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def ticks(process: int) -> int:
    """Processor time, user's and system's."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.fixture(scope="module")
def cluster(started: Callable[..., Any], tiny_bundle: Path) -> Cluster:
    arguments = ("--replicas", 2, "--limit", "waiting=3", "--threads", 1)
    return Cluster(started(f"tiny={tiny_bundle}", *arguments, command="deploy"))


@pytest.mark.slow
class TestTwoReplicas:
    """In order, on one cluster."""

    def test_a_text_is_what_the_bundle_gives_alone(self, cluster: Cluster, tiny_bundle: Path) -> None:
        body = {"prompt": "the cat sat", "max_tokens": 40, "seed": 7, "temperature": 0.8}
        _, answer, _ = cluster.server.ask("/v1/completions", body)
        with draftwood.open(tiny_bundle) as model:
            alone = model.generate("the cat sat", max_new_tokens=40, seed=7, temperature=0.8)
        assert answer["choices"][0]["text"] == alone.text

    def test_a_session_stays_and_sessions_spread(self, cluster: Cluster) -> None:
        cluster.sessions()
        served = {session: cluster.served_by(session) for session in SESSIONS}
        assert set(served.values()) == set(cluster.replicas())
        assert {session: cluster.served_by(session) for session in SESSIONS} == served

    def test_more_than_all_places_and_the_queue_is_our_503(self, cluster: Cluster) -> None:
        engines = cluster.engines().values()
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        with ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(cluster.server.ask, "/v1/completions", LONG | {"max_tokens": 4}) for _ in range(16)]
            limit = time.monotonic() + WAIT
            while sum(one.done() for one in asked) < 5:
                assert time.monotonic() < limit
                time.sleep(0.05)
            for engine in engines:
                os.kill(engine, signal.SIGCONT)
            found = sorted((one.result() for one in asked), key=lambda one: one[0])
        assert [status for status, _, _ in found] == [200] * 11 + [503] * 5
        assert {answer["error"]["code"] for _, answer, _ in found[11:]} == {"queue_full"}
        assert all(headers["retry-after"] for _, _, headers in found[11:])

    @pytest.mark.parametrize("killed", ["replica", "engine"])
    def test_a_killed_replica_ends_its_streams_alone_and_comes_back(self, cluster: Cluster, killed: str) -> None:
        session, engines, streams = cluster.sessions(), cluster.engines(), {}
        first, other = cluster.replicas()
        for replica in (first, other):
            streams[replica] = stream(cluster.server, session[replica])
            os.kill(engines[replica], signal.SIGSTOP)
        os.kill(first if killed == "replica" else engines[first], signal.SIGKILL)
        last = json.loads(streams[first].read().decode().strip().splitlines()[-1][6:])
        assert last["error"]["code"] == "engine_failed"
        for engine in (engines[other], *([engines[first]] if killed == "replica" else [])):
            os.kill(engine, signal.SIGCONT)
        assert streams[other].read().endswith(b"data: [DONE]\n\n")
        until(lambda: gone(engines[first]))
        until(lambda: len(cluster.replicas()) == 2 and first not in cluster.replicas())
        until(lambda: cluster.server.ask("/health")[1]["models"]["tiny"]["restarts"] == 1 + (killed == "engine"))
        assert cluster.server.ask("/v1/completions", LONG, x_session_id=session[first])[0] == 200

    def test_a_killed_controller_costs_no_text_and_comes_back(self, cluster: Cluster) -> None:
        server = cluster.server
        (controller,) = cluster.processes("ray::ServeController")
        replicas, streams = cluster.replicas(), [stream(server, session) for session in SESSIONS[:3]]
        os.kill(controller, signal.SIGKILL)
        until(lambda: gone(controller))
        assert server.ask("/v1/completions", LONG)[0] == 200  # by the replicas that the front knows
        assert all(one.read().endswith(b"data: [DONE]\n\n") for one in streams)
        until(lambda: controller not in cluster.processes("ray::ServeController") != [])
        assert cluster.replicas() == replicas
        os.kill(replicas[0], signal.SIGKILL)  # which the new controller replaces
        until(lambda: gone(replicas[0]))
        assert replicas[0] not in cluster.sessions()

    def test_nothing_beyond_this_machine_is_open_to_strangers(self, cluster: Cluster) -> None:
        import grpc

        open_ports = listening(set(processes_of(cluster.server.process.pid)))
        assert len(open_ports) > 5
        # Of its own making Ray Serve binds one port of a replica to all interfaces.
        beyond = {process: port for process, port in open_ports if port is not None}
        assert set(beyond) <= set(cluster.replicas())
        for port in beyond.values():
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
                with pytest.raises(grpc.RpcError) as refused:
                    ask(b"", timeout=WAIT)
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED

    def test_sigterm_ends_all_of_it(self, cluster: Cluster) -> None:
        processes = processes_of(cluster.server.process.pid)
        folder = {found[1] for one in processes if (found := re.search(r"(/tmp/ray-\w+)/", command(one)))}
        assert len(folder) == 1 and Path(folder.pop()).stat().st_mode & 0o77 == 0
        assert cluster.server.end() == 0
        until(lambda: all(map(gone, processes)))


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["ray::DashboardAgent", "raylet/raylet", "gcs_server"])
def test_a_server_whose_ray_is_killed_ends_with_an_error(
    tiny_bundle: Path, started: Callable[..., Any], killed: str
) -> None:
    """For who started it to start it again: within a minute, and Ray needs one to see that its GCS is gone."""
    cluster = Cluster(started(f"tiny={tiny_bundle}", "--threads", 1, command="deploy"))
    (one,), ((replica, engine),) = cluster.processes(killed), cluster.engines().items()
    os.kill(one, signal.SIGKILL)
    assert cluster.server.process.wait(WAIT) not in (0, -signal.SIGKILL)
    until(lambda: gone(replica) and gone(engine))


@pytest.mark.slow
def test_a_cluster_that_answers_strangers_is_not_joined(
    tiny_bundle: Path, head: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with head("disabled") as (address, _):
        assert cli.main(["deploy", str(tiny_bundle), "--address", address, "--trusted-network"]) == 2
    assert "answers without a token" in capfd.readouterr().err


@pytest.mark.slow
def test_the_replicas_of_a_cluster_stay_for_the_next_front(
    tiny_bundle: Path, head: Callable[..., Any], started: Callable[..., Any]
) -> None:
    arguments = (f"tiny={tiny_bundle}", "--threads", 1, "--replicas", 2, "--trusted-network")
    replicas, texts = [], []
    with head("token") as (address, first):
        for _ in range(2):
            server = started(*arguments, "--address", address, command="deploy")
            texts.append(server.ask("/v1/completions", LONG)[1]["choices"][0]["text"])
            assert server.end() == 0
            replicas.append(replicas_of(first))
    assert len(replicas[0]) == 2 and replicas[0] == replicas[1]
    assert texts[0] == texts[1]


def stream(server: Any, session: str) -> http.client.HTTPResponse:
    """A stream after its first line was read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    headers = {"content-type": "application/json", "x-session-id": session}
    connection.request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}), headers)
    answer = connection.getresponse()
    answer.readline()
    return answer


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def listening(processes: set[int]) -> list[tuple[int, int | None]]:
    """Processes that listen, each with the port where that is on another interface than loopback's."""
    sockets = {}
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                sockets[str(descriptor.readlink())] = process
            except OSError:
                continue
    found = []
    for table, local in (("tcp", {"0100007F"}), ("tcp6", {"0000000000000000FFFF00000100007F", "0" * 24 + "01000000"})):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            process = sockets.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and process is not None:
                found.append((process, None if address in local else int(port, 16)))
    return found
