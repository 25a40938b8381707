"""One server for the tests of a module, as a user starts it: its own process, and its engine's."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import draftwood

pytest.importorskip("uvicorn")

# Seconds that a test waits for an event; no bound of how long the event takes, since a machine may be busy.
WAIT = 300.0
# A request that is still going while others come.
LONG = {
    "prompt": "the cat sat",
    "max_tokens": 240,
    "temperature": 0,
    "ignore_eos": True,
    "draftwood": {"policy": "plain"},
}

# As Qwen's template has it, in short.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>"
    " <tool_call></tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }}{{ call.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}"
)
CITIES = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
STRICT = CITIES | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "…", "parameters": STRICT, "strict": True}}
    for name in ("weather", "time")
]
MESSAGES = [{"role": "user", "content": "the cat"}]


class Server:
    """A running ``draftwood serve``, or another command that serves."""

    def __init__(self, name: str, *arguments: str, before: str = "") -> None:
        program = f"{before}\nimport sys\nfrom draftwood.tools.cli import main\nsys.exit(main(sys.argv[1:]))"
        run = ("-c", program) if before else ("-m", "draftwood.tools.cli")
        command = [sys.executable, "-P", *run, name, *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"ready: http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, body (read as JSON if it is that), headers."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | {name.replace("_", "-"): one for name, one in headers.items()}
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT) as answer:
                return answer.status, _read(answer.read()), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, _read(error.read()), error.headers

    def metric(self, name: str) -> float:
        """The sum over labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=WAIT) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def engines(self) -> list[int]:
        """Process ids of its engines."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(one) for one in children]

    def idle(self) -> bool:
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content


def until(true: Callable[[], bool]) -> None:
    """Waits for a condition to come true."""
    limit = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < limit, "did not come true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[..., Server]]:
    """Starts servers, and ends those that are left. A server's process runs the lines of ``before`` first."""
    servers: list[Server] = []

    def start(*arguments: object, command: str = "serve", before: str = "") -> Server:
        servers.append(Server(command, *map(str, arguments), before=before))
        return servers[-1]

    yield start
    for server in servers:
        server.process.terminate()  # Ray's processes are many, and not all end with who is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(10)
        server.process.kill()


@pytest.fixture(scope="session")
def two_texts(tiny_bundle: Path) -> int:
    """Bytes that the caches of two texts of the whole context take; by itself there is room for twice a launch's."""
    with draftwood.open(tiny_bundle, threads=1) as model:
        return model.figures().budget_bytes // model.engine.max_batch


@pytest.fixture(scope="session")
def tools_bundle(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose chat template takes tools. Read only."""
    folder = tmp_path_factory.mktemp("tools")
    shutil.copytree(tiny_teacher, folder / "teacher")
    return bundle_of_template(folder, TEMPLATE)


def bundle_of_template(folder: Path, template: str) -> Path:
    """A bundle, in ``folder``, of the teacher that lies there, with another chat template."""
    from draftwood.trees.spec import read_specs

    path = folder / "teacher" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    trees = read_specs("lookup:full:2x1").trees
    request = draftwood.BuildRequest(model=folder / "teacher", drafter=None, trees=trees, slots=(512,), prefill_rows=())
    draftwood.build(request, folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def server(started: Callable[..., Server], tiny_bundle: Path, two_texts: int) -> Server:
    limits = [word for limit in ("waiting=3", "deadline=2", "body=20000") for word in ("--limit", limit)]
    return started(f"tiny={tiny_bundle}", "--limit", f"caches={two_texts}", *limits, "--threads", 1)
