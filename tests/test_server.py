"""`warble serve` as its clients see it: on a real socket, with the client of OpenAI and without."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from serving import CASES, LONG, THREE_ROWS, Running, error_of, events_of
from speaking import quick_warble

from warble_mlx import Warble
from warble_mlx.audio import encode
from warble_mlx.server.encoders import FORMATS, can_encode


@pytest.fixture(scope="module")
def server(quick_rows: None) -> Iterator[Running]:
    running = Running(THREE_ROWS)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def warble() -> Warble:
    return quick_warble()[0]


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
