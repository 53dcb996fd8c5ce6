"""Servers that the store tests start themselves."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest


@dataclass
class RedisServer:
    """A redis-server process of our own."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A redis-server on a free port, without files; skips the test where there is no binary."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    port = free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
    server = RedisServer(process, port)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server that speaks as much of S3's protocol as a bucket of blobs needs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class _Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    objects: ClassVar[dict[str, bytes]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_PUT(self) -> None:
        with self.lock:
            self.objects[self.path] = self._body()
        self._answer(200)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        with self.lock:
            if "list-type" not in query:
                found = self.objects.get(self.path)
                self._answer(404 if found is None else 200, found or b"")
                return
            names = [path.removeprefix(url.path.rstrip("/") + "/") for path in self.objects]
            contents = "".join(
                f"<Contents><Key>{name}</Key><Size>{len(self.objects[f'{url.path}/{name}'])}</Size>"
                '<ETag>"1"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'
                for name in names
                if name.startswith(query.get("prefix", [""])[0])
            )
        self._answer(200, f"<ListBucketResult>{contents}</ListBucketResult>".encode())

    def do_POST(self) -> None:
        bucket = urlsplit(self.path).path.rstrip("/")
        names = re.findall(rb"<Key>([^<]*)</Key>", self._body())
        with self.lock:
            for name in names:
                self.objects.pop(f"{bucket}/{name.decode()}", None)
        deleted = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % name for name in names)
        self._answer(200, b"<DeleteResult>%s</DeleteResult>" % deleted)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
