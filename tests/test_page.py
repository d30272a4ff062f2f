"""The page at `/` in a real browser: it speaks, stops, downloads and registers."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from serving import Running
from speaking import quick_warble

from warble_mlx.live import Pcm
from warble_mlx.server.settings import Settings

CLIP = Path(__file__).parent / "cases" / "ref" / "ref_16k_mono.wav"
TRANSCRIPT = "The old lighthouse keeper counted every passing ship before the fog."
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required",
            "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # fmt: skip


@pytest.fixture(scope="module")
def server(quick_rows: None) -> Iterator[Running]:
    running = Running(Settings(rows=2))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=SWITCHES)
        yield running
        running.close()


def is_fault(line: Any) -> bool:
    return line.type == "error" and not line.text.startswith("Failed to load resource")


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Wait, without a script in the page, whose policy forbids one."""
    for _ in range(1500):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError(page.locator("body").inner_text())


def says(page: Any, part: str, where: str = "#status") -> Callable[[], bool]:
    return lambda: part in page.text_content(where)


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if is_fault(line) else None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"http://127.0.0.1:{server.port}/")
    until(page, lambda: page.locator("#voice option").count() > 0)
    yield page
    context.close()
    assert not faults
    own = (f"http://127.0.0.1:{server.port}/", f"blob:http://127.0.0.1:{server.port}/", "data:")
    assert [url for url in asked if not url.startswith(own)] == []


def test_the_page_needs_nothing_from_elsewhere(server: Running) -> None:
    status, headers, raw = server.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.search(rb"(?:src|href)\s*=\s*[\"']https?:|@import|//cdn", raw)
    for wanted in (b'lang="en"', b'role="status"', b"aria-live"):
        assert wanted in raw
    labelled = set(re.findall(rb'<label for="([^"]+)"', raw))
    fields = set(re.findall(rb'<(?:input|select|textarea) id="([^"]+)"', raw))
    assert fields == labelled


def test_it_speaks_what_the_server_sends(page: Any) -> None:
    page.fill("#text", "Good morning to you.")
    page.select_option("#voice", "Finch")
    page.fill("#seed", "7")
    page.press("#text", "Control+Enter")
    page.wait_for_selector("#download", state="visible")
    said = page.text_content("#status")
    assert re.search(r"s of speech in .*RTF .*first sound after \d+ ms, seed 7", said), said
    with page.expect_download() as found:
        page.click("#download")
    data = Path(found.value.path()).read_bytes()
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    wanted = quick_warble()[0].say("Good morning to you.", voice="Finch", seed=7).samples
    assert rate == 44_100
    assert np.array_equal(samples, np.frombuffer(Pcm(44_100).encode(wanted), "<i2"))
    drawn = page.evaluate(
        "() => { const c = document.getElementById('wave');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v); }"
    )
    assert drawn


def test_it_plays_while_it_streams_and_stops(page: Any, server: Running) -> None:
    page.fill("#text", TRANSCRIPT + " " + TRANSCRIPT * 20)
    page.click("#speak")
    until(page, says(page, "Speaking"))
    assert server.worker.busy == 1
    page.click("#stop")
    until(page, says(page, "Stopped."))
    server.wait(server.idle)
    assert server.ends[-1][1].reason == "client-left"
    assert page.is_enabled("#speak")
    assert page.is_visible("#again")


def test_errors_are_shown(page: Any) -> None:
    page.fill("#text", "…")
    page.click("#speak")
    page.wait_for_selector("#status.bad")
    assert "nothing to say" in page.text_content("#status")


def test_a_voice_from_a_file_and_from_the_microphone(page: Any) -> None:
    page.click("summary")
    page.fill("#name", "anna")
    page.fill("#transcript", TRANSCRIPT)
    page.set_input_files("#clip", CLIP)
    page.click("#keep")
    until(page, lambda: page.input_value("#voice") == "anna")
    assert "anna is ready" in page.text_content("#voice-status")
    page.click("#record")
    until(page, says(page, "End recording", "#record"))
    page.wait_for_timeout(700)
    page.click("#record")
    until(page, says(page, "recorded", "#voice-status"))
    page.fill("#name", "bert")
    page.click("#keep")  # the browser's test tone is no speech of that length
    page.wait_for_selector("#voice-status.bad")
    assert "audio_sample" in page.text_content("#voice-status")
