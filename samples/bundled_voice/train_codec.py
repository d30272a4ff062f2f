"""Stage 2: train the codec, or only its decoding half with the codes left as they are.

Phases by share of the time: a continuous bottleneck; codebooks set by k-means and then following
the data; from `adversary_at` on critics beside the spectral loss. Two throw-away heads read the
phoneme from the first book alone and the pitch from all books together, so that the codes carry
both: without them the pitch of the decoded speech has little to do with that of its source.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samples.bundled_voice import codec_net
from samples.bundled_voice.audio import roughened
from samples.bundled_voice.graphs import Averages, Step, adam, set_rate
from samples.bundled_voice.pool import PITCH_PER_FRAME, Pool
from samples.bundled_voice.progress import Budget, log
from samples.bundled_voice.settings import CLASSES, PITCH_BINS, Settings
from samples.bundled_voice.spectral import (
    Critics,
    SpectralLoss,
    critic_loss,
    feature_loss,
    fooling_loss,
)
from samples.bundled_voice.stored import load, save

_SPECTRAL, _COMMIT, _PHONE, _PITCH, _FOOL, _FEATURE = 3.0, 0.25, 0.6, 0.25, 0.35, 1.5
_ROUGHENED = 4  # one in so many rows has another loudness, a room or noise
_JUDGED = 2  # the critics, as dear as the codec itself, see one in so many rows
_AVERAGE, _CLIP, _DROP = 0.003, 5.0, 0.3
_SETTLE = 90  # batches; the rows keep 0.95 of themselves at each
_NAMES = (
    "spectral",
    "mel",
    "fine",
    "commit",
    "phone",
    "pitch",
    "critic",
    "fool",
    "feature",
    "norm",
)


@dataclass
class Batch:
    """Fixed tensors that a captured step reads."""

    sound: Tensor
    phone: Tensor
    pitch: Tensor


class Heads(nn.Module):
    """Linear readers of phoneme and pitch; thrown away after the training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.phone = nn.Linear(width, CLASSES)
        self.pitch = nn.Linear(width, PITCH_PER_FRAME * PITCH_BINS)


