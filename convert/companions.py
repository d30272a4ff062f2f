"""The small files of a bundle: config.json, tokenizer.json, voices.json, licences."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from warble_mlx.config import ModelConfig
from warble_mlx.convert.source import Source, member
from warble_mlx.errors import CheckpointError
from warble_mlx.voices import Voice, VoiceList, read_voices

LONGEST_TEXT = "max_text_chars"
# Set in bundles of models that were trained on text without typographic marks.
PLAIN_PUNCTUATION = "plain_punctuation"
GENERATION_DEFAULTS = {
    "temperature": 0.7,
    "top_k": 50,
    "top_p": 0.9,
    "max_new_tokens": 512,
    LONGEST_TEXT: None,
}
_INFORMATIVE = ("architectures", "sample_rate", "semantic_token_template")
_LICENCES = ("license", "licence", "notice", "copying")
WARBLE_VOICES = (
    ("Silas", "Deep, gravelled"),
    ("Narrator", "Even, warm baritone"),
    ("Clara", "Clear, professional"),
    ("Pip", "Bright, quick"),
    ("Speaker 5", "Fifth voice of the checkpoint"),
)
WARBLE_DEFAULT_VOICE = 2


def bundle_config(
    source: Source, config: ModelConfig, codec_dtype: str, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of the bundle: every dimension written out, sampling defaults, provenance."""
    fields = {name: source.config[name] for name in _INFORMATIVE if name in source.config}
    fields |= msgspec.to_builtins(config)
    fields |= {
        "dtype": "bfloat16",
        "codec_dtype": codec_dtype,
        "generation": _generation(source),
        "provenance": dict(provenance),
    }
    return fields


def _generation(source: Source) -> dict[str, Any]:
    """Sampling defaults, and the longest text that the model was trained on if the source says."""
    given: Any = source.config.get("generation", {})
    path = member(source.folder, "generation_config.json")
    if path:
        given = _json_object(path)
    if not isinstance(given, dict):
        raise CheckpointError(f'{source.folder}/config.json: "generation" is not an object')
    processor = member(source.folder, "processor_config.json")
    limits = _json_object(processor) if processor else {}
    given = {LONGEST_TEXT: limits[LONGEST_TEXT]} | given if LONGEST_TEXT in limits else given
    found = {}
    for name, default in GENERATION_DEFAULTS.items():
        value = given.get(name, default)
        if name == LONGEST_TEXT and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise CheckpointError(
                f"{path or source.folder}: {name} is {value!r}, not a number from 0 up"
            )
        found[name] = value
    if given.get(PLAIN_PUNCTUATION) is True:
        found[PLAIN_PUNCTUATION] = True
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON the way all files of a bundle have it: two spaces, UTF-8, one newline."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    path.write_bytes(text + b"\n")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return found


def copy_tokenizer(source: Source, config: ModelConfig, stage: Path) -> None:
    """Copy tokenizer.json after checking that it parses and that its ids are the config's.

    Raises CheckpointError naming the first token that has no id or another one.
    """
    from tokenizers import Tokenizer

    path = member(source.folder, "tokenizer.json")
    assert path is not None  # open_source has seen it
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: {error}. Fetch it again") from error
    first = config.semantic_begin_id
    wanted: dict[str, int | None] = {"<|im_start|>": None, "<|voice|>": None}
    wanted["<|im_end|>"] = config.eos_token_id
    wanted |= {f"<|semantic:{i}|>": first + i for i in range(config.codebook_size)}
    for token, want in wanted.items():
        found = tokenizer.token_to_id(token)
        if found is None or (want is not None and found != want):
            say = "has no token" if found is None else f"gives id {found} to"
            due = "" if want is None else f"; config.json says {want}"
            raise CheckpointError(f"{path} {say} {token}{due}: it belongs to another model")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= config.vocab_size:
        raise CheckpointError(
            f"{path} has ids up to {highest}, but vocab_size is {config.vocab_size}:"
            " it belongs to another model"
        )
    shutil.copyfile(path, stage / path.name)


def write_voices(source: Source, source_id: str, stage: Path) -> None:
    """Copy voices.json, or write the voices that the source is known to have.

    A source whose name (the last part of its id) contains "warble" has five, chosen by
    `<|speaker:1|>` to `<|speaker:5|>`.
    """
    path = member(source.folder, "voices.json")
    if path:
        read_voices(source.folder)
        shutil.copyfile(path, stage / path.name)
        return
    found = VoiceList()
    if "warble" in source_id.rsplit("/", 1)[-1].lower():
        found = VoiceList(
            default=WARBLE_DEFAULT_VOICE,
            voices=tuple(
                Voice(i, name, f"<|speaker:{i}|>", "en", description)
                for i, (name, description) in enumerate(WARBLE_VOICES, 1)
            ),
        )
    write_json(stage / "voices.json", msgspec.to_builtins(found))


def is_licence(name: str) -> bool:
    """Whether a file of this name holds a licence or a notice, which go wherever the model goes."""
    return name.lower().startswith(_LICENCES)


def copy_licences(source: Source, stage: Path) -> list[str]:
    """Copy NOTICE, LICENSE and COPYING files; returns their names."""
    names = sorted(
        path.name for path in source.folder.iterdir() if is_licence(path.name) and path.is_file()
    )
    for name in names:
        path = member(source.folder, name)
        if path:
            shutil.copyfile(path, stage / name)
    return names
