"""Which files make a model, in each of the layouts that can be read."""

from __future__ import annotations

import json
from pathlib import Path

from warble_mlx.errors import CheckpointError

# Everything that conversion or the runtime reads, and the papers that go along with it. Code,
# other frameworks' weights, optimizer states and samples stay where they are.
WANTED = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "voices.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "codec*.safetensors",
    "codec*.pth",
    "README.md",
    "LICENSE*",
    "NOTICE*",
)
BUNDLE_MARK = "codec_decoder.safetensors"  # no other layout has a file of this name
CODEC_FILES = (BUNDLE_MARK, "codec.safetensors", "codec.pth")


def missing_files(folder: Path) -> list[str]:
    """Files a model in `folder` cannot do without and that are not there, sorted.

    Knows every layout: our bundle, the published one (`codec.pth`), single or sharded weights.
    """
    wanted = {"config.json", "tokenizer.json"}
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        wanted |= _shards(index)
    else:
        wanted.add("model.safetensors")
    missing = sorted(name for name in wanted if not holds(folder, name))
    codecs = (*CODEC_FILES, _named_codec(folder))
    if not any(holds(folder, name) for name in codecs):
        missing.append("the codec (codec_decoder.safetensors, codec.safetensors or codec.pth)")
    return missing


def holds(folder: Path, name: str) -> bool:
    """Whether `folder` has the file `name`; no folder has one whose name is too long."""
    try:
        return (folder / name).is_file()
    except OSError:
        return False


def _shards(index: Path) -> set[str]:
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
        return {str(name) for name in shards}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} does not list the weight files ({error!r}): fetch it again"
        ) from error


def _named_codec(folder: Path) -> str:
    """The codec file that config.json names; config problems are reported where it is parsed."""
    try:
        name = json.loads((folder / "config.json").read_bytes())["codec_filename"]
    except (OSError, ValueError, KeyError, TypeError):
        return CODEC_FILES[-1]
    return Path(str(name)).name or CODEC_FILES[-1]


def check_complete(folder: Path) -> None:
    """Raise CheckpointError naming every file that `folder` lacks to be a model."""
    missing = missing_files(folder)
    if missing:
        raise CheckpointError(f"{folder} is not a complete model. Missing: {', '.join(missing)}")


def is_bundle(folder: Path) -> bool:
    """Whether `folder` is in our own layout, so that it is loaded without conversion."""
    return (folder / BUNDLE_MARK).is_file()