class CodecTraining:
    """State of one run; `run` trains until the seconds are over."""

    def __init__(
        self, settings: Settings, pool: Pool, device: torch.device, decoder_only: bool
    ) -> None:
        self.settings, self.pool, self.device = settings, pool, device
        self.decoder_only = decoder_only
        torch.manual_seed(1)
        self.rng = np.random.default_rng(1)
        self.codec = codec_net.Codec(settings.config).to(device)
        self.heads = Heads(settings.config["codec_latent_dim"]).to(device)
        self.spectral = SpectralLoss(settings.mel_bands, settings.fine_windows).to(device)
        self.critics = Critics(settings.discriminator_channels).to(device)
        self.critics.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch, frames = settings.codec_batch, settings.segment
        self.batch = Batch(
            torch.zeros(batch, frames * settings.config["codec_frame_size"], device=device),
            torch.zeros(batch, frames, CLASSES, device=device),
            torch.zeros(batch, frames * PITCH_PER_FRAME, dtype=torch.long, device=device),
        )
        self.weight = torch.zeros((), device=device)  # of the critics
        self.sums = torch.zeros(len(_NAMES), device=device)
        self.codes, self.given = torch.zeros(0), list[Tensor]()
        self.amp = {"device_type": device.type, "dtype": torch.bfloat16}
        self.amp["enabled"] = device.type == "cuda"  # type: ignore[assignment]

    def resume(self, path: Path) -> None:
        self.codec.load_state_dict(load(path))
        for book in self.codec.books():
            book.adopt()

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name; the others are frozen here."""
        if self.decoder_only:
            self.codec.requires_grad_(False)
            for module in self.codec.decoding_modules():
                module.requires_grad_(True)
        return {
            name: parameter
            for name, parameter in self.codec.named_parameters()
            if parameter.requires_grad
        }

    def losses(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decoded samples, commitment, phone and pitch losses."""
        batch = self.batch
        nothing = torch.zeros((), device=self.device)
        with torch.autocast(**self.amp):  # type: ignore[arg-type]
            if self.decoder_only:
                with torch.no_grad():
                    total = self.codec.quantised(self.codec.latent(batch.sound))[0]
                return self.codec.sounded(total).float(), nothing, nothing, nothing
            latent = self.codec.latent(batch.sound)
            total, self.codes, commit, semantic, self.given = self.codec.quantised(
                latent, train=True, drop=_DROP
            )
            made = self.codec.sounded(total)
            phone_logits = self.heads.phone(semantic).float().flatten(0, 1)
            pitch_logits = self.heads.pitch(total).float().reshape(-1, PITCH_BINS)
        phone = F.cross_entropy(phone_logits, batch.phone.flatten(0, 1))
        pitch = F.cross_entropy(pitch_logits, batch.pitch.flatten())
        return made.float(), commit, phone, pitch

    def step(self, adversarial: bool) -> None:
        sound = self.batch.sound
        made, commit, phone, pitch = self.losses()
        spectral, mel, fine = self.spectral(made, sound)
        loss = _SPECTRAL * spectral + _COMMIT * commit + _PHONE * phone + _PITCH * pitch
        judged = fool = feature = torch.zeros((), device=self.device)
        if adversarial:
            self.critics.requires_grad_(True)
            part = slice(0, None, _JUDGED)
            with torch.autocast(**self.amp):  # type: ignore[arg-type]
                real, fake = self.critics(sound[part]), self.critics(made[part].detach())
            judged = critic_loss(real, fake)
            self.critic_optimiser.zero_grad(set_to_none=True)
            judged.backward()
            torch.nn.utils.clip_grad_norm_(self.critics.parameters(), 10.0)
            self.critic_optimiser.step()
            self.critics.requires_grad_(False)
            with torch.autocast(**self.amp):  # type: ignore[arg-type]
                fake = self.critics(made[part])
            fool, feature = fooling_loss(fake), feature_loss(real, fake)
            loss = loss + self.weight * (_FOOL * fool + _FEATURE * feature)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.learning, _CLIP)
        self.optimiser.step()
        self.averages.update()
        values = (spectral, mel, fine, commit, phone, pitch, judged, fool, feature, norm)
        self.sums.add_(torch.stack([value.detach().float() for value in values]))

    def fit_books(self) -> None:
        """Set the codebooks by k-means on fresh latents."""
        rows = 40 if self.device.type == "cuda" else 4
        latents = []
        with torch.no_grad(), torch.autocast(**self.amp):  # type: ignore[arg-type]
            for _ in range(rows):
                sound = self.pool.drawn(len(self.batch.sound), self.settings.segment, self.rng)[0]
                latents.append(self.codec.latent(sound).float().flatten(0, 1))
        rest = torch.cat(latents)
        spreads = [float(rest.std(0).mean())]
        for book in self.codec.books():
            rest = book.fit(rest)
            spreads.append(float(rest.std(0).mean()))
        log("codebooks set; spread left after each: " + " ".join(f"{x:.3f}" for x in spreads))
        self.averages.restart()

    def settle_books(self) -> None:
        """Let the codebooks follow the averaged encoder, which is the one that is kept: rows that
        follow the encoder in training lie off its projections, and the decoder is given these."""
        self.codec.load_state_dict(self.codec.state_dict() | self.averages.state())
        for _ in range(_SETTLE):
            self.next_batch()
            with torch.no_grad(), torch.autocast(**self.amp):  # type: ignore[arg-type]
                self.codec.quantised(self.codec.latent(self.batch.sound), train=True)

    def next_batch(self) -> None:
        sound, phone, pitch = self.pool.drawn(
            len(self.batch.sound), self.settings.segment, self.rng
        )
        clean = len(sound) - -(-len(sound) // _ROUGHENED)
        self.batch.sound[:clean].copy_(sound[:clean])
        self.batch.sound[clean:].copy_(roughened(sound[clean:]))
        self.batch.phone.copy_(phone)
        self.batch.pitch.copy_(pitch)

    def run(self, budget: Budget, out: Path) -> int:
        """Train, write `out` now and then and at the end; returns the number of steps."""
        settings = self.settings
        parameters = self.trained()
        self.averages = Averages(parameters, _AVERAGE)
        heads = [] if self.decoder_only else list(self.heads.parameters())
        self.learning = [*parameters.values(), *heads]
        betas = (0.8, 0.99)
        groups: list[dict[str, object]] = [{"params": self.learning, "weight_decay": 1e-3}]
        self.optimiser = adam(groups, settings.codec_rate, betas, self.device)
        critics: list[dict[str, object]] = [{"params": list(self.critics.parameters())}]
        self.critic_optimiser = adam(critics, 3e-4, betas, self.device)
        fitted = self.codec.books()[0].fitted
        quantise_at = -1.0 if fitted else settings.quantise_at
        adversary_at = 0.04 if self.decoder_only else settings.adversary_at
        peak = settings.codec_rate * (0.75 if self.decoder_only else 1.0)
        steps, phase, first_adversarial = 0, -1, 0
        told = saved = time.monotonic()
        told_steps = 0
        run: Step | None = None
        while (share := budget.share(steps)) < 1:
            now_phase = 0 if share < quantise_at else 1 if share < adversary_at else 2
            if steps % 50 == 0 and not self.pool.full:
                self.pool.poll(30)
            set_rate(self.optimiser, peak * schedule(steps, share))
            self.next_batch()
            if now_phase != phase:
                if now_phase == 1 and not self.codec.books()[0].fitted:
                    self.fit_books()
                if now_phase == 2:
                    first_adversarial = steps
                phase, run, began = now_phase, None, time.monotonic()
                self.collected()
                adversarial = phase == 2
                run = Step(
                    lambda adversarial=adversarial: self.step(adversarial),  # type: ignore[misc]
                    [self.optimiser, self.critic_optimiser],
                    f"codec phase {phase}",
                )
                budget.excuse(began)
                self.sums.zero_()
                told, told_steps = time.monotonic(), steps
            if phase == 2:
                self.weight.fill_(min(1.0, (steps - first_adversarial) / 300))
            assert run is not None
            run()
            steps += 1
            if phase > 0 and not self.decoder_only and steps % 10 == 0 and share < 0.8:
                for book, given in zip(self.codec.books(), self.given, strict=True):
                    book.revive(given)
            now = time.monotonic()
            if now - told > settings.log_every:
                self.tell(steps, steps - told_steps, now - told, share)
                told, told_steps = now, steps
            if now - saved > settings.save_every:
                save(self.state(), out)
                saved = now
        if not self.decoder_only:
            self.settle_books()
        save(self.state(), out)
        log(f"codec done: {steps} steps in {budget.used():.0f} s")
        return steps

    def collected(self) -> None:
        """Drop what an earlier graph held."""
        self.codes, self.given = torch.zeros(0), []
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tell(self, steps: int, count: int, seconds: float, share: float) -> None:
        values = (self.sums / max(1, count)).tolist()
        self.sums.zero_()
        used = ""
        if self.codes.numel():
            used = " used " + " ".join(
                str(len(torch.unique(self.codes[:, i]))) for i in range(self.codes.shape[1])
            )
        told = " ".join(f"{name} {value:.3f}" for name, value in zip(_NAMES, values, strict=True))
        log(
            f"codec {steps} ({share:.0%}) {1000 * seconds / max(1, count):.0f} ms,"
            f" pool {self.pool.hours:.1f} h: {told}{used}"
        )
        if not all(map(math.isfinite, values)):
            raise RuntimeError("a loss of the codec is not finite")

    def state(self) -> dict[str, Tensor]:
        """Averaged weights with the codebooks as they are."""
        state = {
            name: value.detach().cpu().clone() for name, value in self.codec.state_dict().items()
        }
        state.update(self.averages.state())
        return state


def schedule(steps: int, share: float) -> float:
    """Rate over its peak: a short climb, level until 45 % of the time, then half a cosine."""
    level = min(1.0, (steps + 1) / 100)
    if share < 0.45:
        return level
    return level * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * (share - 0.45) / 0.55)))


def train_codec(
    settings: Settings,
    shards: Path,
    out: Path,
    budget: Budget,
    device: torch.device,
    *,
    resume: bool = False,
    decoder_only: bool = False,
    start: Path | None = None,
    wait: float = 120.0,
) -> int:
    """Train from `start`, from `out` if it is there and `resume`, or from nothing."""
    torch.backends.cudnn.benchmark = False  # its own choice is as good here, and at once
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    pool = Pool(shards, device, settings.hours)
    began = time.monotonic()
    while pool.poll() == 0:
        if time.monotonic() - began > wait:
            raise RuntimeError(f"{shards} has no shards: run the synthesis first")
        time.sleep(0.3)
    pool.report()
    training = CodecTraining(settings, pool, device, decoder_only)
    source = out if resume and out.exists() else start
    if source is not None:
        training.resume(source)
        log(f"codec goes on from {source}")
    return training.run(budget, out)
