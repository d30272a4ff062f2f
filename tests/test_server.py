"""`warble serve` as its clients see it: on a real socket, with the client of OpenAI and without."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from serving import Running
from speaking import QuickBatch, quick_warble

from warble_mlx import Warble, ensemble
from warble_mlx.audio import encode
from warble_mlx.server import app as server_app
from warble_mlx.server.encoders import FORMATS, can_encode
from warble_mlx.server.settings import Settings

CASES = Path(__file__).parent / "cases"
TRANSCRIPT = "The old lighthouse keeper counted every passing ship before the fog."
LONG = "The old lighthouse keeper counted every passing ship before the fog. " * 12


@pytest.fixture(scope="module", autouse=True)
def quick_rows() -> Iterator[None]:
    """What rows of a real model say beside each other is the matter of test_ensemble.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensemble, "Batch", QuickBatch)
        yield


@pytest.fixture(scope="module")
def server(quick_rows: None) -> Iterator[Running]:
    running = Running(
        Settings(rows=3, queue=2, max_text=3000, max_upload=1 << 20, body_timeout_s=1.5, ahead_s=5)
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def warble() -> Warble:
    return quick_warble()[0]


def error_of(raw: bytes) -> dict[str, Any]:
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---------------------------------------------------------------------------- the cases


MAGIC = {
    "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"),
    "opus": (b"OggS",),
    "aac": (b"\xff\xf1", b"\xff\xf9"),
    "flac": (b"fLaC",),
    "wav": (b"RIFF",),
    "pcm": (b"",),
}
ROWS = [json.loads(line) for line in (CASES / "http" / "requests.jsonl").read_text().splitlines()]


SPEECH = [r for r in ROWS if isinstance(r.get("body"), dict) and "close_after_bytes" not in r]


@pytest.mark.parametrize("case", SPEECH, ids=lambda case: case["case"])
def test_cases(server: Running, case: dict[str, Any]) -> None:
    expect, path = case["expect"], case["path"]
    answers = [server.ask(case["method"], path, case["body"]) for _ in range(case.get("repeat", 1))]
    status, headers, raw = answers[0]
    wanted = expect["status"] if isinstance(expect["status"], list) else [expect["status"]]
    assert status in wanted, raw
    if status == 200:
        kind = case["body"].get("response_format", "mp3")
        assert raw.startswith(MAGIC[kind])
        if "content_type" in expect:
            assert headers["content-type"].partition(";")[0] in expect["content_type"].split("|")
        assert kind != "opus" or b"OpusHead" in raw[:64]
        assert kind != "pcm" or len(raw) % 2 == 0
    else:
        assert error_of(raw)["type"] == "invalid_request_error"
    if expect.get("bodies_identical"):
        assert answers[0][2] == answers[1][2]
    if expect.get("same_body_as_missing_voice"):
        missing = server.ask(case["method"], path, {**case["body"], "voice": "nobody"})
        assert (missing[0], missing[2]) == (status, raw)


def test_other_seed_other_speech(server: Running) -> None:
    bodies = next(row["body"] for row in ROWS if isinstance(row.get("body"), list))
    first, second = (server.ask("POST", "/v1/audio/speech", body)[2] for body in bodies)
    assert first != second


def test_no_json_is_400(server: Running) -> None:
    (case,) = (row for row in ROWS if "raw" in row)
    status, _, raw = server.ask("POST", case["path"], case["raw"].encode())
    assert status in case["expect"]["status"]
    assert "no speech request" in error_of(raw)["message"]


def test_what_is_listed(server: Running) -> None:
    _, _, models = server.ask("GET", "/v1/models")
    assert json.loads(models)["object"] == "list"
    assert json.loads(models)["data"][0]["id"] == "bundled voice pack"
    _, _, voices = server.ask("GET", "/v1/audio/voices")
    assert [v["id"] for v in json.loads(voices)["voices"]] == [
        "Corvin",
        "Marlow",
        "Vera",
        "Finch",
        "Robin",
    ]
    status, _, health = server.ask("GET", "/health")
    assert (status, json.loads(health)["status"]) == (200, "ok")
    assert server.ask("GET", "/models")[2] == models


