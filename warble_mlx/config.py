"""Model dimensions, read from config.json and checked before anything is allocated.

Field names are those of the published checkpoint. Fields that a checkpoint leaves out take the
published model's value; codec geometry that contradicts the tensors is caught where the tensors
are read (`warble_mlx.convert`, `warble_mlx.weights`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from warble_mlx.errors import CheckpointError

ENCODER_STRIDES = (2, 4, 8, 8)
DECODER_STRIDES = (8, 8, 4, 2)
RESAMPLE_STRIDES = (2, 2)  # of the quantiser, between latents and frames
CODEC_HEAD_DIM = 64
CODEC_ROPE_BASE = 10000.0
CODEC_NORM_EPS = 1e-5
NUM_CODEBOOKS = 10
MAX_SIZE = 1 << 24  # no dimension of a sane config comes near it


class TransformerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of one stack of transformer blocks."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn: int
    rope_base: float
    norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_rows(self) -> int:
        """Rows of the joint projection: queries, then keys, then values."""
        return (self.n_head + 2 * self.n_kv_head) * self.head_dim


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of an arktts checkpoint or bundle. Unknown fields are ignored."""

    model_type: str
    vocab_size: int
    dim: int
    n_layer: int
    n_head: int
    n_local_heads: int
    head_dim: int
    intermediate_size: int
    max_seq_len: int
    codebook_size: int
    semantic_begin_id: int
    semantic_end_id: int
    eos_token_id: int
    pad_token_id: int
    n_fast_layer: int
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    num_codebooks: int = NUM_CODEBOOKS
    attention_qkv_bias: bool = True
    attention_qk_norm: bool = False
    attention_o_bias: bool = False
    tie_word_embeddings: bool = True
    norm_fastlayer_input: bool = True
    fast_dim: int | None = None
    fast_n_head: int | None = None
    fast_n_local_heads: int | None = None
    fast_head_dim: int | None = None
    fast_intermediate_size: int | None = None
    fast_attention_qkv_bias: bool = False
    fast_attention_qk_norm: bool = False
    fast_attention_o_bias: bool = False
    ras_window_size: int = 10
    ras_temperature: float = 1.0
    ras_top_p: float = 0.9
    codec_filename: str = "codec.pth"
    codec_sample_rate: int = 44100
    codec_frame_size: int = 2048
    codec_encoder_dim: int = 64
    codec_encoder_transformer_layers: tuple[int, int, int, int] = (0, 0, 0, 4)
    codec_encoder_window_size: int = 512
    codec_latent_dim: int = 1024
    codec_decoder_dim: int = 1536
    codec_codebook_dim: int = 8
    codec_semantic_codebook_size: int = 4096
    codec_residual_codebook_size: int = 1024
    codec_window_size: int = 128
    codec_pre_n_layer: int = 8
    codec_pre_n_head: int = 16
    codec_pre_n_local_heads: int = 16
    codec_pre_intermediate_size: int = 3072
    codec_post_n_layer: int = 8
    codec_post_n_head: int = 16
    codec_post_n_local_heads: int = 8
    codec_post_intermediate_size: int = 1216

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    @property
    def slow(self) -> TransformerConfig:
        """The slow AR: one step per frame."""
        return TransformerConfig(
            dim=self.dim,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_kv_head=self.n_local_heads,
            head_dim=self.head_dim,
            ffn=self.intermediate_size,
            rope_base=self.rope_base,
            norm_eps=self.norm_eps,
            qkv_bias=self.attention_qkv_bias,
            o_bias=self.attention_o_bias,
            qk_norm=self.attention_qk_norm,
        )

    @property
    def fast(self) -> TransformerConfig:
        """The fast AR: ten positions inside a frame. Absent dimensions are those of the slow AR."""

        def own(value: int | None, shared: int) -> int:
            return shared if value is None else value

        return TransformerConfig(
            dim=own(self.fast_dim, self.dim),
            n_layer=self.n_fast_layer,
            n_head=own(self.fast_n_head, self.n_head),
            n_kv_head=own(self.fast_n_local_heads, self.n_local_heads),
            head_dim=own(self.fast_head_dim, self.head_dim),
            ffn=own(self.fast_intermediate_size, self.intermediate_size),
            rope_base=self.rope_base,
            norm_eps=self.norm_eps,
            qkv_bias=self.fast_attention_qkv_bias,
            o_bias=self.fast_attention_o_bias,
            qk_norm=self.fast_attention_qk_norm,
        )

    def codec_transformer(self, where: str) -> TransformerConfig:
        """Window transformer of the codec: `pre` or `post` (in the quantiser), or `encoder.<i>`
        with i in 1..4 (at the end of that encoder block)."""
        if where.startswith("encoder."):
            block = int(where.removeprefix("encoder."))
            dim = self.codec_encoder_dim * 2**block
            layers = self.codec_encoder_transformer_layers[block - 1]
            heads = kv_heads = dim // CODEC_HEAD_DIM
            ffn = 3 * dim
        else:
            dim = self.codec_latent_dim
            layers, heads, kv_heads, ffn = {
                "pre": (
                    self.codec_pre_n_layer,
                    self.codec_pre_n_head,
                    self.codec_pre_n_local_heads,
                    self.codec_pre_intermediate_size,
                ),
                "post": (
                    self.codec_post_n_layer,
                    self.codec_post_n_head,
                    self.codec_post_n_local_heads,
                    self.codec_post_intermediate_size,
                ),
            }[where]
        return TransformerConfig(
            dim=dim,
            n_layer=layers,
            n_head=heads,
            n_kv_head=kv_heads,
            head_dim=CODEC_HEAD_DIM,
            ffn=ffn,
            rope_base=CODEC_ROPE_BASE,
            norm_eps=CODEC_NORM_EPS,
        )

    @property
    def frame_rate_hz(self) -> float:
        """Frames per second of audio (21.533 for the published codec)."""
        return self.codec_sample_rate / self.codec_frame_size

    @property
    def head_rows(self) -> int:
        """Rows of the output head that can be sampled: the semantic tokens, then EOS."""
        return self.codebook_size + 1


