"""`warble quantize` and `warble convert --bits` at the command line, and the upload."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import ios_data
import packing_stand_in
import pytest
import synthetic

from warble_mlx import cli, hub
from warble_mlx.convert import convert
from warble_mlx.errors import HubError
from warble_mlx.fidelity.compare import stored_packings
from warble_mlx.publish import check_repo, plan_upload, upload
from warble_mlx.quant import Packing

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_source(tmp_path_factory.mktemp("published") / "tiny-model")


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "bundle"
    convert(source, out)
    return out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    packing_stand_in.install(monkeypatch)


def test_a_model_that_speaks(tmp_path: Path, capfd: Capture) -> None:
    """The whole command, with the bundled model: sizes on stdout, its test sentence on stderr."""
    out = tmp_path / "q8"
    assert (
        cli.main(
            ["quantize", str(ios_data.unpacked_bundle(tmp_path / "b16")), str(out), "--bits", "8"]
        )
        == 0
    )
    shown = capfd.readouterr()
    assert "40 Linears  slow AR  8 bits, groups of 64, affine" in shown.out
    assert "15 Linears  fast AR  8 bits, groups of 64, affine" in shown.out
    assert "text embedding (tied head)" in shown.out
    assert "needed to speak, tokenizer included: " in shown.out
    assert "limit at 4 bits: 909 MB" in shown.out
    assert "check: " in shown.err
    assert f'next: warble say -m {out} "Hello there."' in shown.err
    assert set(stored_packings(out).values()) == {Packing(8, 64, "affine")}


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_what_cannot_work_is_told_before_a_download(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("looked for")

    monkeypatch.setattr(hub, "locate", never)
    line = [command, "org/name", str(tmp_path / "out"), "--bits", "4"]
    assert cli.main([*line[:2], str(tmp_path), *line[3:]]) == 2
    assert "exists already. Give another folder, or --force" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)
    assert cli.main(line) == 2
    assert 'pip install "warble-mlx[quant]"' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--bits", "8", "--group-size", "32"], Packing(8, 32, "affine")),
        (["--q-bits", "3", "--q-group-size", "32", "--q-mode", "affine"], Packing(3, 32, "affine")),
        (["--q-mode", "mxfp4"], Packing(4, 32, "mxfp4")),
        (["-q"], Packing(4, 64, "affine")),
        (["--quantize", "--mode", "nvfp4"], Packing(4, 16, "nvfp4")),
    ],
)
def test_convert_in_one_go_and_the_words_of_mlx_lm(
    source: Path, tmp_path: Path, words: list[str], wanted: Packing
) -> None:
    out = tmp_path / "deep" / "out"
    assert cli.main(["convert", str(source), str(out), "--no-check", *words]) == 0
    assert set(stored_packings(out).values()) == {wanted}
    config = json.loads((out / "config.json").read_text())
    assert config["provenance"]["source"] == "tiny-model"
    assert [path.name for path in tmp_path.iterdir()] == ["deep"], "nothing temporary is left"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_learning_and_exceptions_from_the_command_line(bundle: Path, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("Hi.\n")
    config = json.loads((bundle / "config.json").read_text())
    config["generation"]["max_new_tokens"] = 12
    synthetic.write_json(bundle / "config.json", config)
    args = ["--calibrate", str(texts), "--except", "fast_layers=8", "--no-check"]
    assert cli.main(["quantize", str(bundle), str(out), *args]) == 0
    assert stored_packings(out)["fast_layers.1.attention.wo"].bits == 8
    provenance = json.loads((out / "config.json").read_text())["provenance"]
    assert provenance["quantizer"]["method"] == "GPTQ on generated token streams"


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        (
            "convert",
            ["--group-size", "32", "--report"],
            "--group-size, --report need --bits, or -q",
        ),
        ("convert", ["--calibrate", "builtin"], "--calibrate need --bits"),
        ("convert", ["--bits", "7"], "bits 7 is not possible in mode affine"),
        ("quantize", ["--except", "fast_layers"], "is not PATH=BITS, such as fast_layers=8"),
        ("quantize", ["--dry-run"], "--dry-run needs --upload-repo"),
        ("quantize", ["--upload-repo", "name"], '"name" is no repository of the hub'),
        ("quantize", ["--calibrate", "absent.txt"], "absent.txt cannot be read"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    source: Path, bundle: Path, tmp_path: Path, capfd: Capture,
    command: str, args: list[str], says: str,
) -> None:  # fmt: skip
    given = source if command == "convert" else bundle
    assert cli.main([command, str(given), str(tmp_path / "out"), *args]) == 2
    assert says in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_lists_what_would_be_sent(
    bundle: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    out = tmp_path / "out"
    args = ["--no-check", "--upload-repo", "me/model-4bit", "--dry-run"]
    assert cli.main(["quantize", str(bundle), str(out), *args]) == 0
    shown = capfd.readouterr().out
    for name in ("model.safetensors", "README.md", "voices.json"):
        assert name in shown
    assert "would go to me/model-4bit" in shown


class Hub:
    """Keeps what it is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def __call__(self) -> SimpleNamespace:
        def create_repo(repo: str, **options: Any) -> None:
            self.asked.append((repo, options))

        def upload_folder(**options: Any) -> None:
            if self.error:
                raise self.error
            self.asked.append(("folder", options))

        return SimpleNamespace(create_repo=create_repo, upload_folder=upload_folder)


def test_upload(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    (bundle / ".partial").write_text("x")
    plan = plan_upload(bundle, "me/model")
    assert ".partial" not in plan.files
    assert plan.total_bytes == sum((bundle / name).stat().st_size for name in plan.files)
    assert upload(plan) == "https://huggingface.co/me/model"
    (created, _), (_, sent) = hub.asked
    assert created == sent["repo_id"] == "me/model"
    assert sent["folder_path"] == str(bundle)
    assert set(sent["allow_patterns"]) == set(plan.files)


def test_a_refused_upload_says_how_to_go_on(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(OSError("403 Forbidden\nmore")))
    with pytest.raises(HubError, match=r"could not be sent to me/x: 403 Forbidden\. Run `hf auth"):
        upload(plan_upload(bundle, "me/x"))


@pytest.mark.parametrize("name", ["model", "a/b/c", "-a/b", "a/ b", ""])
def test_names_that_are_no_repository(name: str) -> None:
    with pytest.raises(HubError, match="give owner/name"):
        check_repo(name)
