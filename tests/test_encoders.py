"""What the server's encoders write, read from the bytes."""

from __future__ import annotations

import numpy as np

from warble_mlx.server.encoders import encoder_for

# kbit/s of MPEG-1 layer III, by the upper half of a frame header's third byte.
BITRATES = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)


def test_mp3_has_128_kilobits_a_second() -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(44_100).astype(np.float32)
    encoder = encoder_for("mp3", 44_100)
    written = encoder.encode(noise) + encoder.finish()
    begin = written.index(b"\xff\xfb")
    assert BITRATES[written[begin + 2] >> 4] == 128
    # A second, and the encoder's delay of some frames.
    assert 128_000 / 8 <= len(written) - begin <= 128_000 / 8 * 1.15
