"""The part `mlxfn`: write the functions, import them again, hold them against the runtime."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from warble_mlx import cuda_kernels
from warble_mlx.codec import CodecDecoder
from warble_mlx.codec.convolution import gpu_forms
from warble_mlx.engine import Request, Sampling
from warble_mlx.errors import CheckpointError, SickError
from warble_mlx.health import check_codes
from warble_mlx.ios_export.checks import at_least, at_most, decibels, equal, unverified
from warble_mlx.ios_export.drive import (
    Codes,
    Run,
    Utterance,
    decode,
    generate,
    open_function,
    prefill,
    slots_for,
)
from warble_mlx.ios_export.facts import is_published, packed_paths
from warble_mlx.ios_export.graph_file import Device, Scan, devices_in, retarget
from warble_mlx.ios_export.grid import function_grid, grid_check, stored_grid
from warble_mlx.ios_export.job import MLX_VERSION, SELFTEST_TEXT, Built, Job
from warble_mlx.ios_export.manifest import Check, MemoryEstimate, Requires
from warble_mlx.ios_export.mlx_functions import (
    AXIS_LIMIT,
    CHUNK_FRAMES,
    CODEC_FILE,
    FIRST_FRAMES,
    LM_FILE,
    PREFILL_LENGTHS,
    Codec,
    LanguageModel,
    cache_lengths,
    frame_inputs,
    prefill_inputs,
    write_codec,
    write_language_model,
)
from warble_mlx.prompt import Prompt
from warble_mlx.quant.proof import PUBLISHED_LIMIT
from warble_mlx.safetensors_file import write_safetensors
from warble_mlx.weights import DECODER_FILE, MODEL_FILE, load_strictly

GRAPHS_FILE = "graphs.json"
SELFTEST_FILE = "selftest.safetensors"
SELFTEST_FRAMES = 12
RANK_LIMIT = 6  # grouped heads of a decomposed attention; 5 is a limit of Core ML alone
STREAM_LIMIT = 1e-5  # largest difference of samples between chunk sizes, float32 rounding
AUDIO_LIMIT_DB = 90.0  # the same sums in another order; 16-bit PCM has 98
# Bundled model: 44.7 on a GPU in bfloat16; every slot one too far has 25, padding that is seen 4.
PROMPT_LIMIT_DB = 32.0
SEED = 7
# What MLX can read back from a file; anything else would fail on the phone only.
KNOWN_OPERATIONS = frozenset(
    [
        "Abs",
        "Add",
        "AddMM",
        "Arange",
        "ArgReduce",
        "ArgSort",
        "AsStrided",
        "AsType",
        "BitwiseBinary",
        "Broadcast",
        "BroadcastAxes",
        "Concatenate",
        "Contiguous",
        "Convolution",
        "Copy",
        "Cos",
        "Divide",
        "Equal",
        "Erf",
        "Exp",
        "ExpandDims",
        "Flatten",
        "Full",
        "Gather",
        "GatherAxis",
        "Greater",
        "GreaterEqual",
        "LayerNorm",
        "Less",
        "LessEqual",
        "Log",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Matmul",
        "Maximum",
        "Minimum",
        "Multiply",
        "Negative",
        "NotEqual",
        "Pad",
        "Power",
        "QuantizedMatmul",
        "RMSNorm",
        "Reduce",
        "Reshape",
        "Round",
        "ScaledDotProductAttention",
        "Scan",
        "Scatter",
        "ScatterAxis",
        "Select",
        "Sigmoid",
        "Sin",
        "Slice",
        "SliceUpdate",
        "Softmax",
        "Sort",
        "Split",
        "Sqrt",
        "Square",
        "Squeeze",
        "Subtract",
        "Tanh",
        "Transpose",
        "Unflatten",
        "View",
    ]
)


class Graph(msgspec.Struct, frozen=True):
    """How many operations of each kind a file holds, in all of its traces, and where they run."""

    operations: dict[str, int]
    device: Device
    traced_on: Device


def build(job: Job, folder: Path) -> Built:
    """Write lm.mlxfn, codec.mlxfn, graphs.json and selftest.safetensors, and check them.

    What is made for a CPU is traced on one: some of MLX's operations know GPUs only."""
    cpu_only = nullcontext() if job.options.device == "gpu" else mx.stream(mx.cpu)
    with cpu_only, cuda_kernels.unused():
        return _build(job, folder)