def _problems(c: ModelConfig) -> list[str]:
    if c.model_type != "arktts":
        return [f'model_type is "{c.model_type}", but only "arktts" (Audio8 TTS, Warble) is known']
    sizes = {n: getattr(c, n) for n in c.__struct_fields__ if type(getattr(c, n)) is int}
    may_be_zero = {"eos_token_id", "pad_token_id", "semantic_begin_id", "ras_window_size"}
    found = [
        f"{name} is {value}, which is not a usable size"
        for name, value in sizes.items()
        if not (0 if name in may_be_zero else 1) <= value <= MAX_SIZE
    ]
    if found:
        return found
    for prefix, t in (("", c.slow), ("fast_", c.fast)):
        if t.n_head % t.n_kv_head:
            found.append(f"{prefix}n_head {t.n_head} is no multiple of {t.n_kv_head} KV heads")
        if t.head_dim % 2:
            found.append(f"{prefix}head_dim {t.head_dim} is odd, RoPE needs pairs")
    if c.num_codebooks != NUM_CODEBOOKS:
        found.append(f"num_codebooks is {c.num_codebooks}, this graph has {NUM_CODEBOOKS}")
    if c.semantic_end_id - c.semantic_begin_id + 1 != c.codebook_size:
        found.append(
            f"semantic ids {c.semantic_begin_id}..{c.semantic_end_id} are not"
            f" codebook_size = {c.codebook_size} ids"
        )
    for name in ("semantic_end_id", "eos_token_id", "pad_token_id"):
        if getattr(c, name) >= c.vocab_size:
            found.append(f"{name} {getattr(c, name)} is outside vocab_size {c.vocab_size}")
    if c.semantic_begin_id <= c.eos_token_id <= c.semantic_end_id:
        found.append(f"eos_token_id {c.eos_token_id} lies among the semantic ids")
    if not c.tie_word_embeddings:
        found.append("tie_word_embeddings is false, but this graph has no separate output head")
    hop = 1
    for stride in (*DECODER_STRIDES, *RESAMPLE_STRIDES):
        hop *= stride
    if c.codec_frame_size != hop:
        found.append(f"codec_frame_size is {c.codec_frame_size}, the codec's strides give {hop}")
    if c.codec_decoder_dim % 2 ** len(DECODER_STRIDES):
        found.append(f"codec_decoder_dim {c.codec_decoder_dim} cannot be halved four times")
    return found


def parse_config(raw: bytes | str, where: str) -> ModelConfig:
    """Read a config from JSON text. `where` names the file in errors.

    Raises CheckpointError for broken JSON, missing or mistyped fields and contradictions.
    """
    try:
        return msgspec.json.decode(raw, type=ModelConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def read_config(folder: Path) -> ModelConfig:
    """Read and check `folder`/config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is no model folder")
    return parse_config(path.read_bytes(), str(path))


def read_config_json(folder: Path) -> dict[str, Any]:
    """The whole of config.json as a dictionary, unknown fields included."""
    path = folder / "config.json"
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}. Correct it, or fetch it again") from error
    return raw
