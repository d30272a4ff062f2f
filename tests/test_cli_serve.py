"""The commands `warble serve` and `warble wyoming` as processes: doors, addresses, signals."""

from __future__ import annotations

import http.client
import importlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from warble_mlx import cli
from warble_mlx.cli_serve import is_local

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_what_is_local() -> None:
    assert all(map(is_local, ["127.0.0.1", "localhost", "::1", "127.8.9.1", "[::1]"]))
    assert not any(map(is_local, ["0.0.0.0", "::", "192.168.1.5", "example.com", ""]))


def test_others_need_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--host", "0.0.0.0"]) == 2
    assert "set --token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "package", "module"),
    [
        ("serve", "starlette", "warble_mlx.server.serve"),
        ("wyoming", "wyoming", "warble_mlx.server.home_assistant"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    package: str,
    module: str,
) -> None:
    for name in [name for name in sys.modules if name.startswith("warble_mlx.server")]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name: str, *_: object) -> None:
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=package)

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(module)
    assert cli.main([command]) == 2
    assert f'pip install "warble-mlx[{"server" if command == "serve" else command}]"' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["serve", "wyoming"])
def test_an_address_in_use(capsys: pytest.CaptureFixture[str], command: str) -> None:
    pytest.importorskip("wyoming")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main([command, "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another with --port" in capsys.readouterr().err


def test_a_speech_is_finished_after_sigterm() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "warble_mlx", "serve", "--port", str(port), "--rows", "1"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        assert f"http://127.0.0.1:{port}" in running.stderr.readline()
        answers: dict[str, tuple[int, bytes]] = {}
        texts = ["A pot of hot soup stood beside the open window.", "Hi"]
        heard = [threading.Event(), threading.Event()]

        def ask(number: int) -> None:
            body = {"input": texts[number], "seed": 3, "response_format": "wav"}
            answers[texts[number]] = say(port, body, heard[number])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        threads[0].start()
        assert heard[0].wait(60)
        threads[1].start()  # waits for the only row
        while threads[1].is_alive() and waiting(port) == 0:
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        status, sound = answers[texts[0]]  # http.client would have raised had it been cut
        assert (status, len(sound) > 100_000) == (200, True)
        assert answers[texts[1]][0] == 503
        assert json.loads(answers[texts[1]][1])["error"]["code"] == "closing"
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.communicate()


def waiting(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    found: int = json.loads(connection.getresponse().read())["waiting"]
    connection.close()
    return found


def say(port: int, body: dict[str, Any], heard: threading.Event) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/audio/speech", json.dumps(body))
    answer = connection.getresponse()
    data = answer.read(45)
    heard.set()
    data += answer.read()
    connection.close()
    return answer.status, data
