"""Upload a finished bundle to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from warble_mlx.errors import HubError
from warble_mlx.hub import HUB
from warble_mlx.model_files import check_complete

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Upload(NamedTuple):
    """What goes where: file names with sizes in bytes."""

    repo: str
    folder: Path
    files: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All files together."""
        return sum(self.files.values())


def check_repo(repo: str) -> str:
    """A repository's id, owner/name; raises HubError for anything else."""
    if not _REPO.fullmatch(repo):
        raise HubError(f'"{repo}" is no repository of the hub: give owner/name')
    return repo


def plan_upload(folder: Path, repo: str) -> Upload:
    """What `upload` would send. Nothing is sent, and nobody is asked.

    Raises HubError for a name that is none, CheckpointError for an incomplete bundle.
    """
    check_repo(repo)
    check_complete(folder)
    files = {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".")
    }
    return Upload(repo, folder, files)


def upload(plan: Upload) -> str:
    """Send the files as one commit, making the repository if there is none; returns its address.

    Raises HubError when the hub refuses or cannot be reached.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(plan.repo, repo_type="model", exist_ok=True)
        api.upload_folder(
            repo_id=plan.repo,
            folder_path=str(plan.folder),
            allow_patterns=list(plan.files),
            commit_message="Upload of an MLX bundle by warble-mlx",
        )
    except Exception as error:  # the library has many: each becomes one sentence, and is chained
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise HubError(
            f"{plan.folder} is finished, but could not be sent to {plan.repo}: {reason[0]}. Run"
            f" `hf auth login`, then `hf upload {plan.repo} {plan.folder}`"
        ) from error
    return f"{HUB}/{plan.repo}"
