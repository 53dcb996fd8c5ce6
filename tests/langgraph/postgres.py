"""A PostgreSQL server that the tests start themselves."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def postgres_server() -> Iterator[str]:
    """The address of a server with an empty database; skips the test where there is no program."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    program = shutil.which("initdb") or (str(max(found)) if found else None)
    if program is None:
        pytest.skip("PostgreSQL's server is not installed")
    is_root = os.geteuid() == 0
    if is_root and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no runuser")
    with tempfile.TemporaryDirectory(prefix="patchkv-postgres-") as folder:
        user = ["runuser", "-u", "postgres", "--"] if is_root else []
        if is_root:
            shutil.chown(folder, "postgres")
        data = f"{folder}/data"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
        run = subprocess.run
        run(
            [*user, program, "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"],
            check=True,
            **quiet,  # type: ignore[call-overload]
        )
        control = str(Path(program).with_name("pg_ctl"))
        port = _free_port()
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        start = [*user, control, "-D", data, "-w", "-o", options, "-l", f"{folder}/log", "start"]
        run(start, check=True, **quiet)  # type: ignore[call-overload]
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            stop = [*user, control, "-D", data, "-m", "immediate", "stop"]
            run(stop, check=False, **quiet)  # type: ignore[call-overload]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
