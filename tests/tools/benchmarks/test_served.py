"""Servers that are measured end with the process that started them."""

import os
import signal
import subprocess
import sys

import pytest

# Starts a "server" that says when it runs, and never ends; then waits for ever.
PARENT = """
import os, subprocess, sys
from draftwood.tools.benchmarks.served import WITH_PARENT
child = "import signal, sys; print('runs', flush=True); signal.pause()"
subprocess.Popen([*WITH_PARENT, str(os.getpid()), sys.executable, "-c", child, *sys.argv[1:]]).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own way of Linux")
def test_a_killed_parent_takes_its_server_with_it() -> None:
    read, write = os.pipe()
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=write)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.readline() == "runs\n"
        parent.send_signal(signal.SIGKILL)
        # The end of the file comes when parent and server have both ended.
        assert said.read() == ""
    parent.wait()