def _build(job: Job, folder: Path) -> Built:
    loaded, options = job.loaded, job.options
    traced_on: Device = "gpu" if mx.default_device().type == mx.gpu else "cpu"
    for_gpu = options.device == "gpu"
    job.say("tracing the transformers")
    functions = write_language_model(loaded, folder)
    job.say("tracing the codec")
    functions += write_codec(loaded, folder, for_gpu=for_gpu)
    graphs = _graphs(job, for_gpu, traced_on)
    checks = static_checks(job, graphs)
    run = {name: open_function(folder / name) for name in (LM_FILE, CODEC_FILE)}
    job.say(f"comparing {options.check_frames} frames with the runtime")
    checks += token_checks(job, run[LM_FILE])
    checks += weight_checks(job, run[LM_FILE])
    frames = min(SELFTEST_FRAMES, options.check_frames)
    utterance = _say(job, run[LM_FILE], job.prompt(SELFTEST_TEXT), frames)
    job.say("comparing the codec with the runtime")
    checks += audio_checks(job, run[CODEC_FILE], utterance)
    _write_selftest(job, folder, utterance, run[CODEC_FILE])
    del run
    for name, (scan, _) in graphs.items():
        if options.device != traced_on:
            retarget(folder / name, folder / f"{name}.new", scan.operations, options.device)
            (folder / f"{name}.new").replace(folder / name)
        found = devices_in(folder / name, scan.operations)
        there = found.get(options.device, 0) / sum(scan.operations.values())
        checks.append(equal(f"operations of {name} on the {options.device}", there, 1.0))
    record = {
        name: Graph(dict(sorted(scan.operations.items())), options.device, traced_on)
        for name, (scan, _) in graphs.items()
    }
    (folder / GRAPHS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    checks += _size_checks(job, folder)
    checks += [
        unverified("tokens on the GPU", "run verify on the device: selftest.safetensors"),
        unverified("speed and memory on a phone", "no phone was used"),
    ]
    return Built(
        about="Prefill, frame step and codec as MLX functions: importFunction(from:) in MLX-Swift,"
        " no model code",
        requires=Requires(ios="17.0", mlx_swift=MLX_VERSION, increased_memory_limit=True),
        roles={
            LM_FILE: "transformers: prefill and frame",
            CODEC_FILE: "codec: codes to samples",
            GRAPHS_FILE: "operations of both files",
            SELFTEST_FILE: "inputs and results of a self-test",
        },
        optional=frozenset({GRAPHS_FILE, SELFTEST_FILE}),
        checks=checks,
        functions=functions,
        memory=memory(job, folder),
        notes=_notes(traced_on, options.device),
    )


def _notes(traced_on: Device, device: Device) -> list[str]:
    notes = [
        f"Written by MLX {MLX_VERSION}; the format belongs to that version, so pin MLX-Swift to"
        " one that carries it.",
        "Positions of one codec stream end with the context: start a new state for every piece.",
    ]
    if traced_on != device:
        notes.append(
            f"Traced on a {traced_on} and moved to the {device}: norms and attention are made of"
            " plain operations instead of MLX's fused ones, so more kernels are launched. Export on"
            " a Mac for the fused ones, or wrap the imported function in compile()."
        )
    return notes


def _graphs(job: Job, for_gpu: bool, traced_on: Device) -> dict[str, tuple[Scan, Device]]:
    loaded, language, codec = job.loaded, Scan(), Scan()
    function = LanguageModel(loaded)
    for slots in cache_lengths(job.config):
        for length in PREFILL_LENGTHS:
            if length <= slots:
                language.add(function, prefill_inputs(loaded, length, slots))
        language.add(function, frame_inputs(loaded, slots))
    decoder = Codec(loaded)
    state = decoder.initial_state()
    with gpu_forms() if for_gpu else nullcontext():
        for frames in (FIRST_FRAMES, CHUNK_FRAMES):
            codes = mx.zeros((1, job.config.num_codebooks, frames), mx.int32)
            codec.add(decoder, [codes, *state])
    return {LM_FILE: (language, traced_on), CODEC_FILE: (codec, traced_on)}


def static_checks(job: Job, graphs: dict[str, tuple[Scan, Device]]) -> list[Check]:
    """Operations that MLX can read, axes and ranks that Apple's GPUs compute right."""
    checks = []
    for name, (scan, _) in graphs.items():
        unknown = scan.operations.keys() - KNOWN_OPERATIONS
        checks += [
            equal(
                f"unknown operations in {name}", len(unknown), 0, note=", ".join(sorted(unknown))
            ),
            at_most(f"longest axis in {name}", scan.longest_axis, AXIS_LIMIT),
            at_most(f"highest rank in {name}", scan.highest_rank, RANK_LIMIT),
        ]
        checks.append(equal(f"float64 values in {name}", scan.dtypes["float64"], 0))
    return checks


def _say(job: Job, run: Run, prompt: Prompt, frames: int, *, stop: bool = True) -> Utterance:
    lengths = cache_lengths(job.config)
    columns = prompt.columns
    return generate(
        run,
        job.config,
        job.dtype,
        columns,
        slots_for(job.config, lengths, columns.shape[1], frames),
        frames=frames,
        sampling=Sampling(),
        seed=SEED,
        stop_at_eos=stop,
    )


def token_checks(job: Job, run: Run) -> list[Check]:
    """Frames from the imported functions against the runtime's own loop: same dtype, same packed
    weights, same noise. Where shapes move tokens, frames are compared with those of the functions
    before they were written, and with the runtime the prompt's last hidden state alone. The speech
    of a trained model must also be healthy."""
    prompt, frames = job.prompt(job.check_text), job.options.check_frames
    found = _say(job, run, prompt, frames).codes
    if same_for_any_shape(job.dtype):
        asked = Request(prompt, frames, Sampling(), SEED)
        emitted = job.loaded.engine.generate([asked])
        wanted = np.stack([e.codes for e in emitted if e.codes is not None], axis=1)
        checks = _frames_equal("the runtime's", found, wanted)
    else:
        function = LanguageModel(job.loaded)
        wanted = _say(job, function, prompt, frames).codes
        checks = [
            *_frames_equal("the functions' before they were written", found, wanted),
            at_least(
                "prompt against the runtime", prompt_agreement(job, run), PROMPT_LIMIT_DB, "dB"
            ),
        ]
    if job.options.trained:
        checks.append(_health_check(job, found))
    return checks


def same_for_any_shape(dtype: mx.Dtype) -> bool:
    """Whether tokens here do not depend on how a prompt is cut: the runtime cuts it elsewhere than
    an app does. A GPU picks its kernels by shape, and in 16 bits each rounds otherwise."""
    return bool(mx.default_device().type == mx.cpu) or dtype == mx.float32


def prompt_agreement(job: Job, run: Run) -> float:
    """What the functions make of a prompt, over its difference from the runtime's, in dB."""
    prompt = job.prompt(job.check_text)
    slots = slots_for(job.config, cache_lengths(job.config), prompt.columns.shape[1], 1)
    hidden = prefill(run, job.config, job.dtype, prompt.columns, slots)[0]
    wanted = job.loaded.engine.prefill(prompt).hidden
    return decibels(*(np.array(h.astype(mx.float32)) for h in (hidden, wanted)))


def _frames_equal(whose: str, found: Codes, wanted: Codes) -> list[Check]:
    same = min(found.shape[1], wanted.shape[1])
    agreeing = (found[:, :same] == wanted[:, :same]).all(axis=0)
    leading = int(agreeing.cumprod().sum())
    return [
        equal(f"frames equal to {whose}", leading, wanted.shape[1], "frames"),
        equal("frames generated", found.shape[1], wanted.shape[1], "frames"),
    ]


def weight_checks(job: Job, run: Run) -> list[Check]:
    """The packed weights in lm.mlxfn are the bundle's own, scales and biases in the export's
    dtype; none for a bundle without packed weights."""
    if not packed_paths(job.bundle):
        return []
    wanted = stored_grid(job.bundle / MODEL_FILE, dtype=job.dtype, joined=True)
    found = function_grid(run, frame_inputs(job.loaded, min(cache_lengths(job.config))))
    return [grid_check(LM_FILE, wanted, found.values())]


def _health_check(job: Job, codes: npt.NDArray[np.int32]) -> Check:
    """Whether codes are speech. Raises SickError, unless this machine cannot tell: a CPU's kernels
    add up packed products in 16 bits like the activations', which a large model may not survive.
    """
    c, name = job.config, "healthy codes from the exported functions"
    text = job.check_text if codes.shape[1] < job.options.check_frames else None
    try:
        check_codes(codes, [c.codebook_size] * c.num_codebooks, text, c.frame_rate_hz)
    except SickError as error:
        exact = mx.default_device().type == mx.gpu or job.dtype == mx.float32
        if exact or not packed_paths(job.bundle):
            raise
        return unverified(name, f"on this CPU: {error.seen}; its 16-bit sums are inexact")
    return equal(name, 1, 1)


def audio_checks(job: Job, run: Run, utterance: Utterance) -> list[Check]:
    """Samples from the imported codec, streamed, against the runtime's whole decoding."""
    codes = utterance.codes
    if codes.shape[1] < 2:
        raise CheckpointError(
            "the self-test sentence gave no speech to decode; --no-check is for untrained models"
        )
    streamed = decode(run, codes, Codec(job.loaded).initial_state())
    whole = runtime_samples(job, codes)
    singly = _one_by_one(job, run, codes[:, :SELFTEST_FRAMES])
    difference = float(np.abs(singly - streamed[: len(singly)]).max())
    return [
        at_least("audio against the runtime", decibels(streamed, whole), AUDIO_LIMIT_DB, "dB"),
        at_most("audio in chunks of 1 against 1 and 7", difference, STREAM_LIMIT),
    ]


def runtime_samples(job: Job, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """What the runtime's decoder makes of codes [10, T], weights widened to float32."""
    decoder = CodecDecoder(job.config)
    load_strictly(decoder, job.bundle / DECODER_FILE, mx.float32, {})
    samples: npt.NDArray[np.float32] = np.array(decoder.decode(mx.array(codes[None])))[0]
    return samples


def _one_by_one(job: Job, run: Run, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    state = Codec(job.loaded).initial_state()
    pieces = []
    for at in range(codes.shape[1]):
        samples, *state = run(mx.array(codes[None, :, at : at + 1]), *state)
        mx.eval(samples, state)
        pieces.append(np.array(samples)[0])
    return np.concatenate(pieces)


def _write_selftest(job: Job, folder: Path, utterance: Utterance, codec: Run) -> None:
    """A prompt, its frames and their sound, for a device to compare with."""
    columns = job.prompt(SELFTEST_TEXT).columns.astype(np.int32)
    emitted = utterance.emitted.astype(np.int32)
    samples = decode(codec, utterance.codes, Codec(job.loaded).initial_state())
    arrays = {"columns": columns, "emitted": emitted, "samples": samples}
    write_safetensors(
        folder / SELFTEST_FILE,
        {
            "columns": ("I32", columns.shape),
            "emitted": ("I32", emitted.shape),
            "samples": ("F32", samples.shape),
        },
        lambda name: arrays[name],
        {"text": SELFTEST_TEXT, "seed": str(SEED), "dtype": job.options.dtype},
    )


def _size_checks(job: Job, folder: Path) -> list[Check]:
    """One copy of the weights: the files are hardly larger than what they were made from. A 4-bit
    export of the published model stays below the published size."""
    stored = sum((job.bundle / name).stat().st_size for name in (MODEL_FILE, DECODER_FILE))
    wide = 2 if job.options.dtype == "float32" else 1  # scales, norms and heads in 32 bits
    written = sum((folder / name).stat().st_size for name in (LM_FILE, CODEC_FILE))
    # RoPE tables, the sliced head, and the graphs themselves.
    allowance = 12_000_000 + job.config.head_rows * job.config.dim * 2
    checks = [at_most("size of both files", written, wide * stored + allowance, "bytes")]
    if is_published(job.config) and packed_paths(job.bundle) and wide == 1:
        written += (job.bundle / "tokenizer.json").stat().st_size
        checks.append(at_most("size of what an app needs", written, PUBLISHED_LIMIT, "bytes"))
    return checks


def memory(job: Job, folder: Path) -> MemoryEstimate:
    """Weights as loaded, caches of the longest frame function, and room for one codec chunk."""
    weights = sum((folder / name).stat().st_size for name in (LM_FILE, CODEC_FILE))
    slow, slots = job.config.slow, max(cache_lengths(job.config))
    caches = 2 * slow.n_layer * slow.n_kv_head * slots * slow.head_dim * job.dtype.size
    widest = job.config.codec_decoder_dim
    # One chunk: the widest activation in float32 a few times over, and the largest weight widened.
    activation = CHUNK_FRAMES * job.config.codec_frame_size * (widest // 16) * 4
    largest = max(w.size * 4 for w in _arrays(job.loaded.codec.parameters()))
    working = 4 * activation + largest + 32_000_000
    return MemoryEstimate(
        weights=weights,
        mapped=0,
        caches=caches,
        working=working,
        total=weights + caches + working,
        note="projection from the exported files, with an MLX cache limit of 32 MB",
    )


def _arrays(tree: object) -> list[mx.array]:
    found = tree_flatten(tree)
    assert isinstance(found, list)  # it is a dictionary only when asked for one
    return [array for _, array in found]
