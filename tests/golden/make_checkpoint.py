#!/usr/bin/env python3
"""Write a synthetic arktts checkpoint that anybody can regenerate bit for bit.

    make_checkpoint.py OUT_DIR --preset tiny --codec none
    make_checkpoint.py OUT_DIR --preset full --codec full

Every tensor is a function of its own name and shape only: the raw 64-bit
outputs of PCG64(crc32(name)) are split into four 16-bit lanes, the lanes are
summed (a close stand-in for a normal deviate, and exact integer arithmetic),
then scaled and shifted in float32. The language model is stored as bfloat16
(round to nearest even), the codec as float32 with weight norm left unfolded.

Needs numpy; torch only to write codec.pth (skip with --no-pth).
"""

import argparse
import json
import math
import zlib
from pathlib import Path

import numpy as np

PRESETS = {
    "tiny": {
        "dim": 128,
        "n_layer": 3,
        "n_fast_layer": 2,
        "n_head": 4,
        "n_local_heads": 2,
        "head_dim": 32,
        "intermediate_size": 320,
        "codebook_size": 256,
        "max_seq_len": 512,
        "first_special": None,
    },
    "full": {
        "dim": 896,
        "n_layer": 24,
        "n_fast_layer": 4,
        "n_head": 14,
        "n_local_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4864,
        "codebook_size": 4096,
        "max_seq_len": 2048,
        "first_special": 151643,
    },
}
NUM_CODEBOOKS = 10
SPARE_ROWS = 2  # unused rows after the last semantic id, as in the published vocabulary


# ---------------------------------------------------------------- tensor values


def deviates(name, count):
    """Nearly normal float32 numbers, mean 0, variance 1, |x| < 3.47."""
    stream = np.random.PCG64(zlib.crc32(name.encode()))
    out = np.empty(count, np.float32)
    step = 1 << 22
    for at in range(0, count, step):
        raw = stream.random_raw(min(step, count - at))
        lanes = raw.view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int32) - 131070
        out[at : at + len(raw)] = lanes.astype(np.float32) * np.float32(math.sqrt(3.0) / 65536)
    return out


def make(name, shape, scale, offset=0.0):
    values = deviates(name, math.prod(shape))
    values *= np.float32(scale)
    if offset:
        values += np.float32(offset)
    return values.reshape(shape)


def to_bf16(values):
    bits = np.ascontiguousarray(values).view(np.uint32)
    return (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)


# ---------------------------------------------------------------- language model


def transformer(
    prefix, dim, heads, kv_heads, head_dim, ffn, *, bias=False, qk_norm=False, o_bias=False
):
    total = (heads + 2 * kv_heads) * head_dim
    yield f"{prefix}.attention.wqkv.weight", (total, dim), 1.5 / math.sqrt(dim), 0.0
    if bias:
        yield f"{prefix}.attention.wqkv.bias", (total,), 0.3, 0.0
    yield (
        f"{prefix}.attention.wo.weight",
        (dim, heads * head_dim),
        1 / math.sqrt(heads * head_dim),
        0.0,
    )
    yield f"{prefix}.feed_forward.w1.weight", (ffn, dim), 1.5 / math.sqrt(dim), 0.0
    yield f"{prefix}.feed_forward.w2.weight", (dim, ffn), 1 / math.sqrt(ffn), 0.0
    yield f"{prefix}.feed_forward.w3.weight", (ffn, dim), 1 / math.sqrt(dim), 0.0
    yield f"{prefix}.ffn_norm.weight", (dim,), 0.1, 1.0
    yield f"{prefix}.attention_norm.weight", (dim,), 0.1, 1.0
    if o_bias:
        yield f"{prefix}.attention.wo.bias", (dim,), 0.3, 0.0
    if qk_norm:
        yield f"{prefix}.attention.q_norm.weight", (head_dim,), 0.1, 1.0
        yield f"{prefix}.attention.k_norm.weight", (head_dim,), 0.1, 1.0


