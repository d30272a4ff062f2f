"""How far a long text is, drawn for a person at a terminal."""

from __future__ import annotations

from typing import TextIO

from tqdm import tqdm

from warble_mlx.reading import Plan, Progress
from warble_mlx.splitting import weight


class ProgressBar:
    """Pieces, seconds of audio, RTF and time left, while a person watches."""

    def __init__(
        self, plan: Plan, sample_rate: int, progress: Progress, out: TextIO | None
    ) -> None:
        self._weights = [weight(part.text) for part in plan.spoken]
        self._rate = sample_rate
        self._bar = tqdm(
            total=sum(self._weights),
            initial=sum(self._weights[: len(progress.pieces)]),
            file=out,
            disable=out is None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {desc}{remaining} left",
        )
        self._describe(progress)

    def _describe(self, progress: Progress) -> None:
        done, seconds = len(progress.pieces), 0.0
        if progress.pieces:
            seconds = progress.pieces[-1].samples[1] / self._rate
        rtf = f"RTF {progress.total_s / seconds:.2f}, " if seconds else ""
        self._bar.set_description_str(
            f"{done}/{len(self._weights)} pieces, {seconds:.0f} s of audio, {rtf}"
        )

    def update(self, progress: Progress) -> None:
        """Show how far it is."""
        self._describe(progress)
        self._bar.update(sum(self._weights[: len(progress.pieces)]) - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
