"""Where a model comes from: folders, the hub's cache, downloads, conversion once."""

from __future__ import annotations

import errno
import importlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

import warble_mlx.convert
from warble_mlx import hub
from warble_mlx.errors import CheckpointError, HubError
from warble_mlx.model_files import is_bundle, missing_files

REPO = "scrappylabsai/warble"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUNDLE = ("config.json", "tokenizer.json", "model.safetensors", "codec_decoder.safetensors")
PUBLISHED = ("config.json", "tokenizer.json", "model.safetensors", "codec.pth")

# The HTTP library, which was another one in earlier versions of huggingface_hub.
http: Any = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])


def fill(folder: Path, names: tuple[str, ...] = BUNDLE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


class FakeHub:
    """Stands in for snapshot_download: a cache folder, and a network that can fail."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "models--scrappylabsai--warble" / "snapshots" / COMMIT
        self.offers: tuple[str, ...] = BUNDLE
        self.error: BaseException | None = None
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo: str, **options: Any) -> str:
        self.calls.append({"repo": repo, **options})
        if options["local_files_only"]:
            if not self.folder.exists():
                raise errors.LocalEntryNotFoundError("not there")
            return str(self.folder)
        if self.error:
            raise self.error
        fill(self.folder, self.offers)
        return str(self.folder)

    @property
    def downloads(self) -> int:
        return sum(not call["local_files_only"] for call in self.calls)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("WARBLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return fake


def response(status: int, kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    request = http.Request("GET", "https://example.invalid")
    return kind("no", response=http.Response(status, request=request))


# ---------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("name", [REPO, "model", "a b/c"])
def test_existing_folder_never_reaches_the_hub(fake: FakeHub, name: str) -> None:
    folder = fill(Path(name))
    assert hub.resolve(name) == folder.resolve()
    assert hub.bundle_for(name) == folder.resolve()
    assert not fake.calls


@pytest.mark.parametrize(
    "name",
    [
        "./model",
        "../model",
        "/no/such/model",
        "~/no-such-model",
        "models/q4/out",
        "org/name/",
        "model.safetensors",
        "org/model.safetensors",
        "a\\b",
        "C:model",
        Path("org/name"),
    ],
)
def test_path_that_does_not_exist_is_named_and_not_looked_up(
    fake: FakeHub, name: str | Path
) -> None:
    with pytest.raises(CheckpointError, match="there is no folder") as caught:
        hub.resolve(name)
    assert str(name) in str(caught.value)
    assert not fake.calls


@pytest.mark.parametrize("name", ["warble", "", "org/na me", "org/a--b", "org/a..b", "-x/y", "a@b"])
def test_neither_folder_nor_hub_id(fake: FakeHub, name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        hub.resolve(name)
    assert not fake.calls


def test_file_is_no_model(fake: FakeHub) -> None:
    fill(Path("model"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file"):
        hub.resolve("model/model.safetensors")


def test_incomplete_folder_lists_everything_that_is_missing(fake: FakeHub) -> None:
    fill(Path("model"), ("config.json",))
    with pytest.raises(CheckpointError) as caught:
        hub.bundle_for("model")
    for name in ("tokenizer.json", "model.safetensors", "codec_decoder.safetensors"):
        assert name in str(caught.value)


def test_missing_shards_are_named(fake: FakeHub) -> None:
    folder = fill(Path("model"), ("config.json", "tokenizer.json", "codec.safetensors", "one.st"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.st", "b": "two.st", "c": "one.st"}}))
    assert missing_files(folder) == ["two.st"]
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="does not list the weight files"):
        missing_files(folder)


def test_codec_may_have_the_name_in_the_config(fake: FakeHub) -> None:
    folder = fill(Path("model"), ("tokenizer.json", "model.safetensors", "codec-v2.pth"))
    (folder / "config.json").write_text('{"codec_filename": "codec-v2.pth"}')
    assert missing_files(folder) == []
    (folder / "codec-v2.pth").unlink()
    assert len(missing_files(folder)) == 1


# ---------------------------------------------------------------------------------- the hub


def test_first_use_downloads_with_an_allow_list(fake: FakeHub, capsys: Any) -> None:
    assert hub.resolve(REPO) == fake.folder
    asked = fake.calls[-1]
    assert asked["repo"] == REPO
    assert asked["local_files_only"] is False
    assert {"config.json", "codec*.safetensors", "codec*.pth"} <= set(asked["allow_patterns"])
    assert not any(p in ("*", "*.py", "*.bin", "*.safetensors") for p in asked["allow_patterns"])
    assert f"fetching {REPO}" in capsys.readouterr().err


def test_second_use_makes_no_connection(fake: FakeHub, capsys: Any) -> None:
    hub.resolve(REPO)
    capsys.readouterr()
    for offline in (False, True):
        assert hub.resolve(REPO, offline=offline) == fake.folder
    assert fake.downloads == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lost", BUNDLE)
def test_partial_cache_is_completed(fake: FakeHub, lost: str) -> None:
    fill(fake.folder)
    (fake.folder / lost).unlink()
    with pytest.raises(HubError, match="only partly in the cache"):
        hub.resolve(REPO, offline=True)
    assert fake.downloads == 0
    assert hub.resolve(REPO) == fake.folder
    assert fake.downloads == 1
    assert (fake.folder / lost).exists()


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_offline_and_not_cached(fake: FakeHub, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by == "environment")
    with pytest.raises(HubError, match=f"{REPO} is not in the cache and downloads are off"):
        hub.resolve(REPO, offline=by == "argument")
    assert fake.downloads == 0


def test_revision_by_argument_or_after_an_at_sign(fake: FakeHub) -> None:
    hub.resolve(f"{REPO}@v1.2")
    hub.resolve(REPO, revision="refs/pr/3")
    assert fake.calls[0]["revision"] == "v1.2"
    assert fake.calls[-1]["revision"] == "refs/pr/3"
    assert {call["repo"] for call in fake.calls} == {REPO}


def test_repository_of_something_else(fake: FakeHub) -> None:
    fake.offers = ("config.json", "README.md")
    with pytest.raises(HubError, match=r"not a complete model.*model\.safetensors"):
        hub.resolve(REPO)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (response(404, errors.RepositoryNotFoundError), ["no folder", "check the spelling"]),
        (response(403, errors.GatedRepoError), ["gated", f"{hub.HUB}/{REPO}", "hf auth login"]),
        (response(404, errors.RevisionNotFoundError), ["no revision v9"]),
        (response(401, errors.HfHubHTTPError), ["access token", "hf auth login"]),
        (response(503, errors.HfHubHTTPError), ["answered 503", "same command again"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["no space", "GB are free", "HF_HOME"]),
        (RuntimeError("I/O error: No space left on device (os error 28)"), ["no space"]),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), ["/cache", "HF_HOME"]),
        (http.ReadError("peer closed connection"), ["broke off", "what has arrived is kept"]),
        (errors.LocalEntryNotFoundError("no route"), ["cannot be reached", "connection"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_failure_is_a_sentence(fake: FakeHub, error: Exception, words: list[str]) -> None:
    fake.error = error
    with pytest.raises(HubError) as caught:
        hub.resolve(f"{REPO}@v9")
    for word in [REPO, *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_no_connection_names_its_cause(fake: FakeHub) -> None:
    error = errors.LocalEntryNotFoundError("An error happened while trying to locate the files")
    error.__cause__ = http.ConnectError("Name or service not known")
    fake.error = error
    with pytest.raises(HubError, match="ConnectError: Name or service not known"):
        hub.resolve(REPO)


def test_interrupt_is_passed_on(fake: FakeHub) -> None:
    fake.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hub.resolve(REPO)


def test_without_progress_nothing_is_printed_and_bars_are_off(
    fake: FakeHub, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    seen = []

    def download(repo: str, **options: Any) -> str:
        seen.append(are_progress_bars_disabled())
        return fake(repo, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.resolve(REPO, progress=False)
    assert seen == [False, True]  # the look into the cache draws none
    assert not are_progress_bars_disabled()
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------ conversion, once


class FakeConvert:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.before: Callable[[Path], None] | None = None

    def __call__(self, source: Path, out: Path, **options: Any) -> None:
        self.calls.append({"source": source, "out": out, **options})
        if self.before:
            self.before(out)
        fill(out)


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> FakeConvert:
    fake = FakeConvert()
    monkeypatch.setattr(warble_mlx.convert, "convert", fake)
    return fake


def test_published_layout_from_the_hub_is_converted_once(
    fake: FakeHub, convert: FakeConvert, capsys: Any, tmp_path: Path
) -> None:
    fake.offers = PUBLISHED
    bundle = hub.bundle_for(REPO)
    assert is_bundle(bundle)
    assert bundle.is_relative_to(tmp_path / "cache")
    assert COMMIT in bundle.name
    assert "converting" in capsys.readouterr().err
    assert convert.calls[0]["source"] == fake.folder
    assert (convert.calls[0]["source_id"], convert.calls[0]["revision"]) == (REPO, COMMIT)
    assert hub.bundle_for(REPO, offline=True) == bundle
    assert len(convert.calls) == 1
    assert fake.downloads == 1
    assert capsys.readouterr().err == ""


def test_bundle_is_not_converted(fake: FakeHub, convert: FakeConvert) -> None:
    assert hub.bundle_for(REPO) == fake.folder
    assert not convert.calls


def test_changed_folder_is_converted_again_and_the_old_result_goes(
    fake: FakeHub, convert: FakeConvert
) -> None:
    fill(Path("model"), PUBLISHED)
    first = hub.bundle_for("model")
    assert hub.bundle_for("model") == first
    assert len(convert.calls) == 1
    assert convert.calls[0]["source_id"] is None  # a path on this machine is nobody's business
    stat = Path("model/codec.pth").stat()
    os.utime("model/codec.pth", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = hub.bundle_for("model")
    assert second != first
    assert len(convert.calls) == 2
    assert not first.exists()
    (Path("model") / "notes.txt").write_text("not read by the conversion")
    assert hub.bundle_for("model") == second


def test_two_folders_of_one_name_do_not_meet(fake: FakeHub, convert: FakeConvert) -> None:
    bundles = {hub.bundle_for(fill(Path(at) / "model", PUBLISHED)) for at in ("a", "b")}
    assert len(bundles) == 2
    assert all(bundle.exists() for bundle in bundles)


def test_another_process_may_be_faster(fake: FakeHub, convert: FakeConvert) -> None:
    def other(out: Path) -> None:
        fill(out)
        raise CheckpointError("exists already")

    fill(Path("model"), PUBLISHED)
    convert.before = other
    assert is_bundle(hub.bundle_for("model"))


def test_failed_conversion_is_not_taken_for_a_bundle(fake: FakeHub, convert: FakeConvert) -> None:
    def fail(out: Path) -> None:
        raise CheckpointError("unknown tensor x")

    fill(Path("model"), PUBLISHED)
    convert.before = fail
    with pytest.raises(CheckpointError, match="unknown tensor x"):
        hub.bundle_for("model")


def test_full_disk_during_conversion(fake: FakeHub, convert: FakeConvert) -> None:
    def full(out: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fill(Path("model"), PUBLISHED)
    convert.before = full
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*GB are free.*WARBLE_CACHE"
    ):
        hub.bundle_for("model")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, ".cache/warble-mlx"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/warble-mlx"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "Library/Caches/warble-mlx"),
        ("darwin", {"WARBLE_CACHE": "/mine"}, "/mine"),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("WARBLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hub.sys, "platform", platform)
    assert hub.cache_folder() == Path.home() / expected


# --------------------------------------------------------- the real library, without a network


@pytest.fixture
def cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A cache of our own and no network; returns the connections that were tried."""
    tried: list[Any] = []

    def connect(_: socket.socket, address: Any) -> None:
        tried.append(address)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def look_up(host: Any, *_: Any, **__: Any) -> None:
        tried.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tried


def cached_snapshot(cache: Path, names: tuple[str, ...]) -> Path:
    """What the library leaves behind after a download."""
    home = cache / "models--scrappylabsai--warble"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    return fill(home / "snapshots" / COMMIT, names)


@pytest.mark.parametrize("offline", [True, False])
def test_cached_model_makes_no_connection(
    cut_off: list[Any], tmp_path: Path, offline: bool
) -> None:
    folder = cached_snapshot(tmp_path / "hub", BUNDLE)
    for model in (REPO, f"{REPO}@main", f"{REPO}@{COMMIT}"):
        found = hub.locate(model, offline=offline)
        assert (found.folder, found.repo, found.commit) == (folder, REPO, COMMIT)
    assert cut_off == []


@pytest.mark.parametrize(
    ("cached", "words"), [((), "cannot be reached"), (("config.json",), "broke off")]
)
def test_no_network_is_one_sentence(
    cut_off: list[Any], tmp_path: Path, cached: tuple[str, ...], words: str
) -> None:
    if cached:
        cached_snapshot(tmp_path / "hub", cached)
    with pytest.raises(HubError, match="downloads are off"):
        hub.resolve(REPO, offline=True)
    assert cut_off == []
    with pytest.raises(HubError, match=rf"{words}.*Name or service not known"):
        hub.resolve(REPO)
    assert cut_off
