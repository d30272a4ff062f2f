"""Where a model comes from: a folder, or a repository on the Hugging Face Hub.

An existing folder is used as it is and its name never leaves the machine. Anything that looks
like a path is a path. What is left must be a hub id, `org/name` or `org/name@revision`: the
cache is asked first, without a connection, and only what it lacks is downloaded. A cached model
is therefore never replaced behind the user's back; `org/name@revision` fetches another one.

Models in another layout than our bundle are converted once, into `cache_folder()`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

from warble_mlx import __version__
from warble_mlx.errors import CheckpointError, HubError
from warble_mlx.model_files import WANTED, check_complete, is_bundle, missing_files

HUB = "https://huggingface.co"

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HUB_ID = re.compile(
    rf"(?!.*(?:--|\.\.))(?P<id>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Source:
    """A model on disk. `repo` is its hub id unless it is a folder of the user's; `commit` is known
    for what came from the hub."""

    folder: Path
    repo: str | None = None
    commit: str | None = None


def bundled_folder() -> Path:
    """The voice pack inside this package; it speaks without a download."""
    return Path(str(files("warble_mlx") / "bundled"))


def resolve(
    model: str | Path,
    *,
    offline: bool = False,
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """The local folder of `model`; see `locate`."""
    return locate(model, offline=offline, revision=revision, progress=progress).folder


def locate(
    model: str | Path,
    *,
    offline: bool = False,
    revision: str | None = None,
    progress: bool = True,
) -> Source:
    """Find `model`, which is a folder or a hub id (`org/name[@revision]`), or download it.

    With `offline`, or HF_HUB_OFFLINE=1 in the environment, nothing is downloaded. Raises
    CheckpointError for a path that is no model folder and HubError for everything that can go
    wrong with a download.
    """
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return Source(path.resolve())
    if str(model) and path.exists():
        raise CheckpointError(f"{model} is a file: give the folder that holds the model")
    if isinstance(model, Path) or looks_like_path(model):
        raise CheckpointError(f"there is no folder {model}")
    named = _HUB_ID.fullmatch(model)
    if named is None:
        raise CheckpointError(
            f'"{model}" is neither a folder nor a hub id: a hub id looks like'
            " scrappylabsai/warble, a folder like ./warble"
        )
    folder = _from_hub(named["id"], revision or named["revision"], offline, progress)
    # The cache's folders are named by commit.
    commit = folder.name if _COMMIT.fullmatch(folder.name) else None
    return Source(folder, named["id"], commit)


def looks_like_path(text: str) -> bool:
    """Whether a model's name can only be meant as a path: it is never sent to the hub."""
    return (
        text.startswith((".", "~", "/", os.sep))
        or text.endswith(("/", os.sep))
        or "\\" in text
        or (len(text) > 1 and text[1] == ":")
        or text.partition("@")[0].count("/") > 1
        or text.endswith(".safetensors")
    )


