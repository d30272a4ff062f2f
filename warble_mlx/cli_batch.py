"""`warble batch`: many texts into many files."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from warble_mlx.cli_base import (
    Number,
    debug_option,
    is_terminal,
    model_option,
    offline_option,
    option,
    say_so,
)
from warble_mlx.cli_sampling import normalise_option, retry_option, sampling_options
from warble_mlx.options import MAX_SEED

FAILED_STATUS = 5  # some rows have no file
DEFAULT_ROWS = 8
FORMATS = ("wav", "flac", "mp3", "ogg")


@click.command()
@click.argument("source", metavar="IN.jsonl")
@click.argument("out", metavar="OUT/")
@model_option
@option("-v", "--voice", metavar="VOICE", help="Voice of rows that name none.")
@option(
    "--seed",
    metavar="N",
    type=Number(0, MAX_SEED, kind=int),
    default=0,
    show_default=True,
    help="What the seeds of rows without one follow from, together with their ids.",
)
@sampling_options
@option("--max-seconds", metavar="X", type=Number(0, above=True), help="Longest speech of a row.")
@retry_option
@normalise_option
@option("--pause", metavar="X", type=Number(0, 60), help="Seconds between sentences of long rows.")
@option(
    "--rows",
    metavar="N",
    type=Number(1, 4096, kind=int),
    default=DEFAULT_ROWS,
    show_default=True,
    help="Rows spoken at once by each process.",
)
@option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    default="wav",
    show_default=True,
    help="Format of the files.",
)
@option("--resume", is_flag=True, help="Go on: leave out rows whose file is complete.")
@option("--allow-truncated", is_flag=True, help="Keep speech that max_seconds has cut.")
@offline_option
@debug_option
@click.pass_context
def batch(
    ctx: click.Context,
    source: str,
    out: str,
    model: str | None,
    voice: str | None,
    seed: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    greedy: bool,
    max_seconds: float | None,
    retry: int,
    normalise: bool,
    pause: float | None,
    rows: int,
    kind: str,
    resume: bool,
    allow_truncated: bool,
    offline: bool,
) -> None:
    """Speak every row of IN.jsonl into OUT/ID.wav.

    A row is a JSON object on a line: {"id": "a1", "text": "Hello."}, and if wanted voice, or
    reference_audio with reference_text, seed, temperature, top_p, top_k, greedy, max_seconds,
    retry, normalise, pause. Writes OUT/manifest.jsonl and OUT/failures.jsonl. The exit status is
    0 only if every row has a file, and 5 if some have none.

    \b
      warble batch book.jsonl book/ -v robin --rows 16
      mlx.launch --hosts a,b warble batch book.jsonl book/
    """
    import warble_mlx

    given = {
        "voice": voice,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_seconds": max_seconds,
        "pause_s": pause,
    }
    defaults = {name: value for name, value in given.items() if value is not None}
    defaults |= {"seed": seed, "greedy": greedy, "retry": retry, "normalise": normalise}
    warble = warble_mlx.load(model, offline=offline)
    from warble_mlx.batch.run import run_batch

    try:
        done = run_batch(
            warble,
            Path(source),
            Path(out),
            rows=rows,
            kind=kind,
            resume=resume,
            keep_cut=allow_truncated,
            defaults=defaults,
            tell=say_so,
            bar=sys.stderr if is_terminal(sys.stderr) else None,
        )
    except KeyboardInterrupt:
        say_so("what is finished is kept: the same command with --resume goes on from there")
        raise
    if not done.rank:
        every = done.good + len(done.failures)
        rtf = f" (RTF {done.took_s / done.seconds:.2f})" if done.seconds else ""
        kept = f", {done.kept} of them from before" if done.kept else ""
        click.echo(
            f"{done.good} of {every} rows are good{kept}; {done.seconds:.2f} s of speech in"
            f" {done.took_s:.2f} s{rtf} -> {out}",
            err=True,
        )
        if done.failures:
            many = len(done.failures)
            say_so(f"{many} row{'s' if many > 1 else ''} failed: {Path(out) / 'failures.jsonl'}")
    if done.failures:
        ctx.exit(FAILED_STATUS)
