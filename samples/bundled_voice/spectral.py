"""What the codec is trained against: spectra at several scales, and critics that learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samples.bundled_voice.settings import SAMPLE_RATE

HIGHEST = 11_800.0  # hertz; the source has nothing above 12 kHz
_VOICE = 1_600.0  # below this the harmonics of a voice are told apart


def mel_bank(window: int, bands: int, highest: float) -> Tensor:
    """Triangles on the mel scale: [bands, window / 2 + 1]."""
    top = 2595 * torch.log10(torch.tensor(1 + highest / 700))
    points = 700 * (10 ** (torch.linspace(0, float(top), bands + 2) / 2595) - 1)
    hertz = torch.linspace(0, SAMPLE_RATE / 2, window // 2 + 1)
    low, centre, high = points[:-2, None], points[1:-1, None], points[2:, None]
    bank = torch.minimum((hertz - low) / (centre - low), (high - hertz) / (high - centre))
    bank = bank.clamp_min(0)
    for band, middle in enumerate(points[1:-1]):
        if bank[band].sum() == 0:  # narrower than one bin
            bank[band, int(torch.argmin((hertz - middle).abs()))] = 1
    return bank


class SpectralLoss(nn.Module):
    """Log mel, linear and log spectra at `bands` (window, mel bands), and at the windows `fine`
    the log spectrum of the voice range, where a wrong pitch moves the harmonics out of place."""

    def __init__(self, bands: tuple[tuple[int, int], ...], fine: tuple[int, ...]) -> None:
        super().__init__()
        self.bands, self.fine = bands, fine
        for window in {size for size, _ in bands} | set(fine):
            self.register_buffer(f"hann{window}", torch.hann_window(window), persistent=False)
        for window, count in bands:
            bank = mel_bank(window, count, HIGHEST)
            self.register_buffer(f"mel{window}", bank, persistent=False)

    def magnitude(self, samples: Tensor, window: int, hop: int) -> Tensor:
        hann = getattr(self, f"hann{window}")
        return torch.stft(samples, window, hop, window=hann, return_complex=True).abs()

    def forward(self, made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss over all scales, its mel part at the last band, and the fine part."""
        total = torch.zeros((), device=made.device)
        mel = total
        for window, _ in self.bands:
            ours, theirs = (self.magnitude(x, window, window // 4) for x in (made, wanted))
            bank = getattr(self, f"mel{window}")
            # A floor in proportion to the window: what lies below is not heard.
            floor = 6e-4 * window**0.5
            mel = ((bank @ ours + floor).log() - (bank @ theirs + floor).log()).abs().mean()
            top = int(HIGHEST / SAMPLE_RATE * window) + 1
            inside, target = ours[:, :top], theirs[:, :top]
            linear = (inside - target).norm() / (target.norm() + 1e-6)
            logs = ((inside + floor).log() - (target + floor).log()).abs().mean()
            total = total + mel + 0.3 * linear + 0.3 * logs + 0.3 * ours[:, top:].mean()
        fine = torch.zeros((), device=made.device)
        for window in self.fine:
            top = int(_VOICE / SAMPLE_RATE * window) + 1
            floor = 1e-3 * window**0.5
            ours, theirs = (self.magnitude(x, window, 1024)[:, :top] for x in (made, wanted))
            fine = fine + ((ours + floor).log() - (theirs + floor).log()).abs().mean()
        fine = fine / max(1, len(self.fine))
        return total / len(self.bands) + 0.7 * fine, mel.detach(), fine.detach()


class Critic(nn.Module):
    """Looks at the complex spectrum at one window; scores and its inner features."""

    hann: Tensor

    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.window = window
        self.top = int(HIGHEST / SAMPLE_RATE * window) + 1
        self.register_buffer("hann", torch.hann_window(window), persistent=False)
        normed = nn.utils.parametrizations.weight_norm
        layers = [nn.Conv2d(2, channels, (3, 9), padding=(1, 4))]
        layers += [
            nn.Conv2d(
                channels, channels, (3, 9), stride=(1, 2), dilation=(reach, 1), padding=(reach, 4)
            )
            for reach in (1, 2, 4)
        ]
        layers += [nn.Conv2d(channels, channels, 3, padding=1)]
        self.layers = nn.ModuleList([normed(layer) for layer in layers])
        self.score = normed(nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, samples: Tensor) -> tuple[Tensor, list[Tensor]]:
        spectrum = torch.stft(
            samples.float(), self.window, self.window // 4, window=self.hann, return_complex=True
        )[:, : self.top]
        x = torch.stack((spectrum.real, spectrum.imag), 1).transpose(2, 3)
        x = (x / (self.window**0.5 / 4)).contiguous(memory_format=torch.channels_last)
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
            features.append(x)
        return self.score(x), features


class Critics(nn.Module):
    def __init__(self, channels: int, windows: tuple[int, ...] = (512, 1024, 2048)) -> None:
        super().__init__()
        self.critics = nn.ModuleList([Critic(window, channels) for window in windows])

    def forward(self, samples: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        return [critic(samples) for critic in self.critics]


Judged = list[tuple[Tensor, list[Tensor]]]


def critic_loss(real: Judged, made: Judged) -> Tensor:
    terms = [
        (score.float() - 1).square().mean() + other.float().square().mean()
        for (score, _), (other, _) in zip(real, made, strict=True)
    ]
    return torch.stack(terms).sum()


def fooling_loss(made: Judged) -> Tensor:
    return torch.stack([(score.float() - 1).square().mean() for score, _ in made]).sum()


def feature_loss(real: Judged, made: Judged) -> Tensor:
    terms = [
        (ours.float() - theirs.detach().float()).abs().mean()
        / (theirs.detach().float().abs().mean() + 1e-3)
        for (_, wanted), (_, got) in zip(real, made, strict=True)
        for theirs, ours in zip(wanted, got, strict=True)
    ]
    return torch.stack(terms).mean()
