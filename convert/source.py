"""A source folder: which files it has, what is wrong with them, and one pool of tensors.

Layouts are told apart by what the files hold. Names lose the prefixes that others have published
and trainers put in front (`model.`, `codec.`, `generator.`, `module.`, `_orig_mod.`); whether
convolutions are stored channels first or last is seen at Snake's alpha, which is `[1, C, 1]` in
the first case and `[1, 1, C]` in the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from warble_mlx.config import read_config_json
from warble_mlx.convert.names import DECODER, DROPPED, ENCODER, MODEL, OTHER_NETWORK_REASON
from warble_mlx.convert.stored import StoredTensor, stored_tensors
from warble_mlx.convert.torch_file import read_pth
from warble_mlx.errors import CheckpointError
from warble_mlx.model_files import holds
from warble_mlx.safetensors_file import Header, read_header

INDEX = "model.safetensors.index.json"
CODEC_NAMES = ("codec.pth", "codec.safetensors")
# Of a whole model: its parts, torch's DistributedDataParallel and torch.compile.
_PREFIXES = ("model.", "codec.", "module.", "_orig_mod.")
_WEIGHT_NORM = (".parametrizations.weight.original", ".weight_g", ".weight_v")


@dataclass(frozen=True)
class Dropped:
    """A source tensor that the model does not need, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Source:
    """An opened source folder.

    `tensors` are named as in the bundle, except for weight-norm pairs, which are still apart.
    `encoder` is false for a bundle that came without its encoder file.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    channels_last: bool
    encoder: bool
    bundle: bool
    dropped: tuple[Dropped, ...]
    files: tuple[Path, ...]


def member(folder: Path, name: str) -> Path | None:
    """Path of the file `name` in `folder`, None if there is none.

    Raises CheckpointError if `name` has a path in it or is a link that leads out of the folder.
    The hub's cache, whose snapshots link into the `blobs` folder beside them, is fine.
    """
    if PurePosixPath(name).name != name or "\\" in name or name in ("", ".", ".."):
        raise CheckpointError(f"{folder} names the file {name!r}: only plain file names are read")
    path = folder / name
    if not holds(folder, name):
        return None
    root, target = folder.resolve(), path.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{path} is a link to {target}, outside the folder: put the file itself there"
        )
    return path


def open_source(folder: Path) -> Source:
    """Open every weights file of `folder`. Only headers are read, except of a `.pth`.

    Raises CheckpointError for damaged, quantised or half-converted files first, then for
    everything that is missing, at once.
    """
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        raise CheckpointError(f"{folder} is {kind}: give the folder that holds config.json")
    has_config = member(folder, "config.json") is not None
    config = read_config_json(folder) if has_config else {}
    bundle = member(folder, DECODER) is not None
    model_files, codec_files = _model_files(folder), _codec_files(folder, config, bundle)
    missing = [name for name in ("config.json", "tokenizer.json") if not member(folder, name)]
    if not model_files:
        missing.append(f"{MODEL} (or shards with {INDEX})")
    tensors: dict[str, StoredTensor] = {}
    dropped: list[Dropped] = []
    for path in model_files:
        _merge(tensors, _safetensors(path, config), path)
    for path in codec_files:
        if path.suffix == ".safetensors":
            _merge(tensors, _generator(_safetensors(path, config), dropped), path)
    if not codec_files and not any(name.startswith("decoder.") for name in tensors):
        missing.append(" or ".join(_codec_names(config)))
    if missing:
        raise CheckpointError(f"{folder} is no complete model. Missing: {', '.join(missing)}")
    for path in codec_files:
        if path.suffix != ".safetensors":
            _merge(tensors, _generator(read_pth(path), dropped), path)
    for name in list(tensors):
        reason = next((why for pattern, why in DROPPED if pattern.search(name)), None)
        if reason:
            del tensors[name]
            dropped.append(Dropped(name, reason))
    return Source(
        folder,
        config,
        tensors,
        _channels_last(folder, tensors),
        encoder=not bundle or len(codec_files) == 2,
        bundle=bundle,
        dropped=tuple(dropped),
        files=(*model_files, *codec_files),
    )


def _model_files(folder: Path) -> list[Path]:
    single, index = member(folder, MODEL), member(folder, INDEX)
    if single:
        return [single]
    if not index:
        return []
    try:
        wanted = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index}: {error}") from error
    shards = {name: member(folder, name) for name in sorted(set(wanted.values()))}
    absent = [name for name, path in shards.items() if path is None]
    if absent:
        raise CheckpointError(
            f"{index} names shards that are not there: {', '.join(absent)}. Fetch them again"
        )
    paths = [path for path in shards.values() if path is not None]
    for path in paths:
        here = read_header(path).entries
        lost = [n for n, shard in wanted.items() if shard == path.name and n not in here]
        if lost:
            raise CheckpointError(f"{path} lacks {', '.join(lost[:5])}, which {INDEX} puts there")
    return paths


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _codec_files(folder: Path, config: Mapping[str, Any], bundle: bool) -> list[Path]:
    if bundle:
        return [path for name in (DECODER, ENCODER) if (path := member(folder, name))]
    found = (member(folder, name) for name in _codec_names(config))
    return [path for path in found if path][:1]


def _codec_names(config: Mapping[str, Any]) -> list[str]:
    """File names that the codec may have, the one that config.json gives first."""
    given = config.get("codec_filename", CODEC_NAMES[0])
    return list(dict.fromkeys([str(given), *CODEC_NAMES]))


def _safetensors(path: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    header = read_header(path)
    _refuse_quantised(path, header, config)
    raw = [name for name in header.entries if any(mark in name for mark in _WEIGHT_NORM)]
    if raw and header.metadata.get("format") == "mlx":
        raise CheckpointError(
            f"{path} is marked as an MLX file but still has weight-norm tensors ({_some(raw)}):"
            " an unfinished conversion. Convert the original PyTorch checkpoint instead"
        )
    return stored_tensors(header)


def _refuse_quantised(path: Path, header: Header, config: Mapping[str, Any]) -> None:
    packed = [name for name in header.entries if name.endswith(".scales")]
    block = config.get("quantization") or config.get("quantization_config")
    if not packed and not block:
        return
    what = f"{len(packed)} packed tensors" if packed else "says config.json"
    how = "" if block else "; config.json has no quantization block that says how they are packed"
    raise CheckpointError(
        f"{path} is already quantised ({what}{how}). Convert the unquantised bundle or the"
        " original checkpoint instead"
    )


def _generator(tensors: Mapping[str, StoredTensor], dropped: list[Dropped]) -> dict[str, Any]:
    """The codec's own tensors of a training checkpoint that holds other networks too."""
    mark = "generator."
    if not any(mark in name for name in tensors):
        return dict(tensors)
    dropped += [Dropped(name, OTHER_NETWORK_REASON) for name in tensors if mark not in name]
    return {name.replace(mark, ""): t for name, t in tensors.items() if mark in name}


def _merge(pool: dict[str, StoredTensor], more: Mapping[str, StoredTensor], path: Path) -> None:
    for name, tensor in more.items():
        short = name
        while prefix := next((p for p in _PREFIXES if short.startswith(p)), ""):
            short = short.removeprefix(prefix)
        if ".lora_" in short:
            raise CheckpointError(
                f"{path} holds a LoRA adapter ({name}): merge it into the weights first, for"
                " example with merge_and_unload() of peft, and save the whole model"
            )
        if short in pool:
            raise CheckpointError(f"{path} holds {name}, which was already read as {short}")
        pool[short] = tensor


def _channels_last(folder: Path, tensors: Mapping[str, StoredTensor]) -> bool:
    first, last = [], []
    for name, tensor in tensors.items():
        if name.endswith(".alpha") and len(tensor.shape) == 3:
            if tensor.shape[1] > 1:
                first.append(name)
            elif tensor.shape[2] > 1:
                last.append(name)
    if first and last:
        raise CheckpointError(
            f"{folder} mixes two layouts: {first[0]} is channels first, {last[0]} channels last"
        )
    return bool(last)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
