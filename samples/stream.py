"""Receive sound while it is made: chunks of float32 samples, ready for a player or a socket.

python samples/stream.py
"""

import time

from warble_mlx import load

warble = load()
begin = time.perf_counter()
with warble.stream("Sound arrives while the rest is still being made.", seed=1) as stream:
    for chunk in stream:
        at = time.perf_counter() - begin
        print(f"{at:6.3f} s: frames {chunk.begin} to {chunk.end}, {len(chunk.samples)} samples")
print(f"first sound after {1000 * stream.speech.timings.first_audio_s:.0f} ms")
