"""The folder as a whole: atomic, resumable by part, checked again by verify-ios."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import ios_data
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from warble_mlx.cli import warble
from warble_mlx.errors import CheckpointError, VoiceError, WarbleError
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export import exporter, swift_part, verify
from warble_mlx.ios_export.checks import ExportError, equal
from warble_mlx.ios_export.exporter import export
from warble_mlx.ios_export.facts import bandwidth, tokens
from warble_mlx.ios_export.job import Built, Job, Options
from warble_mlx.ios_export.manifest import MANIFEST, read_manifest
from warble_mlx.ios_export.swift_part import HEAD, PAGE
from warble_mlx.registered import Codec, RegisteredVoice
from warble_mlx.safetensors_file import read_header

ONLY = ["mlx-swift"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, every part that needs nothing extra."""
    out = tmp_path_factory.mktemp("export") / "out"
    options = Options(dtype="float32", check_frames=3)
    export(bundled_folder(), out, only=["mlxfn", "mlx-swift"], options=options)
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def left_over(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def results(folder: Path) -> dict[str, str]:
    return {check.name: check.result for check in verify.verify_export(folder)}


def test_everything_passes_again(exported: Path) -> None:
    found = results(exported)
    assert set(found.values()) == {"pass"}
    assert {"self-test tokens equal", "self-test audio", "damaged or missing files"} <= set(found)
    assert left_over(exported.parent) == []


def test_files_made_for_a_gpu_say_so(exported: Path) -> None:
    graphs = json.loads((exported / "mlxfn" / "graphs.json").read_text())
    assert {graph["device"] for graph in graphs.values()} == {"gpu"}


def test_what_only_a_gpu_has_is_not_run_on_a_cpu(copy: Path) -> None:
    """As a file is that was traced on a Mac."""
    path = copy / "mlxfn" / "graphs.json"
    graphs = json.loads(path.read_text())
    path.write_text(json.dumps({n: g | {"traced_on": "gpu"} for n, g in graphs.items()}))
    with mx.stream(mx.cpu):
        found = list(verify.self_test(copy / "mlxfn", read_manifest(copy)))
    assert [c.result for c in found] == ["pass", "pass", "unverified"]
    assert "GPUs only" in found[-1].note


SAID = np.arange(44, dtype=np.int32).reshape(4, 11)


@pytest.mark.parametrize(
    ("row", "book", "exact", "result", "value"),
    [
        (None, 0, False, "pass", 4),
        (2, 5, True, "fail", 2),
        (2, 5, False, "unverified", 2),
        (0, 5, False, "unverified", 0),  # the first semantic token is right
        (0, 0, False, "fail", 0),
    ],
)
def test_tokens_of_a_self_test_are_judged_by_what_is_exact(
    row: int | None, book: int, exact: bool, result: str, value: int
) -> None:
    found = SAID.copy()
    if row is not None:
        found[row, book] += 1
    check = verify.token_check(found, SAID, exact=exact, where="here")
    assert (check.result, check.value, check.limit) == (result, value, 4)
    assert bool(check.note) == (result == "unverified")


def test_a_self_test_that_ends_early_is_not_equal() -> None:
    assert verify.token_check(SAID[:3], SAID, exact=True, where="here").result == "fail"
    assert verify.token_check(SAID[:3], SAID, exact=False, where="here").result == "unverified"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_file_is_named(copy: Path, damage: Callable[[Path], None]) -> None:
    damage(copy / "mlx-swift" / "codec.safetensors")
    (first, *_) = verify.verify_export(copy)
    assert (first.result, first.note) == ("fail", "mlx-swift/codec.safetensors")


def test_an_extra_file_is_named(copy: Path) -> None:
    (copy / "mlx-swift" / "notes.txt").write_text("x")
    _, extra, *_ = islice(verify.verify_export(copy), 2)  # before anything is run
    assert (extra.name, extra.result) == ("files not in the manifest", "fail")


def test_another_self_test_fails(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the functions compute is compared, not only the hashes."""
    monkeypatch.setattr(verify, "damaged_files", lambda *_: [])
    path = copy / "mlxfn" / "selftest.safetensors"
    header = read_header(path)
    at = header.data_start + header.entries["emitted"].data_offsets[0] + 44
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert results(copy)["self-test tokens equal"] == "fail"


def test_the_command_tells_and_fails(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "self_test", lambda *_: iter(()))
    good = CliRunner().invoke(warble, ["verify-ios", str(copy)])
    assert good.exit_code == 0
    assert "copy: good" in good.stdout
    flip(copy / "tokenizer.json")
    bad = CliRunner().invoke(warble, ["verify-ios", str(copy)])
    assert bad.exit_code == 1
    assert "FAIL  damaged or missing files: 1 (limit 0)  tokenizer.json" in bad.stdout


def test_the_manifest_knows_the_model(exported: Path) -> None:
    found = read_manifest(exported)
    assert found.audio.sample_rate == 44_100
    assert [v.name for v in found.voices if v.default] == ["Vera"]
    assert found.quantization is not None
    assert (found.quantization.bits, found.quantization.linears) == (8, 55)
    assert found.sampling.max_text_characters == 170
    by_name = {f.name: f for part in found.parts for f in part.functions}
    assert [t.name for t in by_name["prefill_32_512"].inputs] == ["columns", "slot", "hole"]
    assert by_name["codec_stream"].outputs[0].shape == (1, 7 * 2048)
    assert by_name["codec_stream"].longest_axis <= 16_384


def test_byte_ids_tokenise_like_the_tokenizer(exported: Path) -> None:
    ids = read_manifest(exported).tokens.byte_ids
    job = ios_data.job_on(bundled_folder())
    text = "Grüße, “naïve” café – 12 €! 你好 🙂"
    assert [ids[b] for b in text.encode()] == job.prompts._ids(text)
    assert ids[0xFF] == -1


def test_a_tokenizer_that_merges_has_no_byte_ids(full_tokenizer: Path) -> None:
    assert tokens(ios_data.job_on(full_tokenizer)).byte_ids == ()


# ---------------------------------------------------------------------- whole or not at all


def failing(job: Job, folder: Path) -> Built:
    built = swift_part.build(job, folder)
    built.checks.append(equal("nonsense", 1, 2))
    return built


def test_a_failed_part_leaves_nothing_behind_but_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporter._builder
    builders = {"mlx-swift": swift_part.build, "coreml": failing}
    monkeypatch.setattr(exporter, "_builder", builders.__getitem__)
    monkeypatch.setattr(exporter, "_coreml_versions", lambda: ("", ""))
    out = tmp_path / "out"
    with pytest.raises(ExportError, match="nonsense is 1, limit 2"):
        export(bundled_folder(), out, only=["mlx-swift", "coreml"])
    assert not out.exists()
    said: list[str] = []
    monkeypatch.setattr(exporter, "_builder", real)
    export(bundled_folder(), out, only=ONLY, say=said.append)
    assert "mlx-swift: there already" in said
    assert [part.name for part in read_manifest(out).parts] == ONLY
    assert left_over(tmp_path) == []


def test_a_part_left_by_another_bundle_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    builders = {"mlx-swift": swift_part.build, "coreml": failing}
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "_builder", builders.__getitem__)
        with pytest.raises(ExportError):
            export(bundled_folder(), out, only=["mlx-swift", "coreml"])
    other = ios_data.four_bit_bundle(tmp_path / "q4")
    said: list[str] = []
    export(other, out, only=ONLY, say=said.append)
    assert "mlx-swift: building" in said
    quantization = read_manifest(out).quantization
    assert quantization is not None
    assert (quantization.bits, quantization.linears) == (4, 55)


def test_parts_that_are_there_are_kept(copy: Path) -> None:
    before = (copy / "mlxfn" / "lm.mlxfn").stat().st_ino
    options = Options(dtype="float32", check_frames=3)
    export(bundled_folder(), copy, only=ONLY, options=options)
    assert [part.name for part in read_manifest(copy).parts] == ["mlxfn", "mlx-swift"]
    assert (copy / "mlxfn" / "lm.mlxfn").stat().st_ino == before
    assert next(verify.verify_export(copy)).result == "pass"


def test_an_export_with_other_options_is_replaced_only_by_force(copy: Path) -> None:
    with pytest.raises(CheckpointError, match="--force"):
        export(bundled_folder(), copy, only=ONLY)
    export(bundled_folder(), copy, only=ONLY, force=True)
    assert [part.name for part in read_manifest(copy).parts] == ONLY


def test_a_folder_that_is_no_export_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not replaced even by force"):
        export(bundled_folder(), tmp_path / "out", only=ONLY, force=True)
    assert (tmp_path / "out" / "precious").exists()


def test_what_cannot_work_is_told_first(tmp_path: Path) -> None:
    with pytest.raises(WarbleError, match="mlxfn, mlx-swift, coreml"):
        export(bundled_folder(), tmp_path / "out", only=["onnx"])
    with pytest.raises(CheckpointError, match="warble convert"):
        export(tmp_path, tmp_path / "out", only=ONLY)
    with pytest.raises(CheckpointError, match="inside each other"):
        export(bundled_folder(), bundled_folder() / "out", only=ONLY)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- voices


def test_voices_are_chosen_and_registered_ones_become_columns(tmp_path: Path) -> None:
    from warble_mlx.voice_folder import keep

    job = ios_data.job_on(bundled_folder())
    codes = np.random.default_rng(0).integers(0, 500, (10, 20)).astype(np.int32)
    codec = Codec.of(job.bundle, job.config, job.raw_config)
    keep(RegisteredVoice("Änna B", "Some words.", codes, codec))
    manifest = export(bundled_folder(), tmp_path / "out", only=ONLY, voices=["corvin", "änna b"])
    corvin, anna = manifest.voices
    assert (corvin.name, corvin.default, anna.file) == (
        "Corvin",
        False,
        "voices/änna-b.safetensors",
    )
    assert len(corvin.token_ids) == 1
    columns = read_header(tmp_path / "out" / anna.file).read("columns")
    assert (columns[1:, columns[0] >= job.config.semantic_begin_id] == codes).all()
    assert results(tmp_path / "out")["damaged or missing files"] == "pass"


def test_an_unknown_or_doubled_voice_is_told(tmp_path: Path) -> None:
    for names, told in ((["nobody"], "nobody"), (["Corvin", "corvin"], "twice")):
        with pytest.raises(VoiceError, match=told):
            export(bundled_folder(), tmp_path / "out", only=ONLY, voices=names)


# ---------------------------------------------------------------------- the MLX-Swift folder


def test_tables_can_be_mapped_and_the_head_is_a_slice(exported: Path) -> None:
    folder = exported / "mlx-swift"
    source = read_header(bundled_folder() / "model.safetensors")
    tables = read_header(folder / "embeddings.safetensors")
    for name in ("embeddings.weight", "codebook_embeddings.weight"):
        entry = tables.entries[f"model.{name}"]
        at = tables.data_start + entry.data_offsets[0]
        assert at % PAGE == 0
        raw = (folder / "embeddings.safetensors").read_bytes()[at : at + entry.nbytes]
        assert raw == source.read(name).tobytes()
    config = ios_data.job_on(bundled_folder()).config
    head = read_header(folder / "model.safetensors").read(HEAD)
    table = source.read("embeddings.weight")
    assert (head[:-1] == table[config.semantic_begin_id : config.semantic_end_id + 1]).all()
    assert (head[-1] == table[config.eos_token_id]).all()


def test_a_changed_tensor_is_noticed(copy: Path) -> None:
    flip(copy / "mlx-swift" / "model.safetensors")
    job = ios_data.job_on(bundled_folder())
    found = [c for c in swift_part.source_checks(job, copy / "mlx-swift") if c.result == "fail"]
    assert found
    assert found[0].name == "tensors of model.safetensors that differ"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A 4-bit bundle's job, and its MLX-Swift folder."""
    folder = tmp_path_factory.mktemp("packed")
    job = ios_data.job_on(ios_data.four_bit_bundle(folder / "q4"))
    export(job.bundle, folder / "out", only=ONLY)
    return job, folder / "out" / "mlx-swift"


def test_a_lost_quantisation_block_is_noticed(packed: tuple[Job, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed[1], tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    found = {c.name: c.result for c in swift_part.folder_checks(folder)}
    assert found["packed weights are told by config.json"] == "fail"


@pytest.mark.parametrize("field", ["weight", "scales", "biases"])
def test_another_grid_is_noticed(packed: tuple[Job, Path], tmp_path: Path, field: str) -> None:
    job, name = packed[0], "packed weights of model.safetensors that are not the bundle's"
    folder = Path(shutil.copytree(packed[1], tmp_path / "copy"))
    before = {c.name: c.result for c in swift_part.source_checks(job, folder)}
    assert before[name] == "pass"
    path = folder / "model.safetensors"
    header = read_header(path)
    entry = header.entries[f"model.fast_layers.1.attention.wo.{field}"]
    data = bytearray(path.read_bytes())
    data[header.data_start + entry.data_offsets[0]] ^= 1
    path.write_bytes(data)
    after = {c.name: c for c in swift_part.source_checks(job, folder)}
    assert after[name].note == "lacks fast_layers.1.attention.wo, has 1 of other numbers"
    assert after[name].result == "fail"


def test_bandwidth_counts_what_a_frame_reads() -> None:
    found = bandwidth(ios_data.job_on(bundled_folder()))
    entries = read_header(bundled_folder() / "model.safetensors").entries
    slow = sum(e.nbytes for n, e in entries.items() if n.startswith("layers."))
    fast = sum(e.nbytes for n, e in entries.items() if n.startswith(("fast_l", "fast_output")))
    codec = read_header(bundled_folder() / "codec_decoder.safetensors").entries.values()
    wanted = slow + 9 * fast + 1025 * 256 * 2 + 5 * sum(e.nbytes for e in codec) / 7
    assert found.bytes_per_frame == pytest.approx(wanted, abs=8)
    assert "projection" in found.note


def test_every_manifest_file_exists_once(exported: Path) -> None:
    listed = [file.path for file in read_manifest(exported).all_files]
    present = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert sorted(listed) == sorted(present - {MANIFEST})
