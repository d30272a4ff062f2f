"""Opening coremltools and its packages without its talk."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars and notes to oneself: that coremltools was tested with an older torch,
    that it cannot run models on this system, and that shapes are traced as constants."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def read_spec(package: Path) -> Any:
    """The specification of a saved package."""
    with quiet():
        from coremltools.models import MLModel

        return MLModel(str(package), skip_model_load=True).get_spec()
