"""How far a stage is, and lines with the time of day to read several stages side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@dataclass
class Budget:
    """Seconds that a training may take, or steps where it is to be the same on any machine.

    spent: seconds of earlier runs that this one goes on from. Compiling and capturing stand
    outside of it (`excuse`): on one machine they took the whole of the codec's first phase.
    """

    seconds: float
    steps: int | None = None
    spent: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def used(self) -> float:
        return self.spent + time.monotonic() - self.started

    def excuse(self, since: float) -> None:
        """Do not count what passed since that moment of the monotonic clock."""
        self.started += time.monotonic() - since

    def share(self, done: int) -> float:
        """What part is over after `done` steps; 1 or more means stop."""
        if self.steps is not None:
            return done / self.steps
        return self.used() / self.seconds
