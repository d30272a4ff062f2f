"""Sizes of the model and of the training; one set for real, one small enough for a CPU test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SAMPLE_RATE = 44_100
FRAME = 2048  # samples of one codec frame
CLASSES = 178  # phoneme ids of Kokoro
PITCH_BINS = 64  # 0 is unvoiced; 1..63 lie evenly on a logarithmic scale
LOWEST_HZ, HIGHEST_HZ = 50.0, 550.0

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|voice|>",
    *(f"<|speaker:{number}|>" for number in range(6)),
]
FIRST_SPECIAL = 256  # ids 0..255 are bytes
FIRST_SEMANTIC = FIRST_SPECIAL + len(SPECIAL_TOKENS)


def model_config(**changes: Any) -> dict[str, Any]:
    """config.json of the checkpoint; `changes` override sizes."""
    config: dict[str, Any] = {
        "architectures": ["ArkttsForConditionalGeneration"],
        "model_type": "arktts",
        "dim": 256, "n_layer": 8, "n_head": 4, "n_local_heads": 2, "head_dim": 64,
        "intermediate_size": 768, "max_seq_len": 1024, "rope_base": 10000.0, "norm_eps": 1e-6,
        "attention_qkv_bias": True, "attention_qk_norm": False, "attention_o_bias": False,
        "tie_word_embeddings": True, "codebook_size": 1024, "num_codebooks": 10, "n_fast_layer": 3,
        "fast_dim": 256, "fast_n_head": 4, "fast_n_local_heads": 2, "fast_head_dim": 64,
        "fast_intermediate_size": 768, "fast_attention_qkv_bias": False,
        "fast_attention_qk_norm": False, "fast_attention_o_bias": False,
        "norm_fastlayer_input": True, "codec_filename": "codec.safetensors",
        "codec_sample_rate": SAMPLE_RATE, "codec_frame_size": FRAME, "codec_encoder_dim": 16,
        "codec_encoder_transformer_layers": [0, 0, 0, 0], "codec_encoder_window_size": 512,
        "codec_latent_dim": 192, "codec_decoder_dim": 256, "codec_codebook_dim": 8,
        "codec_semantic_codebook_size": 1024, "codec_residual_codebook_size": 1024,
        "codec_window_size": 32, "codec_pre_n_layer": 2, "codec_pre_n_head": 3,
        "codec_pre_n_local_heads": 3, "codec_pre_intermediate_size": 512, "codec_post_n_layer": 2,
        "codec_post_n_head": 3, "codec_post_n_local_heads": 1, "codec_post_intermediate_size": 384,
        "ras_window_size": 10, "ras_temperature": 1.0, "ras_top_p": 0.9, "sample_rate": SAMPLE_RATE,
        "semantic_token_template": "<|semantic:{}|>", "dtype": "bfloat16",
    }  # fmt: skip
    config.update(changes)
    codes = config["codebook_size"]
    unpadded = FIRST_SEMANTIC + codes
    config.update(
        vocab_size=-(-unpadded // 64) * 64,
        semantic_begin_id=FIRST_SEMANTIC,
        semantic_end_id=FIRST_SEMANTIC + codes - 1,
        eos_token_id=FIRST_SPECIAL + SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=FIRST_SPECIAL,
    )
    return config


@dataclass(frozen=True)
class Settings:
    """All that a stage needs to know besides its folder, its device and its seconds."""

    config: dict[str, Any] = field(default_factory=model_config)
    hours: float = 90.0  # of audio kept on the device, 173 MB each
    segment: int = 32  # codec frames of a training segment
    codec_batch: int = 16
    codec_rate: float = 8e-4
    quantise_at: float = 0.2  # shares of the codec's time at which its phases begin
    adversary_at: float = 0.5
    mel_bands: tuple[tuple[int, int], ...] = ((256, 24), (512, 40), (1024, 64), (2048, 96))
    fine_windows: tuple[int, ...] = (2048, 4096)
    discriminator_channels: int = 32
    ar_tokens: int = 49_152
    ar_rate: float = 1.8e-3
    ar_lengths: tuple[int, ...] = (112, 136, 168, 208, 272, 352, 480, 640)
    ar_held_out: int = 50  # every so-manieth line of the corpus is not trained on
    encode_frames: int = 24_576
    takes: int = 2  # of every sentence, begun at different parts of a frame
    loader_workers: int = 8
    log_every: float = 6.0  # seconds
    save_every: float = 45.0


FULL = Settings()

SMOKE = replace(
    FULL,
    config=model_config(
        dim=64, n_layer=2, n_head=2, n_local_heads=1, intermediate_size=128, n_fast_layer=1,
        fast_dim=64, fast_n_head=2, fast_n_local_heads=1, fast_intermediate_size=128,
        codebook_size=64, codec_encoder_dim=4, codec_latent_dim=64, codec_decoder_dim=32,
        codec_semantic_codebook_size=64, codec_residual_codebook_size=64, codec_pre_n_layer=1,
        codec_pre_n_head=1, codec_pre_n_local_heads=1, codec_pre_intermediate_size=64,
        codec_post_n_layer=1, codec_post_n_head=2, codec_post_n_local_heads=1,
        codec_post_intermediate_size=64,
    ),
    hours=0.2,
    segment=4,
    codec_batch=2,
    discriminator_channels=4,
    mel_bands=((512, 24), (1024, 40)),
    fine_windows=(2048,),
    ar_tokens=1024,
    ar_held_out=4,
    encode_frames=256,
    loader_workers=0,
    log_every=1.0,
)  # fmt: skip

SIZES = {"full": FULL, "smoke": SMOKE}
