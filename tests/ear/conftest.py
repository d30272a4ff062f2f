"""What the ear tests share: the recogniser and the bundled model, each loaded once."""

from __future__ import annotations

import pytest
from ear.recogniser import Recogniser, why_missing

from warble_mlx import Warble, load


@pytest.fixture(scope="session")
def recogniser() -> Recogniser:
    missing = why_missing()
    if missing:
        pytest.skip(missing)
    return Recogniser()


@pytest.fixture(scope="session")
def bundled() -> Warble:
    return load()
