"""`warble voices` and `warble voice`: the voices of a model, and those made of clips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warble_mlx.cli_base import (
    Seconds,
    debug_option,
    dequantize_option,
    emit,
    json_option,
    model_option,
    offline_option,
    option,
    say_so,
    table,
)

if TYPE_CHECKING:
    from warble_mlx.registered import Codec, RegisteredVoice


@click.command()
@model_option
@json_option
@offline_option
@debug_option
def voices(model: str | None, as_json: bool, offline: bool) -> None:
    """List the voices of a model, and the registered ones."""
    list_voices(model, offline=offline, as_json=as_json)


def list_voices(model: str | None, *, offline: bool, as_json: bool) -> None:
    """Print number, name, language and description of each voice; * marks the default.

    Registered voices have no number. Those made for another codec are marked; files that are no
    voices are told on stderr.
    """
    from warble_mlx.hub import bundle_for, bundled_folder
    from warble_mlx.voices import read_voices

    folder = bundled_folder() if model is None else bundle_for(model, offline=offline)
    known = read_voices(folder)
    rows: list[dict[str, Any]] = [
        {
            "id": voice.id,
            "name": voice.name,
            "language": voice.language,
            "description": voice.description,
            "default": voice == known.default_voice,
            "registered": False,
            "usable": True,
        }
        for voice in known.voices
    ]
    rows += _registered_rows(folder)
    if as_json:
        emit(json.dumps(rows, ensure_ascii=False) + "\n")
    elif rows:
        emit(table([_cells(row) for row in rows]))
    if not known.voices and not as_json:
        say_so(
            "this model names no voices: --voice takes a number, or --ref-audio and --ref-text a"
            " clip"
        )


def _registered_rows(folder: Path) -> list[dict[str, Any]]:
    from warble_mlx.errors import VoiceError
    from warble_mlx.voice_folder import registered_voices

    rows, codec = [], None
    for voice in registered_voices():
        if isinstance(voice, VoiceError):
            say_so(str(voice))
            continue
        codec = codec or _codec_of(folder)
        rows.append(
            {
                "id": None,
                "name": voice.name,
                "language": voice.language,
                "description": voice.description,
                "default": False,
                "registered": True,
                "usable": voice.codec == codec,
            }
        )
    return rows


def _codec_of(folder: Path) -> Codec:
    from warble_mlx.config import read_config, read_config_json
    from warble_mlx.registered import Codec

    return Codec.of(folder, read_config(folder), read_config_json(folder))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    number = "-" if row["registered"] else str(row["id"])
    description = row["description"]
    if row["registered"]:
        note = "registered" if row["usable"] else "registered, for another codec"
        description = f"{description} ({note})".strip()
    return "*" if row["default"] else " ", number, row["name"], row["language"], description


@click.group()
def voice() -> None:
    """Make, show and remove voices of your own.

    \b
      warble voice add anna clip.wav --text "What is said in the clip."
      warble say -v anna "Hello there."

    A voice is kept as a small file in a folder of yours ($WARBLE_VOICES names another one); the
    clip is not needed any more.
    """


voice.add_command(voices, "list")


@voice.command()
@click.argument("name")
@click.argument("clip")
@option("--text", required=True, metavar="TEXT", help="What is said in CLIP, word for word.")
@option("--description", default="", metavar="TEXT", help="Shown in the list of voices.")
@option("--language", default="", metavar="CODE", help="Language of the clip, such as en.")
@option(
    "--clip-seconds",
    type=Seconds(),
    metavar="A:B",
    help="Use only this part of CLIP, in seconds; --text is then what is said in it.",
)
@option("--force", is_flag=True, help="Replace a voice of this name.")
@model_option
@dequantize_option
@offline_option
@debug_option
def add(
    name: str,
    clip: str,
    text: str,
    description: str,
    language: str,
    clip_seconds: tuple[float, float] | None,
    force: bool,
    model: str | None,
    dequantize: bool,
    offline: bool,
) -> None:
    """Make the voice NAME of CLIP, 3 to 15 s of one person speaking.

    wav, flac, mp3 and ogg are read, and m4a with pip install "warble-mlx[av]". The voice belongs
    to the codec of MODEL: every model with that codec can speak with it.
    """
    from warble_mlx.clips import prepare_clip
    from warble_mlx.hub import bundled_folder
    from warble_mlx.registered import check_name
    from warble_mlx.voice_folder import keep, refuse_taken

    # All that can be wrong is found before a model is loaded, or even fetched.
    name = check_name(name)
    refuse_taken(name, force=force)
    for doubt in prepare_clip(clip, text, clip_seconds)[2].warnings:
        say_so(f"warning: {doubt}")
    if model is None:
        from warble_mlx.registered import check_free
        from warble_mlx.voices import read_voices

        check_free(name, read_voices(bundled_folder()))

    import warble_mlx

    warble = warble_mlx.load(model, offline=offline, dequantize=dequantize)
    made = warble.register(
        clip, text, name, description=description, language=language, clip_seconds=clip_seconds
    )
    path = keep(made, force=force)
    say_so(f"{name}: {_facts(made)} -> {path}")


@voice.command()
@click.argument("name")
@debug_option
def remove(name: str) -> None:
    """Delete the registered voice NAME."""
    from warble_mlx.voice_folder import remove as remove_voice

    say_so(f"removed {remove_voice(name)}")


@voice.command()
@click.argument("name")
@json_option
@debug_option
def show(name: str, as_json: bool) -> None:
    """Show what is known about the registered voice NAME."""
    from warble_mlx.voice_folder import registered

    found = registered(name)
    facts = {
        "name": found.name,
        "language": found.language,
        "description": found.description,
        "transcript": found.transcript,
        "frames": int(found.codes.shape[1]),
        "clip_seconds": found.clip_seconds,
        "clip_sample_rate": found.clip_sample_rate,
        "codec": found.codec.shape,
        "codec_sha256": found.codec.sha256,
        "made_by": found.made_by,
    }
    if as_json:
        emit(json.dumps(facts, ensure_ascii=False) + "\n")
    else:
        emit(table([(key.replace("_", " "), str(value)) for key, value in facts.items()]))


def _facts(made: RegisteredVoice) -> str:
    return (
        f"{made.codes.shape[1]} frames of {made.clip_seconds:.2f} s at {made.clip_sample_rate} Hz"
    )
