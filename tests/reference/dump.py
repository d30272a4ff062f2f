"""Write what the reference engine computes from a checkpoint into a dump for `warble verify`.

    cd tests
    python -m reference.dump CHECKPOINT OUT.safetensors [--dtype bfloat16] [--device cuda]

CHECKPOINT is a folder in the published layout, or a bundle of this package, whose quantised weights
are taken as what they stand for. Needs PyTorch, msgspec, numpy, tokenizers; not MLX.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from reference.bundle import load_bundle_codec, read_bundle_model
from reference.codec import Codec
from reference.generate import Noise, Result, Trace, generate, pad_left
from reference.load import codec_file, dual_ar, load_codec, read_model
from reference.prompt import Prompts
from reference.record import CodecRun, hashes, record
from reference.sampling import Sampling
from reference.transformer import DualAR
from warble_mlx.config import read_config, read_config_json
from warble_mlx.safetensors_file import read_header
from warble_mlx.verify.dump import write_dump

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ReferenceEngine:
    """This folder's engine as `record` sees it. `packed`: its weights had been quantised."""

    name = "the PyTorch reference engine"

    def __init__(
        self,
        model: DualAR,
        codec: Codec | None = None,
        prompts: Prompts | None = None,
        *,
        codec_dtype: str | None = None,
        packed: bool = False,
    ) -> None:
        self.model, self.codec, self.prompts = model, codec, prompts
        self.config = model.config
        self.versions = {"torch": str(torch.__version__)}
        self.device = str(model.embeddings.weight.device)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.tf32 = tf32_allowed()
        self.packed = packed
        self.codec_dtype = codec_dtype if codec is not None else None

    def rope(self) -> tuple[Tensor, Tensor]:
        """The tables in use."""
        return self.model.slow_rope, self.model.fast_rope

    def prompt(self, text: str, reference_text: str | None, codes: Tensor | None) -> Tensor:
        """Columns [11, T]."""
        assert self.prompts is not None
        return self.prompts.build(text, reference_text, codes)

    @torch.no_grad()
    def prompt_pass(self, columns: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Embedding and layer outputs of a prompt [11, T]."""
        columns = columns[None].to(self.device)
        length = columns.shape[2]
        x, outputs = self.model.embed(columns), []
        at = torch.arange(length, device=self.device)
        keys = torch.ones(1, length, dtype=torch.bool, device=self.device)
        caches = self.model.slow_caches(1, length)
        self.model.advance(x, at, at[None], keys, caches, outputs)
        return x[0], [out[0] for out in outputs]

    def run(
        self,
        prompts: list[Tensor],
        frames: int,
        settings: Sampling | None,
        noise: Noise | None,
    ) -> tuple[Result, Trace]:
        """Generate for prompts [11, T_i] in one batch."""
        columns, mask = pad_left([p.to(self.device) for p in prompts], self.config.pad_token_id)
        if noise is not None:
            noise = Noise(*(part.to(self.device) for part in noise))
        trace = Trace()
        return generate(self.model, columns, mask, frames, settings, noise, trace=trace), trace

    @torch.no_grad()
    def decode(self, codes: Tensor) -> CodecRun:
        """Codes [10, F] to samples, with the stages between."""
        assert self.codec is not None
        summed = self.codec.dequantise(codes[None].to(self.device))
        latents = self.codec.latents(summed)
        return CodecRun(summed[0].T, latents[0].T, self.codec.wave(latents)[0])

    def encode(self, wave: Tensor) -> tuple[Tensor, Tensor] | None:
        """Samples [N] to codes and margins [10, F]."""
        assert self.codec is not None
        if not self.codec.can_encode:
            return None
        encoded = self.codec.encode(wave[None].to(self.device))
        return encoded.codes[0], encoded.margins[0]


def tf32_allowed() -> bool:
    """Whether float32 products may be rounded on this process's GPU."""
    if not torch.cuda.is_available():
        return False
    return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32


def forbid_tf32() -> None:
    """Compute float32 products in float32. To be called first."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def open_engine(folder: Path, dtype: str = "float32", device: str = "cpu") -> ReferenceEngine:
    """The engine for a checkpoint or a bundle, with codec and tokenizer if they are there."""
    config = read_config(folder)
    is_bundle = (folder / "codec_decoder.safetensors").is_file()
    packed = "quantization" in read_config_json(folder)
    weights = read_bundle_model(folder) if is_bundle else read_model(folder)
    model = dual_ar(config, weights, DTYPES[dtype], device)
    codec = load_bundle_codec(folder, device) if is_bundle else load_codec(folder, device)
    has_prompts = (folder / "tokenizer.json").is_file()
    return ReferenceEngine(
        model,
        codec,
        Prompts(folder, config) if has_prompts else None,
        codec_dtype=stored_codec_dtype(folder),
        packed=packed,
    )


def stored_codec_dtype(folder: Path) -> str | None:
    """Of the codec's file; a .pth holds float32."""
    path = folder / "codec_decoder.safetensors"
    if not path.is_file():
        found = codec_file(folder, read_config(folder))
        if found is None:
            return None
        path = found
    if path.suffix != ".safetensors":
        return "float32"
    kinds = {entry.dtype for entry in read_header(path).entries.values()}
    return STORED[min(kinds - {"F32"}, default="F32")]


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of the programs that make a dump."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--frames", type=int, default=48, help="of each greedy utterance")
    return parser.parse_args()


def main() -> None:
    """The command."""
    args = arguments(__doc__)
    forbid_tf32()
    engine = open_engine(args.checkpoint, args.dtype, args.device)
    write_dump(args.out, record(engine, frames=args.frames, checkpoint=hashes(args.checkpoint)))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