def test_no_page_of_another_site_comes_in(server: Running) -> None:
    (case,) = (
        (row for row in ROWS if row["method"] == "OPTIONS")
        if False
        else [row for row in ROWS if row.get("method") == "OPTIONS"]
    )
    headers = {name.replace("-", "_"): value for name, value in case["headers"].items()}
    status, answer, raw = server.ask("OPTIONS", case["path"], **headers)
    assert status == 403
    assert "access-control-allow-origin" not in answer
    assert error_of(raw)["code"] == "origin"
    own = f"http://127.0.0.1:{server.port}"
    assert server.ask("GET", "/v1/models", Origin=own)[0] == 200
    assert server.ask("GET", "/v1/models", Host="evil.example:80")[0] == 421


def test_four_first_requests_on_new_connections(server: Running) -> None:
    assert [server.say("Hi", response_format="wav")[0] for _ in range(4)] == [200] * 4


# ---------------------------------------------------------------------------- what is sent


def test_wav_is_what_say_says(server: Running, warble: Warble) -> None:
    for text, fields in (("Where did you go?", {}), ("Good morning.\n\nBye.", {"pause": 0.1})):
        _, headers, raw = server.say(text, seed=3, voice="Finch", response_format="wav", **fields)
        options = {"pause_s": fields["pause"]} if fields else {}
        speech = warble.say(text, seed=3, voice="Finch", **options)
        assert raw[44:] == encode(speech.samples, 44_100, "wav")[44:]  # the file of warble say
        assert headers["x-warble-seed"] == "3"
        assert headers["x-warble-voice"] == "Finch"
        assert raw[4:8] == raw[40:44] == b"\xff\xff\xff\xff"


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read_back(server: Running, warble: Warble, kind: str) -> None:
    if not can_encode(kind):
        status, _, raw = server.say("Hi", response_format=kind)
        assert status == 400
        assert 'pip install "warble-mlx[av]"' in error_of(raw)["message"]
        pytest.skip("PyAV is not installed")
    _, headers, raw = server.say("Where did you go?", seed=3, response_format=kind)
    wanted = warble.say("Where did you go?", seed=3).seconds
    rate = int(headers["x-warble-sample-rate"])
    if kind == "pcm":
        assert headers["content-type"] == "audio/pcm; rate=24000; channels=1"
        samples = np.frombuffer(raw, "<i2") / 32768
    elif kind in ("flac", "aac"):  # libsndfile wants a length in FLAC, and knows no AAC
        av = pytest.importorskip("av")
        with av.open(io.BytesIO(raw)) as container:
            assert container.streams.audio[0].rate == rate
            samples = np.concatenate(
                [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
            ).astype(float)
    else:
        samples, found = soundfile.read(io.BytesIO(raw))
        assert found == rate
    assert len(samples) / rate == pytest.approx(wanted, abs=0.1)
    assert np.abs(samples).max() > 0.05


@pytest.mark.parametrize("kind", FORMATS)
def test_sound_leaves_while_it_is_made(server: Running, kind: str) -> None:
    """The first bytes of sound are there while the worker still speaks."""
    if not can_encode(kind):
        pytest.skip("PyAV is not installed")
    connection = server.connection()
    body = {"input": LONG, "response_format": kind}
    connection.request("POST", "/v1/audio/speech", json.dumps(body))
    answer = connection.getresponse()
    assert len(answer.read(1500)) == 1500
    assert server.worker.busy == 1
    connection.close()
    answer.close()
    server.wait(server.idle)
    job, end = server.ends[-1]
    assert end.reason == "client-left"
    assert job.samples < 44_100 * 30


def test_sample_rates_are_what_was_asked(server: Running) -> None:
    status, headers, raw = server.say("Hi", response_format="wav", sample_rate=16_000)
    assert status == 200
    assert int.from_bytes(raw[24:28], "little") == 16_000 == int(headers["x-warble-sample-rate"])
    assert server.say("Hi", response_format="wav", sample_rate=17)[0] == 400
    assert server.say("Hi", response_format="mp3", sample_rate=16_000)[0] == 400


def events_of(raw: bytes) -> list[dict[str, Any]]:
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_events(server: Running) -> None:
    asked = {"seed": 3, "response_format": "wav"}
    _, headers, raw = server.say("Where did you go?", stream_format="sse", **asked)
    assert headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(raw)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert len(deltas) > 1
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert audio == server.say("Where did you go?", **asked)[2]
    assert done["type"] == "speech.audio.done"
    assert (done["finish_reason"], done["seed"]) == ("stop", 3)
    assert done["usage"]["output_tokens"] == round(done["seconds"] * 44_100 / 2048)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speed": 1.5}, "speed"),
        ({"response_format": "mp4"}, "response_format"),
        ({"colour": 1}, None),
        ({"seed": -1}, None),
        ({"temperature": "hot"}, None),
        ({"input": "…"}, "input"),
        ({"input": "a" * 3001}, "input"),
        ({"ref_audio": "/etc/passwd", "ref_text": "x"}, "ref_audio"),
        ({"voice": "x.safetensors"}, "voice"),
    ],
    ids=str,
)
def test_what_is_refused(server: Running, fields: dict[str, Any], param: str | None) -> None:
    status, _, raw = server.ask("POST", "/v1/audio/speech", {"input": "Hi", **fields})
    assert status == 400
    assert error_of(raw)["param"] == param