def language_model(config):
    dim, fast = config["dim"], config["fast_dim"]
    yield "embeddings.weight", (config["vocab_size"], dim), 2.0 / math.sqrt(dim), 0.0
    yield (
        "codebook_embeddings.weight",
        (config["codebook_size"] * NUM_CODEBOOKS, dim),
        2.0 / math.sqrt(dim),
        0.0,
    )
    yield from stack(config, "", dim)
    yield "norm.weight", (dim,), 0.1, 1.0
    yield "fast_embeddings.weight", (config["codebook_size"], fast), 0.7, 0.0
    yield from stack(config, "fast_", fast)
    yield "fast_norm.weight", (fast,), 0.1, 1.0
    yield "fast_output.weight", (config["codebook_size"], fast), 2.5 / math.sqrt(fast), 0.0
    if fast != dim:
        yield "fast_project_in.weight", (fast, dim), 1 / math.sqrt(dim), 0.0
        yield "fast_project_in.bias", (fast,), 0.05, 0.0


def stack(config, prefix, dim):
    for i in range(config["n_fast_layer" if prefix else "n_layer"]):
        yield from transformer(
            f"{prefix}layers.{i}",
            dim,
            config[f"{prefix}n_head"],
            config[f"{prefix}n_local_heads"],
            config[f"{prefix}head_dim"],
            config[f"{prefix}intermediate_size"],
            bias=config[f"{prefix}attention_qkv_bias"],
            qk_norm=config[f"{prefix}attention_qk_norm"],
            o_bias=config[f"{prefix}attention_o_bias"],
        )


# ---------------------------------------------------------------- codec


def weight_normed(prefix, shape, gain, bias):
    """Weight norm over dimension 0, newer key form."""
    ones = (1,) * (len(shape) - 1)
    yield f"{prefix}.bias", (bias,), 0.05, 0.0
    yield f"{prefix}.parametrizations.weight.original0", (shape[0], *ones), 0.1 * gain, gain
    yield (
        f"{prefix}.parametrizations.weight.original1",
        shape,
        1 / math.sqrt(math.prod(shape[1:])),
        0.0,
    )


def conv(prefix, cin, cout, kernel, gain=1.0):
    yield from weight_normed(f"{prefix}.conv", (cout, cin, kernel), gain, cout)


def conv_transpose(prefix, cin, cout, kernel, gain):
    yield from weight_normed(f"{prefix}.conv", (cin, cout, kernel), gain, cout)


def snake(prefix, channels):
    yield f"{prefix}.alpha", (1, channels, 1), 0.2, 1.0


def residual_unit(prefix, dim):
    yield from snake(f"{prefix}.block.0", dim)
    yield from conv(f"{prefix}.block.1", dim, dim, 7)
    yield from snake(f"{prefix}.block.2", dim)
    yield from conv(f"{prefix}.block.3", dim, dim, 1, 0.3)


def window_transformer(prefix, layers, dim, heads, kv_heads, ffn):
    for i in range(layers):
        p = f"{prefix}.layers.{i}"
        yield from transformer(p, dim, heads, kv_heads, 64, ffn)
        yield f"{p}.attention_layer_scale.gamma", (dim,), 0.05, 0.15
        yield f"{p}.ffn_layer_scale.gamma", (dim,), 0.05, 0.15
    yield f"{prefix}.norm.weight", (dim,), 0.1, 1.0


def convnext(prefix, dim):
    yield f"{prefix}.gamma", (dim,), 0.05, 0.15
    yield f"{prefix}.dwconv.conv.weight", (dim, 1, 7), 1 / math.sqrt(7), 0.0
    yield f"{prefix}.dwconv.conv.bias", (dim,), 0.05, 0.0
    yield f"{prefix}.norm.weight", (dim,), 0.1, 1.0
    yield f"{prefix}.norm.bias", (dim,), 0.1, 0.0
    yield f"{prefix}.pwconv1.weight", (4 * dim, dim), 1 / math.sqrt(dim), 0.0
    yield f"{prefix}.pwconv1.bias", (4 * dim,), 0.05, 0.0
    yield f"{prefix}.pwconv2.weight", (dim, 4 * dim), 1 / math.sqrt(4 * dim), 0.0
    yield f"{prefix}.pwconv2.bias", (dim,), 0.05, 0.0


