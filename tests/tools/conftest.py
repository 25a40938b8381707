"""A Ray cluster that others have started, as an operator does."""

import contextlib
import datetime
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts clusters, with a token that this process has too: gives address and first process.

    Ray's sockets lie in a folder of its own, for their paths have to be short.
    """
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")

    @contextlib.contextmanager
    def start(mode: str) -> Iterator[tuple[str, int]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
        words += ["--disable-usage-stats", "--object-store-memory=100000000", f"--temp-dir={folder}/ray"]
        command = [sys.executable, "-m", "ray.scripts.scripts", *words]
        environment = os.environ | {"RAY_AUTH_MODE": mode}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert any("Ray runtime started" in line for line in process.stdout)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(300)

    yield start
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate for this machine, which signs itself."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(("192.0.2.1", 1))  # sends nothing
        addresses = {"127.0.0.1", found.getsockname()[0]}
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "draftwood")])
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (tmp_path / "tls.key").write_bytes(secret)
    (tmp_path / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "tls.key"))
    for which in ("SERVER_CERT", "CA_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{which}", str(tmp_path / "tls.crt"))
