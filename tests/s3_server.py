"""A local S3 server with a proxy that injects faults, in a separate process.

    with s3_server() as server:      # sets the environment: endpoint, credentials
        server.faults(0.05, seed=1)  # the share of requests that fail from now on

Faults: "before" fails the request, "after" carries it out and loses the answer (so a repetition meets its own effect);
each as status 500, 503 SlowDown, 429 or a closed connection; "slow" waits; "truncate" cuts the answer; "damage" changes
a byte of an uploaded body. Statistics: requests by kind and fault.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.request import Request, urlopen

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "TOPSECRET", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
}  # fmt: skip
KINDS = ("before", "after", "slow", "truncate", "damage")
ANSWERS = {
    500: b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>",
    503: b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    429: b"<Error><Code>TooManyRequests</Code><Message>too many requests</Message></Error>",
    403: b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
    400: b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>",
}


class Proxy(BaseHTTPRequestHandler):
    """Forwards to the S3 server on the port `behind`."""

    protocol_version = "HTTP/1.1"
    behind = 0
    rate, refuse = 0.0, 0
    rng: random.Random
    counts: ClassVar[Counter[str]] = Counter()

    def log_message(self, *args):
        return

    def _handle(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/-/"):
            return self._control(body)
        fault = self.rng.choice(KINDS) if self.rng.random() < self.rate else None
        self.counts[self.command] += 1
        self.counts["bytes"] += len(body)
        if fault:
            self.counts[f"fault {fault}"] += 1
        if self.refuse:
            return self._answer(self.refuse, ANSWERS[self.refuse])
        if fault == "before":
            return self._fail()
        if fault == "slow":
            time.sleep(self.rng.uniform(0.02, 0.3))
        if fault == "damage" and self.command == "PUT" and body:
            at = self.rng.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        connection = http.client.HTTPConnection("127.0.0.1", self.behind)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data, headers = answer.read(), dict(answer.headers.items())
        finally:
            connection.close()
        if fault == "after":
            return self._fail()
        self._answer(answer.status, data, headers, cut=fault == "truncate")
        return None

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle

    def _fail(self):
        status = self.rng.choice((500, 503, 429, 0))
        if status:
            self._answer(status, ANSWERS[status])
        else:
            self.close_connection = True
            self.connection.close()

    def _answer(self, status, data, headers=None, *, cut=False):
        self.send_response(status)
        for name, value in (headers or {}).items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(name, value)
        length = (headers or {}).get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if cut and data:
            self.close_connection, data = True, data[: len(data) // 2]
        if self.command != "HEAD":
            self.wfile.write(data)

    def _control(self, body):
        values = json.loads(body)
        counts = dict(self.counts)
        if values.get("reset"):
            self.counts.clear()
        if "rate" in values:
            Proxy.rate, Proxy.refuse, Proxy.rng = values["rate"], values["refuse"], random.Random(values["seed"])
        self._answer(200, json.dumps(counts).encode())


class Quiet(ThreadingHTTPServer):
    """Prints nothing about closed connections."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, address):
        return


class Server:
    """The server process. url: of the proxy; direct: of the S3 server without faults."""

    def __init__(self, url: str, direct: str) -> None:
        self.url, self.direct = url, direct

    def faults(self, rate: float, seed: int = 0, refuse: int = 0) -> None:
        """Let this share of the requests fail; refuse: answer every request with this status."""
        self._control(rate=rate, seed=seed, refuse=refuse)

    def counts(self, *, reset: bool = False) -> dict[str, int]:
        """Requests by kind and fault."""
        return self._control(reset=reset)

    def _control(self, **values):
        with urlopen(Request(f"{self.url}/-/", json.dumps(values).encode(), method="POST"), timeout=20) as answer:
            return json.load(answer)


@contextlib.contextmanager
def s3_server(state: Path):
    """Run the server; the environment then points to it. state: XDG_STATE_HOME."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        behind, port = json.loads(process.stdout.readline())
        server = Server(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{behind}")
        values = {**ENVIRONMENT, "AWS_ENDPOINT_URL": server.url, "XDG_STATE_HOME": str(state)}
        before = {name: os.environ.get(name) for name in values}
        os.environ |= values
        try:
            yield server
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    finally:
        process.stdin.close()
        process.wait(20)


def main() -> None:
    """Serve until stdin is closed."""
    os.environ["S3_UPLOAD_PART_MIN_SIZE"] = "256"
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    Proxy.rng = random.Random(0)
    Proxy.behind = server.get_host_and_port()[1]
    proxy = Quiet(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    print(json.dumps([Proxy.behind, proxy.server_port]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
