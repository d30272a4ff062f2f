"""A speech server in this process, whose model costs nothing."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

from speaking import quick_warble

from warble_mlx.server.serve import HttpServer, listener
from warble_mlx.server.settings import Settings
from warble_mlx.server.worker import End, Job, Worker

CASES = Path(__file__).parent / "cases"
TRANSCRIPT = "The old lighthouse keeper counted every passing ship before the fog."
LONG = (TRANSCRIPT + " ") * 12
THREE_ROWS = Settings(
    rows=3, queue=2, max_text=3000, max_upload=1 << 20, body_timeout_s=1.5, ahead_s=5
)


class Running:
    """A server on a port of its own, in this process."""

    def __init__(self, settings: Settings) -> None:
        self.socket = listener("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.worker = Worker(lambda: quick_warble()[0], settings)
        self._model = threading.Thread(target=self.worker.run, daemon=True)
        self._model.start()
        self.http = HttpServer(self.worker, settings)
        self.ends: list[tuple[Job, End]] = []
        count = self.worker.on_end
        self.worker.on_end = lambda job, end: (self.ends.append((job, end)), count(job, end))[1]
        self._thread = threading.Thread(
            target=self.http.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self._thread.start()
        while not self.http.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.http.should_exit = True
        self._thread.join()
        self._model.join()
        self.socket.close()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self.connection()
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, raw, names)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, data

    def say(self, text: str, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        return self.ask("POST", "/v1/audio/speech", {"input": text, **fields})

    def wait(self, condition: Any) -> None:
        for _ in range(3000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("it never came to be")

    def idle(self) -> bool:
        return not self.worker.busy and not self.worker.waiting


def error_of(raw: bytes) -> dict[str, Any]:
    """The error in an answer, in the form of OpenAI's."""
    error: dict[str, Any] = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The server-sent events of an answer, which ends with a whole one."""
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]
