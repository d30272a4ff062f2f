"""Stage 5: the trained parts as a checkpoint in the published layout, for `warble convert`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from samples.bundled_voice import prompts
from samples.bundled_voice.casting import CHARACTERS, DEFAULT_VOICE
from samples.bundled_voice.corpus import LONGEST_TEXT
from samples.bundled_voice.settings import SAMPLE_RATE, SPECIAL_TOKENS, Settings
from samples.bundled_voice.stored import load, save

_NOTICES = ("NOTICE", "LICENSE.wordnet")


def export(settings: Settings, codec: Path, dual_ar: Path, out: Path) -> None:
    """Write weights (DualAR bfloat16, codec float16 with no weight norm), tokenizer and configs."""
    out.mkdir(parents=True, exist_ok=True)
    config = settings.config
    save(load(dual_ar), out / "model.safetensors", torch.bfloat16)
    save(load(codec), out / "codec.safetensors", torch.float16)
    write_tokenizer(config, out / "tokenizer.json")
    ends = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    sampling = {name: config[name] for name in ("ras_window_size", "ras_temperature", "ras_top_p")}
    documents: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_seq_len"],
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
        "generation_config.json": {
            **ends, **sampling, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 50,
            "max_new_tokens": 420, "plain_punctuation": True,
        },
        "processor_config.json": {
            "processor_class": "ArkttsProcessor",
            "sample_rate": SAMPLE_RATE,
            "frame_size": config["codec_frame_size"],
            "num_codebooks": config["num_codebooks"],
            "system_prompt": prompts.SYSTEM,
            "reference_system_prompt": prompts.REFERENCE,
            "max_text_chars": LONGEST_TEXT,
        },
        "voices.json": voices(),
    }  # fmt: skip
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    for name in _NOTICES:
        shutil.copyfile(Path(__file__).with_name(name), out / name)


def voices() -> dict[str, Any]:
    """The five characters as the runtime reads them."""
    return {
        "default": DEFAULT_VOICE,
        "voices": [
            {
                "id": number,
                "name": own.name,
                "token": f"<|speaker:{number}|>",
                "language": "en",
                "description": f"{own.description}; synthetic",
                "source_engine": "Kokoro-82M, "
                + " and ".join(own.blend)
                + f", speed {own.speed:g}, pitch and formants x {own.warp:g}",
            }
            for number, own in CHARACTERS.items()
        ],
    }


def write_tokenizer(config: dict[str, Any], path: Path) -> None:
    """Byte level without merges; special tokens and semantic tokens behind the bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    stand_ins, unprintable = {}, 0
    for number, value in enumerate(prompts.byte_order()):
        if number < 188:
            stand_ins[value] = chr(value)
        else:
            stand_ins[value] = chr(256 + unprintable)
            unprintable += 1
    vocabulary = {stand_ins[value]: i for i, value in enumerate(prompts.byte_order())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    semantic = [f"<|semantic:{i}|>" for i in range(config["codebook_size"])]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS + semantic]
    )
    tokenizer.save(str(path))


def in_parts(path: Path, out: Path, most: int = 15_000_000) -> list[Path]:
    """Cut a file into parts that `cat` joins again; returns them."""
    out.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes()
    parts = []
    for i, begin in enumerate(range(0, len(content), most)):
        part = out / f"{path.name}.{i}"
        part.write_bytes(content[begin : begin + most])
        parts.append(part)
    return parts


def deliver(codec: Path | None, dual_ar: Path | None, out: Path) -> None:
    """Half-precision weights in parts, for a machine that hands back small files only."""
    for name, path, kind in (("codec", codec, torch.float16), ("dual_ar", dual_ar, torch.bfloat16)):
        if path is not None and path.exists():
            whole = path.with_name(f"{name}.deliver.safetensors")
            save(load(path), whole, kind)
            in_parts(whole, out)
            whole.unlink()
