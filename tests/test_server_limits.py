"""`warble serve` when much is asked of it: many at once, large bodies, uploads, closed doors."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from serving import CASES, LONG, THREE_ROWS, TRANSCRIPT, Running, error_of, events_of
from speaking import quick_warble

from warble_mlx import Warble
from warble_mlx.server import app as server_app
from warble_mlx.server.settings import Settings


@pytest.fixture(scope="module")
def server(quick_rows: None) -> Iterator[Running]:
    running = Running(THREE_ROWS)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def warble() -> Warble:
    return quick_warble()[0]


# ---------------------------------------------------------------------------- many at once


def test_side_by_side_each_gets_what_it_gets_alone(server: Running) -> None:
    texts = ["Hi", "Where did you go?", "Yes.", "Good morning.", "Bye"]
    ask = {"response_format": "wav"}
    alone = [server.say(text, seed=i, **ask)[2] for i, text in enumerate(texts)]
    together: dict[int, bytes] = {}

    def go(i: int) -> None:
        together[i] = server.say(texts[i], seed=i, **ask)[2]

    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(texts))] == alone


def test_the_line_is_bounded_and_left(server: Running) -> None:
    waiting = []
    for count in range(5):  # three rows and two places in line
        connection = server.connection()
        connection.request("POST", "/v1/audio/speech", json.dumps({"input": LONG}))
        waiting.append(connection)
        server.wait(lambda: server.worker.busy + server.worker.waiting == count + 1)  # noqa: B023
    status, headers, raw = server.say("Hi")
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert error_of(raw)["type"] == "rate_limit_error"
    for connection in waiting:
        connection.close()
    server.wait(server.idle)
    assert server.say("Hi")[0] == 200
    _, _, text = server.ask("GET", "/metrics")
    metrics = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    assert float(metrics['warble_requests_total{path="/audio/speech",status="429"}']) == 1
    assert float(metrics['warble_failures_total{reason="client-left"}']) >= 5
    assert float(metrics["warble_queue_length"]) == 0
    assert float(metrics["warble_first_audio_seconds_count"]) > 1
    assert float(metrics["warble_rtf_count"]) > 1


def test_a_slow_client_is_waited_for(server: Running) -> None:
    """What it has not taken is bounded, and in the end it has all of it."""
    text = LONG * 3
    asked = {"input": text, "seed": 1, "response_format": "wav"}
    whole = server.say(text, **{name: asked[name] for name in ("seed", "response_format")})[2]
    made = server.ends[-1][0].samples
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps(asked).encode()
        head = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(b"POST /v1/audio/speech HTTP/1.1\r\n" + head.encode() + body)
        server.wait(lambda: server.worker.busy == 1)
        (job,) = server.worker._speaking.values()
        before = -1
        while job.samples != before:  # it goes on until it waits
            before = job.samples
            time.sleep(0.4)
        assert server.worker.busy == 1
        assert job.samples - job.taken < 44_100 * 20
        assert job.samples < made
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert answer.read() == whole
        answer.close()


def test_a_sick_speech_is_no_whole_one(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from warble_mlx.errors import SickError
    from warble_mlx.health import FrameMonitor

    see = FrameMonitor.see
    limit = 0

    def judge(self: FrameMonitor, codes: np.ndarray) -> None:
        see(self, codes)
        if self.frames == limit:
            raise SickError("codes-repeat", "seen", "cause", "remedy")

    monkeypatch.setattr(FrameMonitor, "see", judge)
    limit = 2  # before the first sound
    status, _, raw = server.say("Where did you go?", seed=3)
    assert (status, error_of(raw)["code"]) == (500, "codes-repeat")
    limit = 9  # behind it
    connection = server.connection()
    body = {"input": "Where did you go?", "seed": 3, "response_format": "wav"}
    connection.request("POST", "/v1/audio/speech", json.dumps(body))
    with connection.getresponse() as answer, pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()
    _, _, raw = server.say("Where did you go?", seed=3, stream_format="sse")
    assert events_of(raw)[-1]["type"] == "error"
    assert events_of(raw)[-1]["error"]["code"] == "codes-repeat"


def test_a_defect_ends_the_requests_and_not_the_server(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warble_mlx.ensemble import Ensemble

    def broken(_self: Ensemble) -> None:
        monkeypatch.undo()
        raise RuntimeError("[metal] out of memory")

    monkeypatch.setattr(Ensemble, "step", broken)
    status, _, raw = server.say("Hi")
    assert (status, error_of(raw)["code"]) == (500, "internal")
    assert server.say("Hi")[0] == 200


# ---------------------------------------------------------------------------- bodies


def test_bodies_that_are_too_large_or_too_slow(server: Running) -> None:
    status, _, raw = server.ask("POST", "/v1/audio/speech", b" " * (10 << 20))
    assert status == 413
    assert "too large" in error_of(raw)["message"]
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(
            b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        assert half.recv(99).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", server.port)) as half:  # and one that just goes
        half.sendall(
            b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
    chunked = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked"
    with socket.create_connection(("127.0.0.1", server.port)) as endless:
        endless.sendall(chunked + b"\r\n\r\n")
        block = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        sent = 0
        while sent < 99:
            try:
                endless.sendall(block)
            except OSError:
                break  # whichever way the connection breaks
            sent += 1
        assert sent < 99
    assert server.say("Hi")[0] == 200


def form(fields: dict[str, str], clip: bytes | None, filename: str = "me.wav") -> tuple[bytes, str]:
    border = "border"
    parts = [
        f'--{border}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if clip is not None:
        head = f'Content-Disposition: form-data; name="audio_sample"; filename="{filename}"'
        parts.append(f"--{border}\r\n{head}\r\n\r\n".encode() + clip + b"\r\n")
    return b"".join(parts) + f"--{border}--\r\n".encode(), f"multipart/form-data; boundary={border}"


def upload(server: Running, *args: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    body, kind = form(*args, **options)
    status, _, raw = server.ask("POST", "/v1/audio/voices", body, Content_Type=kind)
    return status, json.loads(raw)


def test_a_voice_is_registered_by_upload(server: Running, no_registered_voices: Path) -> None:
    clip = (CASES / "ref" / "ref_16k_mono.wav").read_bytes()
    fields = {"name": "anna", "transcript": TRANSCRIPT, "language": "en"}
    status, made = upload(server, fields, clip, filename="../../evil.wav")
    assert (status, made["id"]) == (201, "anna"), made
    assert [path.name for path in no_registered_voices.iterdir()] == ["anna.safetensors"]
    _, _, voices = server.ask("GET", "/v1/audio/voices")
    assert json.loads(voices)["voices"][-1] == {
        "id": "anna", "name": "anna", "language": "en", "description": "", "kind": "registered"
    }  # fmt: skip
    status, headers, _ = server.say("Hi", voice={"id": "Anna"})
    assert (status, headers["x-warble-voice"]) == (200, "anna")
    assert upload(server, fields, clip)[0] == 409
    assert upload(server, {**fields, "name": "../up"}, clip)[0] == 400
    assert upload(server, {**fields, "name": "Vera"}, clip)[0] == 400
    status, refused = upload(server, {**fields, "name": "b"}, b"no audio")
    assert status == 400
    assert "audio_sample" in refused["error"]["message"]
    assert "/tmp" not in refused["error"]["message"]
    assert upload(server, {"name": "b"}, clip)[0] == 400
    assert upload(server, {**fields, "name": "b"}, None)[0] == 400
    assert upload(server, {**fields, "name": "b"}, bytes(2 << 20))[0] == 413
    assert server.ask("POST", "/v1/audio/voices", b"{}")[0] == 400
    assert len(list(no_registered_voices.iterdir())) == 1


# ---------------------------------------------------------------------------- doors and logs


def test_a_token_opens_the_door() -> None:
    running = Running(Settings(rows=1, token="s3cret", cors_origins=("http://good.example",)))
    try:
        for path in ("/v1/models", "/metrics", "/v1/audio/voices"):
            status, _, raw = running.ask("GET", path)
            assert (status, error_of(raw)["code"]) == (401, "invalid_api_key")
        assert running.ask("GET", "/v1/models", Authorization="Bearer s3cre")[0] == 401
        assert running.ask("GET", "/v1/models", Authorization="Bearer s3cret")[0] == 200
        assert running.ask("GET", "/health")[0] == running.ask("GET", "/")[0] == 200
        preflight = {"Origin": "http://good.example", "Access_Control_Request_Method": "POST"}
        status, headers, _ = running.ask("OPTIONS", "/v1/audio/speech", **preflight)
        assert (status, headers["access-control-allow-origin"]) == (200, "http://good.example")
        preflight["Origin"] = "http://bad.example"
        assert running.ask("OPTIONS", "/v1/audio/speech", **preflight)[0] in (400, 403)
    finally:
        running.stop()


def test_the_log_has_no_text_in_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(server_app.log, "info", lines.append)
    server.say("Yes.", seed=1)
    server.wait(lambda: len(lines) == 2)
    events = {json.loads(line)["event"]: json.loads(line) for line in lines}
    assert events["speech"]["characters"] == 4
    assert events["speech"]["reason"] == "stop"
    assert events["request"]["status"] == 200
    assert "Yes." not in "".join(lines)
