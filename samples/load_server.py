"""Load and ill-treat a speech server, and say what became of it.

    python samples/load_server.py --clients 16 --seconds 300

Starts `warble serve` on a free port. Every text is first asked for alone, then by many clients at
once, streaming, until the time is over: each stream must be complete and, byte for byte, what it
was alone. The server's memory is read all the while. Then the faults: clients that leave, bodies
that stop half-way, 10 MB of text, 1,000 requests at once, and SIGTERM in the middle of a speech.
Prints one JSON object; the exit status is 0 if all went as it must.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

TEXTS = (
    "Hi.",
    "Where did you go?",
    "Good morning.",
    "The kettle sang.",
    "A pot of hot soup stood beside the open window.",
    "Yes. It rained all night.",
    "Bye.",
    "The old lighthouse keeper counted every passing ship.",
)
VOICES = ("Corvin", "Vera", "Marlow", "Finch")


class Heard(NamedTuple):
    """One answer: its status, sound, and seconds until the first of it and until the end."""

    status: int
    sound: bytes
    first_s: float
    took_s: float


class Server:
    """A server in a process of its own."""

    def __init__(self, options: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "warble_mlx", "serve", "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                self.health()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)

    def connect(self, timeout: float = 600) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def health(self) -> dict[str, Any]:
        """What `/health` says."""
        connection = self.connect()
        connection.request("GET", "/health")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def idle_after(self) -> float:
        """Seconds until no row is busy and nobody waits."""
        started = time.perf_counter()
        while (state := self.health())["busy"] or state["waiting"]:
            time.sleep(0.02)
        return time.perf_counter() - started

    def memory_mb(self) -> float:
        """Resident memory of the process."""
        found = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True
        )
        return int(found.stdout) / 1024

    def say(self, number: int) -> Heard:
        """Text and voice `number`, with a seed of its own, as WAV."""
        body = {
            "input": TEXTS[number % len(TEXTS)],
            "voice": VOICES[number % len(VOICES)],
            "seed": number,
            "response_format": "wav",
        }
        connection = self.connect()
        started = time.perf_counter()
        connection.request("POST", "/v1/audio/speech", json.dumps(body))
        answer = connection.getresponse()
        sound = answer.read(45)  # one byte behind the header
        first_s = time.perf_counter() - started
        sound += answer.read()
        connection.close()
        return Heard(answer.status, sound, first_s, time.perf_counter() - started)


def load(server: Server, clients: int, seconds: float, distinct: int) -> dict[str, Any]:
    """Many at once for a time, against each alone."""
    alone = [server.say(number).sound for number in range(distinct)]
    answers: list[tuple[int, Heard]] = []
    errors: list[str] = []
    memory = [server.memory_mb()]
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        while time.perf_counter() < end:
            number = (number * 7 + 3) % distinct
            try:
                answers.append((number, server.say(number)))
            except (OSError, http.client.HTTPException) as error:
                errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        memory.append(server.memory_mb())
    took_s = time.perf_counter() - started
    spoken_s = sum(len(heard.sound) - 44 for _, heard in answers) / 2 / 44_100
    firsts = [heard.first_s for _, heard in answers]
    different = [number for number, heard in answers if heard.sound != alone[number]]
    warm = memory[len(memory) // 4 :]  # buffers of every shape are made early
    return {
        "clients": clients,
        "seconds": round(took_s, 1),
        "streams": len(answers),
        "statuses": dict(Counter(heard.status for _, heard in answers)),
        "errors": errors,
        "unlike_alone": sorted(different),
        "speech_s": round(spoken_s, 1),
        "times_real_time": round(spoken_s / took_s, 2),
        "first_audio_s": {"p50": quantile(firsts, 50), "p95": quantile(firsts, 95)},
        "memory_mb": {
            "start": round(memory[0]),
            "after_a_quarter": round(warm[0]),
            "highest": round(max(memory)),
            "end": round(memory[-1]),
        },
    }


def quantile(values: list[float], percent: int) -> float:
    """In seconds, to the millisecond."""
    return round(float(np.percentile(values, percent)), 3)


def faults(server: Server, queued: int) -> dict[str, Any]:
    """What ill-behaved clients do, and how the server stands afterwards."""
    found: dict[str, Any] = {}
    body = json.dumps({"input": " ".join(TEXTS) * 8, "response_format": "pcm"})
    for _ in range(10):
        connection = server.connect()
        connection.request("POST", "/v1/audio/speech", body)
        answer = connection.getresponse()
        answer.read(1)
        connection.close()
        answer.close()
    found["idle_after_clients_left_s"] = round(server.idle_after(), 2)

    half = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    for one in sockets:
        one.sendall(half)
    found["status_beside_50_half_sent_bodies"] = server.say(0).status
    for one in sockets:
        one.close()

    connection = server.connect()
    connection.request("POST", "/v1/audio/speech", json.dumps({"input": "a" * (10 << 20)}))
    found["status_of_10_mb_of_text"] = connection.getresponse().status
    connection.close()

    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def ask() -> None:
        heard = server.say(0)
        with lock:
            statuses[heard.status] += 1

    threads = [threading.Thread(target=ask) for _ in range(queued)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found[f"statuses_of_{queued}_at_once"] = dict(statuses)
    found["good_afterwards"] = server.say(0).status == 200
    return found


def ended_by_signal(server: Server) -> dict[str, Any]:
    """SIGTERM while a speech is streamed: it must come to its end, and the process, too."""
    alone = server.say(3)
    answers: list[Heard] = []
    thread = threading.Thread(target=lambda: answers.append(server.say(3)))
    thread.start()
    while not server.health()["busy"]:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    return {
        "speech_is_whole": answers[0].sound == alone.sound,
        "exit_status": server.process.wait(60),
    }


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--distinct", type=int, default=32, help="different requests")
    parser.add_argument("--queued", type=int, default=1000, help="requests at once, as a fault")
    parser.add_argument("--model")
    args = parser.parse_args()
    options = ["--rows", str(args.clients), *(["--model", args.model] if args.model else [])]
    server = Server(options)
    try:
        result = {
            "load": load(server, args.clients, args.seconds, args.distinct),
            "faults": faults(server, args.queued),
            "sigterm": ended_by_signal(server),
        }
    finally:
        server.process.kill()
        server.process.wait()
    print(json.dumps(result, indent=2))
    good = (
        not result["load"]["errors"]
        and set(result["load"]["statuses"]) == {200}
        and not result["load"]["unlike_alone"]
        and result["faults"]["status_beside_50_half_sent_bodies"] == 200
        and result["faults"]["status_of_10_mb_of_text"] == 413
        and set(result["faults"][f"statuses_of_{args.queued}_at_once"]) <= {200, 429}
        and result["faults"]["good_afterwards"]
        and result["sigterm"] == {"speech_is_whole": True, "exit_status": 0}
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
