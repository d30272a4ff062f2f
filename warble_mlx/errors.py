"""One family of errors. Each message says what was given, what is allowed and what to do."""


class WarbleError(Exception):
    """Base of everything this package raises on purpose; the command line shows it as one line."""

    exit_status = 2


class CheckpointError(WarbleError):
    """A model folder or file is missing, damaged, contradictory or of an unknown layout."""


class HubError(WarbleError):
    """A model could not be fetched."""


class TextError(WarbleError):
    """The text cannot be spoken: empty, nothing speakable, or not text."""


class VoiceError(WarbleError):
    """The voice or the reference clip cannot be used."""


class AudioError(WarbleError):
    """Audio could not be read or written."""


class BudgetError(WarbleError):
    """Prompt and frames wanted do not fit into the model's context."""


class MissingExtraError(WarbleError):
    """An optional dependency is needed; the message holds the pip line."""

    def __init__(self, task: str, package: str, extra: str) -> None:
        super().__init__(
            f'{task} needs {package}. Install it with: pip install "warble-mlx[{extra}]"'
        )


class SickError(WarbleError):
    """What the model made is not speech; it was thrown away.

    reason: a short name such as `codes-repeat`. seen: what was found, and when. cause: what
    probably lies behind it. warnings: what was doubtful before anything was said, as in
    `Speech.warnings`.
    """

    exit_status = 4
    warnings: tuple[str, ...] = ()

    def __init__(self, reason: str, seen: str, cause: str, remedy: str) -> None:
        self.reason, self.seen, self.cause = reason, seen, cause
        super().__init__(
            f"the result is no speech, so it was dropped: {seen}; probably {cause}: {remedy}"
            f" ({reason})"
        )


class VoiceWarning(UserWarning):
    """A reference clip or its transcript can be used, but the voice will suffer."""
