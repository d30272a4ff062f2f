"""Vector quantisation by cosine in a few dimensions, with codebooks that follow the data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DECAY = 0.95
_ROUNDS = 12


class Book(nn.Module):
    """One codebook. Rows are a running mean of the projections that chose them.

    Until `fit` the bottleneck is continuous: with rows from the start most of them are never
    chosen, and the rest of the network settles around the few that are.
    """

    counts: Tensor
    sums: Tensor

    def __init__(self, width: int, size: int, projected: int) -> None:
        super().__init__()
        self.size, self.fitted = size, False
        self.in_proj = nn.Conv1d(width, projected, 1)
        self.out_proj = nn.Conv1d(projected, width, 1)
        self.codebook = nn.Embedding(size, projected)
        self.codebook.weight.requires_grad_(False)
        self.register_buffer("counts", torch.ones(size), persistent=False)
        self.register_buffer("sums", self.codebook.weight.detach().clone(), persistent=False)

    def projected(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj.weight.squeeze(-1), self.in_proj.bias)

    def restored(self, x: Tensor) -> Tensor:
        return F.linear(x, self.out_proj.weight.squeeze(-1), self.out_proj.bias)

    def looked_up(self, codes: Tensor) -> Tensor:
        return self.restored(self.codebook.weight[codes])

    def nearest(self, flat: Tensor) -> Tensor:
        """Row of largest cosine for projections [n, projected]."""
        rows = F.normalize(self.codebook.weight, dim=-1)
        return (F.normalize(flat, dim=-1) @ rows.t()).argmax(-1)

    def forward(self, x: Tensor, train: bool) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, time, width] to its quantised form, codes [batch, time], commitment loss."""
        inner = self.projected(x)
        if train and not self.fitted:
            nothing = torch.zeros(inner.shape[:-1], dtype=torch.long, device=x.device)
            return self.restored(inner), nothing, 1e-3 * inner.square().mean()
        flat = inner.detach().reshape(-1, inner.shape[-1])
        codes = self.nearest(flat)
        chosen = self.codebook.weight[codes].view_as(inner)
        loss = torch.zeros((), device=x.device)
        if train:
            loss = F.mse_loss(inner, chosen.detach())
            self._follow(flat, codes)
            chosen = inner + (chosen - inner).detach()
        return self.restored(chosen), codes.view(inner.shape[:-1]), loss

    @torch.no_grad()
    def _follow(self, flat: Tensor, codes: Tensor) -> None:
        counts, sums = self._gathered(flat, codes)
        self.counts.mul_(_DECAY).add_(counts, alpha=1 - _DECAY)
        self.sums.mul_(_DECAY).add_(sums, alpha=1 - _DECAY)
        self.codebook.weight.copy_(self.sums / self.counts.clamp_min(1e-4)[:, None])

    def _gathered(self, flat: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(codes), device=flat.device)
        counts = torch.zeros(self.size, device=flat.device).index_add_(0, codes, ones)
        return counts, torch.zeros_like(self.sums).index_add_(0, codes, flat)

    @torch.no_grad()
    def fit(self, x: Tensor) -> Tensor:
        """Set the rows by spherical k-means on [n, width]; what is left for the next book."""
        weight, bias = self.in_proj.weight.squeeze(-1), self.in_proj.bias
        assert bias is not None
        assert self.out_proj.bias is not None
        centre = F.linear(x, weight, bias).mean(0)
        bias.sub_(centre)  # centred, and the function stays the same
        self.out_proj.bias.add_(self.out_proj.weight.squeeze(-1) @ centre)
        flat = self.projected(x)
        unit = F.normalize(flat, dim=-1)
        self.codebook.weight.copy_(self._drawn(unit, self.size))
        for _ in range(_ROUNDS):
            counts, sums = self._gathered(unit, self.nearest(unit))
            empty = counts < 1
            sums[empty] = self._drawn(unit, int(empty.sum()))
            self.codebook.weight.copy_(F.normalize(sums, dim=-1))
        counts, sums = self._gathered(flat, self.nearest(flat))
        empty = counts < 1
        sums[empty] = self._drawn(flat, int(empty.sum()))
        counts[empty] = 1
        self.codebook.weight.copy_(sums / counts[:, None])
        self.adopt()
        return x - self.looked_up(self.nearest(flat))

    @torch.no_grad()
    def adopt(self) -> None:
        """Take rows that were loaded as fitted: what follows goes on from them."""
        self.counts.fill_(1.0)
        self.sums.copy_(self.codebook.weight)
        self.fitted = True

    @staticmethod
    def _drawn(rows: Tensor, count: int) -> Tensor:
        return rows[torch.randint(0, len(rows), (count,), device=rows.device)].clone()

    @torch.no_grad()
    def revive(self, x: Tensor, least: float = 0.1) -> None:
        """Rows that nothing chooses take the place of random projections of x; no sync needed."""
        flat = self.projected(x).reshape(-1, self.codebook.weight.shape[1])
        fresh = self._drawn(flat, self.size)
        dead = self.counts < least
        self.codebook.weight.copy_(torch.where(dead[:, None], fresh, self.codebook.weight))
        self.sums.copy_(torch.where(dead[:, None], fresh, self.sums))
        self.counts.copy_(torch.where(dead, torch.ones_like(self.counts), self.counts))


class ResidualQuantiser(nn.Module):
    def __init__(self, width: int, books: int, size: int, projected: int) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList([Book(width, size, projected) for _ in range(books)])