def cache_folder() -> Path:
    """Where converted models are kept: $WARBLE_CACHE, or the platform's folder for caches."""
    chosen = os.environ.get("WARBLE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "warble-mlx"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warble-mlx"


def bundle_for(
    model: str | Path,
    *,
    offline: bool = False,
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """A folder in our own layout for `model`, converted once if it is in another one.

    The conversion is kept under `cache_folder()`, by hub id and commit, or by the folder's path
    and the sizes and times of its files; later calls find it there.
    """
    source = locate(model, offline=offline, revision=revision, progress=progress)
    check_complete(source.folder)
    if is_bundle(source.folder):
        return source.folder
    if source.repo and source.commit:
        name, state = source.repo.replace("/", "--"), source.commit
    else:
        digest = hashlib.sha256(str(source.folder).encode()).hexdigest()[:12]
        name, state = f"{source.folder.name}-{digest}", _fingerprint(source.folder)
    home = cache_folder() / "bundles" / name
    bundle = home / f"{state}-{__version__}"
    if is_bundle(bundle) and not missing_files(bundle):
        return bundle
    from warble_mlx.convert import convert

    if progress:
        print(f"warble: converting {model} once, into {bundle}", file=sys.stderr)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with conversion_bar(shown=progress) as advance:
            convert(
                source.folder,
                bundle,
                force=bundle.exists(),
                source_id=source.repo,
                revision=source.commit,
                progress=advance,
            )
    except OSError as error:
        raise CheckpointError(
            f"{model} cannot be converted into {home}: {error.strerror or error}."
            f" {_free_space(home)} Set WARBLE_CACHE to use another folder"
        ) from error
    except CheckpointError:
        if missing_files(bundle):  # else another process was faster with the same conversion
            raise
    if not source.commit:  # the folder has changed: what was made of its old content is stale
        for old in home.iterdir():
            if old != bundle and not old.name.startswith("."):
                shutil.rmtree(old, ignore_errors=True)
    return bundle


@contextmanager
def conversion_bar(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr for a conversion, as the callback that moves it. Drawn only on a
    terminal, and only if `shown`."""
    from tqdm import tqdm

    with tqdm(desc="Converting", unit="B", unit_scale=True, disable=None if shown else True) as bar:

        def advance(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _fingerprint(folder: Path) -> str:
    """Changes when a file that conversion reads is added, removed, resized or rewritten."""
    state = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in WANTED):
            stat = file.stat()
            state.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16]


def _from_hub(repo: str, revision: str | None, offline: bool, progress: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    def fetch(*, local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(WANTED),
                local_files_only=local,
            )
        )

    cache = Path(constants.HF_HUB_CACHE)
    missing: list[str] = []
    try:
        cached = fetch(local=True)
        missing = missing_files(cached)
        if not missing:
            return cached
    except errors.LocalEntryNotFoundError:
        pass  # not there, or known to be incomplete: it is fetched below
    if offline or constants.HF_HUB_OFFLINE:
        raise HubError(_not_cached(repo, missing))
    if progress:
        print(f"warble: fetching {repo} from {HUB}, once; kept in {cache}", file=sys.stderr)
    try:
        with _bars(shown=progress):
            folder = fetch(local=False)
        absent = missing_files(folder)
        if absent and absent == missing:
            # Without a connection the library returns what it has. Is it that, or is the
            # repository of something else? This call fails if it is the connection.
            huggingface_hub.model_info(repo, revision=revision)
    except Exception as error:  # the library has many: each becomes one sentence, and is chained
        raise HubError(explain(error, repo, revision, cache)) from error
    if absent:
        raise HubError(f"{HUB}/{repo} is not a complete model. Missing: {', '.join(absent)}")
    return folder


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Switch the download library's progress bars off for a while, unless they are to be seen."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _not_cached(repo: str, missing: list[str]) -> str:
    state = f"is only partly in the cache (missing: {', '.join(missing)})" if missing else ""
    return (
        f"{repo} {state or 'is not in the cache'} and downloads are off (--offline or"
        " HF_HUB_OFFLINE): allow them once, or give a folder that holds the model"
    )


def explain(error: Exception, repo: str, revision: str | None, cache: Path) -> str:
    """One sentence on why downloading `repo` failed with `error`, and what to do."""
    from huggingface_hub import errors

    again = "Run the same command again: what has arrived is kept"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms on {HUB}/{repo}, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {repo} here and no model {repo} on {HUB}, or it is private:"
            " check the spelling, or run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision}: see {HUB}/{repo}/commits/main"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return (
            f"no space left for {repo} in {cache}. {_free_space(cache)} Make room, or set HF_HOME"
            " to a folder on a larger disk"
        )
    if isinstance(error, PermissionError):
        return (
            f"{repo} cannot be kept in {error.filename or cache} (permission denied): set HF_HOME"
            " to a folder of your own"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{HUB} cannot be reached ({_cause(error)}) and {repo} is not in the cache: check the"
            " connection, or give a folder that holds the model"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"{HUB} refuses its access token for {repo}: run `hf auth login`"
    if status is not None:
        return f"{HUB} answered {status} for {repo}. {again} in a few minutes"
    return f"the download of {repo} broke off ({_cause(error)}). {again}"


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__


def _free_space(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free there."
