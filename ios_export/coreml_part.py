"""The part `coreml`: the codec's decoding half as Core ML packages for the Neural Engine.

The transformers are not among them: block-wise 4-bit weights have no path to the Neural Engine, and
on the GPU MLX runs the same weights (see docs/iphone.md).
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.engine import Request, Sampling
from warble_mlx.ios_export.checks import unverified
from warble_mlx.ios_export.coreml_codec import (
    FUNCTIONS,
    POST_MODULE,
    VOCODER,
    codec_checks,
    whole_chunks,
    write_packages,
)
from warble_mlx.ios_export.coreml_static import functions_of
from warble_mlx.ios_export.job import Built, Job
from warble_mlx.ios_export.manifest import MemoryEstimate, Requires
from warble_mlx.ios_export.mlx_part import SEED, runtime_samples

CODEC_FRAMES = 29  # of real speech; the evaluator needs seconds for each chunk of the full codec


def build(job: Job, folder: Path) -> Built:
    """Write both packages and evaluate them on tokens that the model has generated."""
    write_packages(job, folder)
    job.say("generating tokens to check with")
    codes = _codes(job)
    job.say(f"evaluating {codes.shape[1]} frames")
    checks = list(codec_checks(job, folder, codes, runtime_samples(job, codes)))
    checks += [
        unverified("placement on the Neural Engine", "Core ML decides on the device"),
        unverified("compilation on the device", "no Apple system was used"),
        unverified("speed and memory on a phone", "no phone was used"),
    ]
    about = {name: f"{frames} frames a call" for name, frames in FUNCTIONS.items()}
    functions = [f for name in (POST_MODULE, VOCODER) for f in functions_of(folder / name, about)]
    weights = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    states = 2 * sum(
        int(np.prod(t.shape))
        for f in functions if f.name == "stream"
        for s in f.states for t in s.tensors
    )  # fmt: skip
    c = job.config
    working = 4 * 2 * FUNCTIONS["stream"] * c.codec_frame_size * (c.codec_decoder_dim // 16)
    return Built(
        about="Codec for the Neural Engine: codes to latents (with state), latents to samples",
        requires=Requires(ios="18.0"),
        roles={
            POST_MODULE: "codec: codes to latents, keys and values as state",
            VOCODER: "codec: latents to samples, no state",
        },
        checks=checks,
        functions=functions,
        memory=MemoryEstimate(
            weights=weights,
            mapped=0,
            caches=states,
            working=working,
            total=weights + states + working,
            note="projection from the packages; what Core ML adds is not known here",
        ),
        notes=[
            "Both functions of post_module share one MLState: make it from either and pass it on.",
            "Give the vocoder the last latents as history and, as hist, how many of them exist.",
        ],
    )


def _codes(job: Job) -> npt.NDArray[np.int32]:
    """Codes of speech, [10, 1 + 7 n], from the runtime; of an untrained model noise."""
    frames = min(CODEC_FRAMES, job.options.check_frames)
    asked = Request(job.prompt(job.check_text), whole_chunks(frames), Sampling(), SEED)
    emitted = [e.codes for e in job.loaded.engine.generate([asked]) if e.codes is not None]
    codes = np.stack(emitted, axis=1).astype(np.int32)
    mx.clear_cache()
    return np.ascontiguousarray(codes[:, : whole_chunks(codes.shape[1])])
