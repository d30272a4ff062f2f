"""What the codec is trained against: spectra at several scales, and critics that learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samples.bundled_voice.settings import SAMPLE_RATE

HIGHEST = 11_800.0  # hertz; the source has nothing above 12 kHz
_FOLD = 4  # bins that a critic sees as channels
_ABOVE = 512  # window at which energy above HIGHEST counts
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
    the log spectrum of the voice range, where a wrong pitch moves the harmonics out of place.

    A spectrum is a product with a table of windowed sines of the bins that are looked at: its
    gradient is one more product, where that of a library's STFT scatters.
    """

    def __init__(self, bands: tuple[tuple[int, int], ...], fine: tuple[int, ...]) -> None:
        super().__init__()
        self.bands, self.fine = bands, fine
        for window, count in bands:
            bank = mel_bank(window, count, HIGHEST)[:, : bins_below(HIGHEST, window)]
            self.register_buffer(f"mel{window}", bank.t().contiguous(), persistent=False)
            sines = windowed_sines(window, 0, bins_below(HIGHEST, window))
            self.register_buffer(f"sines{window}", sines, persistent=False)
        for window in fine:
            sines = windowed_sines(window, 0, bins_below(_VOICE, window))
            self.register_buffer(f"fine{window}", sines, persistent=False)
        above = windowed_sines(_ABOVE, bins_below(HIGHEST, _ABOVE), _ABOVE // 2 + 1)
        self.register_buffer("above", above, persistent=False)

    def forward(self, made: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss over all scales, its mel part at the last band, and the fine part."""
        total = 0.3 * magnitude(made, self.above, _ABOVE // 4).mean()
        mel = torch.zeros((), device=made.device)
        for window, _ in self.bands:
            sines, bank = getattr(self, f"sines{window}"), getattr(self, f"mel{window}")
            ours, theirs = (magnitude(x, sines, window // 4) for x in (made, wanted))
            # A floor in proportion to the window: what lies below is not heard.
            floor = 6e-4 * window**0.5
            mel = ((ours @ bank + floor).log() - (theirs @ bank + floor).log()).abs().mean()
            linear = (ours - theirs).norm() / (theirs.norm() + 1e-6)
            logs = ((ours + floor).log() - (theirs + floor).log()).abs().mean()
            total = total + (mel + 0.3 * linear + 0.3 * logs) / len(self.bands)
        fine = torch.zeros((), device=made.device)
        for window in self.fine:
            floor = 1e-3 * window**0.5
            sines = getattr(self, f"fine{window}")
            ours, theirs = (magnitude(x, sines, 1024) for x in (made, wanted))
            fine = fine + ((ours + floor).log() - (theirs + floor).log()).abs().mean()
        fine = fine / max(1, len(self.fine))
        return total + 0.7 * fine, mel.detach(), fine.detach()


def bins_below(hertz: float, window: int) -> int:
    return int(hertz / SAMPLE_RATE * window) + 1


def windowed_sines(window: int, first: int, last: int) -> Tensor:
    """Hann window times cosine and sine of the bins from `first` to before `last`:
    [window, 2 * bins]."""
    turn = torch.arange(window)[:, None] * torch.arange(first, last)[None] % window
    angle = turn.double() * (2 * math.pi / window)
    table = torch.cat((angle.cos(), -angle.sin()), 1) * torch.hann_window(window).double()[:, None]
    return table.float()


def magnitude(samples: Tensor, sines: Tensor, hop: int) -> Tensor:
    """[batch, n] to [batch, n / hop + 1, bins]; windows are centred on the hops."""
    window = len(sines)
    frames = F.pad(samples, (window // 2, window // 2)).unfold(1, window, hop)
    real, imaginary = (frames @ sines).chunk(2, -1)
    return (real.square() + imaginary.square() + 1e-9).sqrt()


class Critic(nn.Module):
    """Looks at the complex spectrum at one window; scores and its inner features. FOLD bins lie
    side by side as channels: a convolution over two channels of a full spectrum is slow."""

    hann: Tensor

    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.window = window
        self.top = int(HIGHEST / SAMPLE_RATE * window) // _FOLD * _FOLD
        self.register_buffer("hann", torch.hann_window(window), persistent=False)
        normed = nn.utils.parametrizations.weight_norm
        layers = [nn.Conv2d(2 * _FOLD, channels, (3, 5), padding=(1, 2))]
        layers += [
            nn.Conv2d(
                channels, channels, (3, 5), stride=(1, 2), dilation=(reach, 1), padding=(reach, 2)
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
        # [batch, time, bins / FOLD, 2 FOLD], and the channels in front for the eye alone
        x = torch.view_as_real(spectrum.transpose(1, 2)).flatten(2).unflatten(2, (-1, 2 * _FOLD))
        x = (x / (self.window**0.5 / 4)).permute(0, 3, 1, 2)
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
