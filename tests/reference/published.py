"""The published remote code as `record` sees it, and a dump of what it computes.

    cd tests && python -m reference.published CHECKPOINT OUT.safetensors [--dtype bfloat16]

CHECKPOINT is a folder with the published Python files beside the weights. They run as they are:
what is kept is picked up by forward hooks and by wrapping one of their methods, and sampled numbers
are handed out in place of `torch.rand`. `reference.published_environment` makes an environment with
the one release of transformers that is known to load them rightly.

Written against commit 14468db of the published source (classes ArkttsModel, ArkttsProcessor), which
was read but not run: what was run is a stand-in with the same interface, through transformers'
loader, where 4.57.5 gave a dump that `warble verify` passes and 5.17.0 was refused for its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from reference.codec import Codec
from reference.dump import DTYPES, arguments, forbid_tf32, stored_codec_dtype, tf32_allowed
from reference.generate import Noise, Result, Trace
from reference.load import load_codec
from reference.record import CodecRun, hashes, record
from reference.rope import rope_table
from reference.sampling import Sampling
from warble_mlx.config import ModelConfig, read_config
from warble_mlx.verify.dump import write_dump

TRANSFORMERS = "4.57.5"
ADVICE = (
    f"Install the release that the published code was written for: pip install"
    f" 'transformers=={TRANSFORMERS}' (or run python -m reference.published_environment, which"
    " makes an environment of its own)"
)
# transformers 5 fills the tables with whatever the memory holds. One bfloat16 step is allowed: a
# table computed on another device may round the other way.
ROPE_STEP = 2.0**-7
NEEDED = ("freqs_cis", "fast_freqs_cis", "layers", "norm", "fast_output", "_slow_step", "generate")


class Refused(Exception):
    """The published code, as loaded here, must not be dumped."""


class PublishedEngine:
    """The published model, processor and codec. Without a processor there are no texts, without a
    codec (`codec` is the reference engine's, for margins) no codec part."""

    name = "the published remote code"

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig,
        processor: Callable[..., Any] | None = None,
        codec: Codec | None = None,
        codec_dtype: str | None = None,
    ) -> None:
        self._model: Any = model
        self._processor, self._codec = processor, codec
        self.config = config
        weight = next(model.parameters())
        self.device = str(weight.device)
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.tf32 = tf32_allowed()
        self.packed = False
        self.codec_dtype = codec_dtype if codec is not None else None
        self.versions = {"torch": str(torch.__version__), "transformers": transformers_version()}
        self.check()

    # ------------------------------------------------------------------ what is refused

    def check(self) -> None:
        """Raise Refused unless the interface is the known one, the RoPE tables are cosines and
        sines, and the scores of a short prompt are finite."""
        absent = [name for name in NEEDED if not hasattr(self._model, name)]
        if absent:
            raise Refused(
                f"{type(self._model).__name__} has no {', '.join(absent)}: this is another release"
                " of the published code than the adapter was written for (commit 14468db)"
            )
        c = self.config
        for what, table, length, stack in (
            ("freqs_cis", self._model.freqs_cis, c.max_seq_len, c.slow),
            ("fast_freqs_cis", self._model.fast_freqs_cis, c.num_codebooks, c.fast),
        ):
            check_table(what, table, rope_table(length, stack.head_dim, stack.rope_base))
        columns = torch.zeros(c.num_codebooks + 1, 8, dtype=torch.long)
        columns[0] = torch.arange(8)
        _, trace = self.run([columns], 1, None, None)
        scores = [*trace.semantic_logits, *trace.fast_logits]
        if not all(torch.isfinite(x).all() for x in scores):
            raise Refused(
                f"the scores are not finite with transformers {transformers_version()}, so every"
                f" code would be garbage. {ADVICE}"
            )

    # ------------------------------------------------------------------ what is recorded

    def rope(self) -> tuple[Tensor, Tensor]:
        """The tables in use."""
        return self._model.freqs_cis, self._model.fast_freqs_cis

    def prompt(self, text: str, reference_text: str | None, codes: Tensor | None) -> Tensor:
        """Columns [11, T] from what the published processor returns."""
        assert self._processor is not None
        more = {} if codes is None else {"reference_text": reference_text, "reference_codes": codes}
        made = self._processor(text=text, **more)
        parts = [made["prefix_input_ids"][0], made["suffix_input_ids"][0]]
        before, after = (self._columns(ids) for ids in parts)
        if codes is None:
            return torch.cat([before, after], dim=1)
        frames = torch.cat([codes[:1] + self.config.semantic_begin_id, codes])
        return torch.cat([before, frames, after], dim=1)

    def _columns(self, ids: Tensor) -> Tensor:
        columns = torch.zeros(self.config.num_codebooks + 1, len(ids), dtype=torch.long)
        columns[0] = ids
        return columns

    @torch.no_grad()
    def prompt_pass(self, columns: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Embedding and layer outputs of a prompt [11, T], by the plain forward."""
        for layer in self._model.layers:  # left there by generate, and in the way of forward
            layer.attention.kv_cache = None
        seen: list[Tensor] = []
        with hooked(
            list(self._model.layers),
            lambda args, output: seen.extend([args[0], output] if not seen else [output]),
        ):
            self._model(input_ids=columns[None].to(self.device))
        return seen[0][0], [x[0] for x in seen[1:]]

    def run(
        self,
        prompts: list[Tensor],
        frames: int,
        settings: Sampling | None,
        noise: Noise | None,
    ) -> tuple[Result, Trace]:
        """Generate for one prompt [11, T]."""
        (columns,) = prompts
        model, c = self._model, self.config
        trace, scores = Trace(), list[Tensor]()
        rows = [*range(c.semantic_begin_id, c.semantic_end_id + 1), c.eos_token_id]
        slow_step = model._slow_step

        def recorded(*args: Any, **kwargs: Any) -> Any:
            logits, entry = slow_step(*args, **kwargs)
            trace.semantic_logits.append(logits[:, rows].float())
            return logits, entry

        def keep_norm(args: tuple[Tensor, ...], output: Tensor) -> None:
            trace.hidden.append(args[0][:, -1])
            trace.normed.append(output[:, -1])

        sampled = {} if settings is None else settings._asdict()
        with (
            patch.object(model, "_slow_step", recorded),
            hooked([model.norm], keep_norm),
            hooked([model.fast_output], lambda _, output: scores.append(output[:, -1].float())),
            handed_out(noise, rows, c.vocab_size),
        ):
            made = model.generate(
                input_ids=columns[None].to(self.device),
                attention_mask=torch.ones(1, columns.shape[1], dtype=torch.long),
                max_new_tokens=frames,
                do_sample=settings is not None,
                return_dict_in_generate=True,
                **sampled,
            )
        for first in range(0, len(scores), c.num_codebooks):  # the first of each ten is discarded
            trace.fast_logits.append(
                torch.stack(scores[first + 1 : first + c.num_codebooks], dim=1)
            )
        return Result(made.codes, made.code_lengths.tolist(), made.finished.tolist()), trace

    def decode(self, codes: Tensor) -> CodecRun:
        """Codes [10, F] to samples. On the CPU, where the published code uses float32."""
        codec = self._model.load_codec(device="cpu")
        stages: list[Tensor] = []
        with hooked(
            [codec.quantizer.post_module, codec.decoder], lambda args, _: stages.append(args[0])
        ):
            wave, _ = self._model.decode_audio(codes[None].cpu())
        return CodecRun(stages[0][0].T, stages[1][0].T, wave[0])

    def encode(self, wave: Tensor) -> tuple[Tensor, Tensor] | None:
        """Samples [N] to codes; margins by the reference engine, from the published latents."""
        assert self._codec is not None
        codec = self._model.load_codec(device="cpu")
        latents: list[Tensor] = []
        with hooked([codec.quantizer.pre_module], lambda _, output: latents.append(output)):
            codes, _ = self._model.encode_audio(wave[None, None], torch.tensor([len(wave)]))
        with torch.no_grad():
            _, margins = self._codec.quantise(latents[0])
        return codes[0], margins[0]


def check_table(name: str, table: Tensor, closed: Tensor) -> None:
    """Raise Refused unless a RoPE table [positions, h / 2, 2] is the closed form's."""
    found = table.detach().float().cpu()
    if found.shape != closed.shape:
        raise Refused(
            f"{name} has the shape {list(found.shape)}, config.json says {list(closed.shape)}"
        )
    wrong = ~((found - closed).abs() <= ROPE_STEP)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise Refused(
            f"the RoPE table {name} is wrong in {int(wrong.sum())} of {wrong.numel()} entries (at"
            f" {list(at)}: {found[at]:.3g} instead of {closed[at]:.3g}), as transformers 5 leaves"
            f" it; this is transformers {transformers_version()}. {ADVICE}"
        )


def transformers_version() -> str:
    """Of the installed library, `absent` without one."""
    from importlib import metadata

    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return "absent"


@contextmanager
def hooked(
    modules: list[nn.Module], keep: Callable[[tuple[Tensor, ...], Tensor], object]
) -> Iterator[None]:
    """Call keep(args, output) after every forward of `modules`."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        keep(args, output)

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def handed_out(noise: Noise | None, rows: list[int], vocabulary: int) -> Iterator[None]:
    """Let `torch.rand` return the given uniforms: per frame two over the vocabulary, of which only
    `rows` can ever be chosen, then nine over a codebook."""
    if noise is None:
        yield
        return

    def draws() -> Iterator[Tensor]:
        for semantic, codes in zip(noise.semantic, noise.codes, strict=True):
            for row in semantic:
                whole = torch.full((*row.shape[:-1], vocabulary), 0.5)
                whole[..., rows] = row
                yield whole
            yield from codes

    left = draws()

    def rand(shape: Any, *, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        drawn = next(left, None)
        if drawn is None or tuple(drawn.shape) != tuple(shape):
            raise Refused(
                f"the published code drew numbers of shape {list(shape)} where"
                f" {None if drawn is None else list(drawn.shape)} was expected: this is another"
                " release than the adapter was written for (commit 14468db)"
            )
        return drawn.to(device=device, dtype=dtype)

    with patch("torch.rand", rand):
        yield


def open_published(folder: Path, dtype: str, device: str) -> PublishedEngine:
    """Load a checkpoint through transformers. Raises Refused."""
    try:
        from transformers import AutoModel, AutoProcessor
    except ImportError as error:
        raise Refused(f"transformers is not installed. {ADVICE}") from error
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=DTYPES[dtype])
    model = model.eval().to(device)
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    codec = load_codec(folder)
    return PublishedEngine(model, read_config(folder), processor, codec, stored_codec_dtype(folder))


def main() -> None:
    """The command."""
    args = arguments(__doc__)
    forbid_tf32()
    try:
        engine = open_published(args.checkpoint, args.dtype, args.device)
        dump = record(engine, frames=args.frames, checkpoint=hashes(args.checkpoint))
    except Refused as error:
        raise SystemExit(f"no dump was made: {error}") from error
    write_dump(args.out, dump)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