def test_instructions_are_said_to_be_ignored(server: Running) -> None:
    status, headers, _ = server.say("Hi", instructions="Whisper.", voice={"id": "alloy"})
    assert status == 200
    assert "instructions" in headers["x-warble-ignored"]
    assert headers["x-warble-voice"] == "Vera"


def test_greedy_is_possible(server: Running) -> None:
    assert server.say("Hi", temperature=0)[0] == 200
    assert server.ends[-1][0].options["temperature"] == 0


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


# ---------------------------------------------------------------------------- OpenAI's client


def test_openais_client(server: Running, warble: Warble, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "bundled voice pack"
        whole = client.audio.speech.create(
            model="tts-1", voice="Finch", input="Yes.", response_format="pcm",
            extra_body={"seed": 4},
        )  # fmt: skip
        assert len(whole.content) / 2 / 24_000 == pytest.approx(
            warble.say("Yes.", voice="Finch", seed=4).seconds, abs=0.01
        )
        target = tmp_path / "speech.mp3"
        with client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="alloy", input="Yes."
        ) as streamed:
            streamed.stream_to_file(target)
        assert soundfile.info(target).samplerate == 44_100
        with pytest.raises(openai.BadRequestError, match="there is no such voice") as refused:
            client.audio.speech.create(model="tts-1", voice="nobody", input="Yes.")
        assert refused.value.param == "voice"


def test_ffprobe_reads_the_streams(server: Running, tmp_path: Path) -> None:
    try:
        subprocess.run(["ffprobe", "-version"], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("ffprobe is not installed")
    names = {"mp3": "mp3", "opus": "opus", "flac": "flac", "wav": "pcm_s16le", "aac": "aac"}
    for kind, codec in names.items():
        if not can_encode(kind):
            continue
        path = tmp_path / f"speech.{kind}"
        path.write_bytes(server.say("Yes.", response_format=kind)[2])
        found = subprocess.run(
            ["ffprobe", "-v", "error", "-show_entries", "stream=codec_name", "-of", "csv=p=0",
             str(path)], capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert (found.stdout.strip(), found.stderr) == (codec, "")
