"""A worker in the main thread, and what talks to clients beside it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from warble_mlx.server.worker import Worker


def beside(worker: Worker, talk: Callable[[], None], on_signal: Callable[[], None]) -> None:
    """Run the worker here, in the main thread, and `talk` in another one until it returns.

    on_signal: called at SIGINT and SIGTERM. Raises what loading the model or `talk` raises.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            talk()
        except BaseException as error:
            failed.append(error)
        finally:
            worker.stop()

    before = {
        number: signal.signal(number, lambda *_: on_signal())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    thread = threading.Thread(target=run, name="warble-talk")
    thread.start()
    try:
        worker.run()
    finally:
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed:
        raise failed[0]