def vector_quantizer(prefix, entries, width, latent):
    projections = (("in_proj", (width, latent, 1), 1.0), ("out_proj", (latent, width, 1), 0.4))
    for name, shape, gain in projections:
        yield f"{prefix}.{name}.bias", (shape[0],), 0.05, 0.0
        yield f"{prefix}.{name}.weight_g", (shape[0], 1, 1), 0.1 * gain, gain
        yield f"{prefix}.{name}.weight_v", shape, 1 / math.sqrt(shape[1]), 0.0
    yield f"{prefix}.codebook.weight", (entries, width), 1.0, 0.0


# Codec dimensions that a config may leave out, with the published values.
CODEC_DIMENSIONS = {
    "encoder_dim": 64,
    "encoder_transformer_layers": [0, 0, 0, 4],
    "latent_dim": 1024,
    "decoder_dim": 1536,
    "codebook_dim": 8,
    "semantic_codebook_size": 4096,
    "residual_codebook_size": 1024,
    "pre_n_layer": 8,
    "pre_n_head": 16,
    "pre_n_local_heads": 16,
    "pre_intermediate_size": 3072,
    "post_n_layer": 8,
    "post_n_head": 16,
    "post_n_local_heads": 8,
    "post_intermediate_size": 1216,
}


def codec(config):
    c = {name: config.get(f"codec_{name}", value) for name, value in CODEC_DIMENSIONS.items()}
    latent, width = c["latent_dim"], c["codebook_dim"]
    dim = c["encoder_dim"]
    yield from conv("encoder.block.0", 1, dim, 7, 2.0)
    for i, stride in enumerate((2, 4, 8, 8), 1):
        for unit in range(3):
            yield from residual_unit(f"encoder.block.{i}.block.{unit}", dim)
        yield from snake(f"encoder.block.{i}.block.3", dim)
        yield from conv(f"encoder.block.{i}.block.4", dim, 2 * dim, 2 * stride, 0.7)
        dim *= 2
        layers = c["encoder_transformer_layers"][i - 1]
        if layers:
            where = f"encoder.block.{i}.block.5"
            yield from window_transformer(where, layers, dim, dim // 64, dim // 64, 3 * dim)
    yield from snake("encoder.block.5", dim)
    yield from conv("encoder.block.6", dim, latent, 3)

    semantic = "quantizer.semantic_quantizer.quantizers.0"
    yield from vector_quantizer(semantic, c["semantic_codebook_size"], width, latent)
    for i in range(NUM_CODEBOOKS - 1):
        residual = f"quantizer.quantizer.quantizers.{i}"
        yield from vector_quantizer(residual, c["residual_codebook_size"], width, latent)
    for side, fan_in in (("downsample", 2 * latent), ("upsample", latent)):
        for i in range(2):
            p = f"quantizer.{side}.{i}"
            yield f"{p}.0.conv.weight", (latent, latent, 2), 1 / math.sqrt(fan_in), 0.0
            yield f"{p}.0.conv.bias", (latent,), 0.05, 0.0
            yield from convnext(f"{p}.1", latent)
    for side in ("pre", "post"):
        yield from window_transformer(
            f"quantizer.{side}_module",
            c[f"{side}_n_layer"],
            latent,
            c[f"{side}_n_head"],
            c[f"{side}_n_local_heads"],
            c[f"{side}_intermediate_size"],
        )

    dim = c["decoder_dim"]
    yield from conv("decoder.model.0", latent, dim, 7, 0.7)
    for i, stride in enumerate((8, 8, 4, 2), 1):
        yield from snake(f"decoder.model.{i}.block.0", dim)
        yield from conv_transpose(
            f"decoder.model.{i}.block.1", dim, dim // 2, 2 * stride, 0.6 * math.sqrt(stride / 2)
        )
        dim //= 2
        for unit in range(2, 5):
            yield from residual_unit(f"decoder.model.{i}.block.{unit}", dim)
    yield from snake("decoder.model.5", dim)
    yield from conv("decoder.model.6", dim, 1, 7, 0.3)


# ---------------------------------------------------------------- tokenizer

# Pairs merged by the small byte-level BPE, in priority order.
MERGES = [
    (" ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    (" t", "he"),
    ("e", "r"),
    (" ", "a"),
    (" ", "s"),
    ("o", "u"),
    ("i", "s"),
    (" ", "w"),
    ("o", "r"),
    ("a", "t"),
    ("e", "n"),
    ("i", "t"),
    ("l", "l"),
    ("e", "s"),
    ("a", "n"),
    ("\n", "\n"),
    (".", "\n\n"),
    (":", "\n"),
    ("<", "|"),
    ("|", ">"),
    ("s", "p"),
    ("e", "e"),
    ("sp", "ee"),
    ("i", "on"),
    ("x", "t"),
    ("he", "ll"),
    ("你", ""),
    ("é", ""),
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PUBLISHED_MIDDLE = [
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
AUDIO_SPECIALS = [
    "<|pad|>",
    "<|phoneme_start|>",
    "<|phoneme_end|>",
    "<|text|>",
    "<|voice|>",
    "<|interleave|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
]
NOT_SPECIAL = set(PUBLISHED_MIDDLE[11:])  # published as added tokens with "special": false


def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [b for b in range(256) if b not in printable]
    return {
        b: chr(b) if b in printable else chr(256 + i - len(printable)) for i, b in enumerate(order)
    }


def tokenizer_files(first_special, codebook_size):
    letters = byte_alphabet()
    vocab = {letter: i for i, letter in enumerate(letters.values())}
    merges = []

    def spell(text):
        return "".join(letters[b] for b in text.encode())

    def merge(left, right):
        if left in vocab and right in vocab and left + right not in vocab:
            merges.append([left, right])
            vocab[left + right] = len(vocab)

    for left, right in MERGES:
        left, right = spell(left), spell(right)
        if right:
            merge(left, right)
        else:  # one multi-byte character, joined byte by byte
            for end in range(1, len(left)):
                merge(left[:end], left[end])
    first = first_special or len(vocab)
    names = SPECIALS + (PUBLISHED_MIDDLE if first_special else []) + AUDIO_SPECIALS
    names += [f"<|semantic:{i}|>" for i in range(codebook_size)]
    ids = {name: first + i for i, name in enumerate(names)}
    if first > len(vocab):
        vocab.update(ids)  # keeps the published ids although the small BPE leaves a gap below them
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            dict(id=i, content=n, **flags, special=n not in NOT_SPECIAL) for n, i in ids.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
    }
    return tokenizer, settings, ids


# ---------------------------------------------------------------- files


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path, tensors, dtype, made_for="pt"):
    header, at = {"__metadata__": {"format": made_for}}, 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.data)


def write_codec_pth(path, tensors, wrap):
    import torch

    state = {n: torch.from_numpy(v) for n, v in tensors.items()}
    if (
        wrap == "generator"
    ):  # as a training checkpoint might look: prefixed, with derived buffers and other networks
        state = {f"generator.{n}": v for n, v in state.items()}
        state["generator.quantizer.post_module.freqs_cis"] = torch.zeros(4, 32, 2)
        state["generator.quantizer.post_module.causal_mask"] = torch.zeros(4, 4, dtype=torch.bool)
        state["discriminator.weight"] = torch.zeros(3)
    if wrap != "none":
        state = {"state_dict": state}
    torch.save(state, path)


def build_config(dimensions, ids, post_kv_heads, post_ffn):
    p = {k: v for k, v in dimensions.items() if k != "first_special"}
    last = ids[f"<|semantic:{p['codebook_size'] - 1}|>"]
    return dict(
        architectures=["ArkttsModel"],
        model_type="arktts",
        dtype="bfloat16",
        transformers_version="4.57.5",
        auto_map={
            "AutoConfig": "configuration_arktts.ArkttsConfig",
            "AutoModel": "modeling_arktts.ArkttsModel",
            "AutoModelForCausalLM": "modeling_arktts.ArkttsModel",
        },
        vocab_size=last + 1 + SPARE_ROWS,
        **p,
        attention_qkv_bias=True,
        attention_qk_norm=False,
        attention_o_bias=False,
        dropout=0.0,
        fast_dim=p["dim"],
        fast_n_head=p["n_head"],
        fast_n_local_heads=p["n_local_heads"],
        fast_head_dim=p["head_dim"],
        fast_intermediate_size=p["intermediate_size"],
        fast_attention_qkv_bias=False,
        fast_attention_qk_norm=False,
        fast_attention_o_bias=False,
        norm_eps=1e-6,
        norm_fastlayer_input=True,
        rope_base=1000000,
        num_codebooks=NUM_CODEBOOKS,
        semantic_begin_id=ids["<|semantic:0|>"],
        semantic_end_id=last,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=True,
        initializer_range=0.02,
        use_gradient_checkpointing=False,
        ras_window_size=10,
        ras_temperature=1.0,
        ras_top_p=0.9,
        codec_filename="codec.pth",
        codec_sample_rate=44100,
        codec_frame_size=2048,
        codec_post_n_layer=8,
        codec_post_n_head=16,
        codec_post_n_local_heads=post_kv_heads,
        codec_post_intermediate_size=post_ffn,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--codec", choices=["none", "full"], default="none")
    parser.add_argument(
        "--codec-wrap",
        choices=["none", "state_dict", "generator"],
        default="none",
        help="how codec.pth nests its tensors",
    )
    parser.add_argument(
        "--post-kv-heads", type=int, default=8, help="post_module KV heads (published: 8)"
    )
    parser.add_argument(
        "--post-ffn", type=int, default=1216, help="post_module FFN width (published: 1216)"
    )
    parser.add_argument("--no-pth", action="store_true", help="write codec.safetensors only")
    parser.add_argument("--no-lm", action="store_true", help="skip model.safetensors")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[args.preset]
    tokenizer, settings, ids = tokenizer_files(preset["first_special"], preset["codebook_size"])
    config = build_config(preset, ids, args.post_kv_heads, args.post_ffn)
    processor = {
        "audio_sampling_rate": 44100,
        "num_codebooks": NUM_CODEBOOKS,
        "processor_class": "ArkttsProcessor",
        "auto_map": {"AutoProcessor": "processing_arktts.ArkttsProcessor"},
        "semantic_begin_id": config["semantic_begin_id"],
    }
    write_json(args.out / "config.json", config)
    write_json(args.out / "tokenizer.json", tokenizer)
    write_json(args.out / "tokenizer_config.json", settings)
    write_json(args.out / "processor_config.json", processor)
    write_json(
        args.out / "preprocessor_config.json",
        {**processor, "feature_extractor_type": "ArkttsProcessor"},
    )
    write_json(
        args.out / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": config["eos_token_id"],
            "pad_token_id": config["pad_token_id"],
            "max_new_tokens": 512,
            "temperature": 0.7,
            "top_k": 50,
            "top_p": 0.9,
            "transformers_version": "4.57.5",
        },
    )

    report = {}
    if not args.no_lm:
        tensors = {n: to_bf16(make(n, shape, *rule)) for n, shape, *rule in language_model(config)}
        report["language model parameters"] = sum(v.size for v in tensors.values())
        write_safetensors(args.out / "model.safetensors", tensors, "BF16")
        del tensors
    if args.codec == "full":
        tensors = {n: make(n, shape, *rule) for n, shape, *rule in codec(config)}
        report["codec parameters as stored"] = sum(v.size for v in tensors.values())
        write_safetensors(args.out / "codec.safetensors", tensors, "F32")
        if not args.no_pth:
            write_codec_pth(args.out / "codec.pth", tensors, args.codec_wrap)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
