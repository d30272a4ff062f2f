"""Stage 4: train the DualAR on the encoded sentences."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from samples.bundled_voice.batches import Batch, Rows, Spoken
from samples.bundled_voice.dual_ar_net import DualAR, rows
from samples.bundled_voice.graphs import Averages, Step, adam, set_rate
from samples.bundled_voice.progress import Budget, log
from samples.bundled_voice.settings import Settings
from samples.bundled_voice.stored import save

_AVERAGE, _CLIP = 0.002, 1.0
_FAST_SHARE = 0.45  # of a batch's positions go through the fast transformer
_FAST_WEIGHT = 1 / 3  # of each residual book beside the semantic one
_WARM_STEPS = 300
_LEVEL = 0.08  # share of the time before the rate falls


class Buffers:
    """Fixed tensors of one row length, and the step that reads them."""

    def __init__(
        self, rows_: int, length: int, books: int, most: int, device: torch.device
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=device)

        self.ids, self.targets = empty(rows_, length), empty(rows_, length)
        self.codes = empty(rows_, length, books)
        self.where, self.frame_codes = empty(most), empty(most, books)
        self.counted = torch.ones(most, device=device)

    def load(self, batch: Batch) -> None:
        """Copy a batch in; frames beyond the room are left out at random."""
        for name in ("ids", "codes", "targets"):
            getattr(self, name).copy_(getattr(batch, name), non_blocking=True)
        where, frame_codes = batch.where, batch.frame_codes
        room = len(self.where)
        if len(where) > room:
            kept = torch.randperm(len(where))[:room]
            where, frame_codes = where[kept], frame_codes[kept]
        count = len(where)
        self.where[:count].copy_(where, non_blocking=True)
        self.frame_codes[:count].copy_(frame_codes, non_blocking=True)
        self.counted[:count] = 1
        self.where[count:] = 0
        self.frame_codes[count:] = 0
        self.counted[count:] = 0


class DualARTraining:
    def __init__(self, settings: Settings, spoken: Spoken, device: torch.device) -> None:
        self.settings, self.spoken, self.device = settings, spoken, device
        torch.manual_seed(0)
        self.model = DualAR(settings.config).to(device)
        self.cuda = device.type == "cuda"
        self.kind = torch.bfloat16 if self.cuda else torch.float32
        if self.cuda:  # one compilation serves all layers of a kind and all lengths
            for layer in [*self.model.layers, *self.model.fast_layers]:
                layer.compile(dynamic=True)
        self.parameters = dict(self.model.named_parameters())
        matrices, others = [], []
        for name, parameter in self.parameters.items():
            decays = parameter.dim() == 2 and "embed" not in name
            (matrices if decays else others).append(parameter)
        groups: list[dict[str, object]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimiser = adam(groups, settings.ar_rate, (0.9, 0.97), device)
        self.averages = Averages(self.parameters, _AVERAGE)
        self.sums = torch.zeros(settings.config["num_codebooks"], device=device)
        self.steps: dict[int, tuple[Buffers, Step]] = {}
        self.spent = 0.0  # seconds of earlier runs
        # Small beside a training batch; a loss that falls in training alone is memory.
        few = replace(settings, ar_tokens=max(1, settings.ar_tokens // 8))
        unseen = Rows(few, spoken, held_out=True)
        self.unseen = next(iter(unseen)) if len(unseen.own) else None

    def step(self, held: Buffers) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            hidden = self.model.slow(held.ids, held.codes, self.kind).flatten(0, 1)
            logits = self.model.semantic_logits(hidden).float()
            semantic = F.cross_entropy(logits, held.targets.flatten(), ignore_index=-100)
            fast = self.model.fast(rows(hidden, held.where), held.frame_codes, self.kind)
            wanted = held.frame_codes[:, 1:]
            each = F.cross_entropy(
                fast.float().flatten(0, 1), wanted.flatten(), reduction="none"
            ).view(wanted.shape)
            books = (each * held.counted[:, None]).sum(0) / held.counted.sum().clamp_min(1)
        loss = semantic + _FAST_WEIGHT * books.sum()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), _CLIP)
        self.optimiser.step()
        self.averages.update()
        self.sums.add_(torch.cat([semantic.detach()[None], books.detach()]))

    @torch.no_grad()
    def unseen_loss(self) -> float:
        """Semantic loss on sentences that are not trained on; NaN if there are none."""
        if self.unseen is None:
            return math.nan
        ids, codes, targets = (
            part.to(self.device)
            for part in (self.unseen.ids, self.unseen.codes, self.unseen.targets)
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            logits = self.model.semantic_logits(
                self.model.slow(ids, codes, self.kind).flatten(0, 1)
            )
        return float(F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100))

    def ready(self, batch: Batch) -> Step:
        """The step for rows of this length, with the batch in its buffers."""
        count, length = batch.ids.shape
        if length not in self.steps:
            most = max(1, int(self.settings.ar_tokens * _FAST_SHARE))
            books = self.settings.config["num_codebooks"]
            held = Buffers(count, length, books, most, self.device)
            held.load(batch)
            first = next((step for _, step in self.steps.values() if step.graph), None)
            shared = first.graph.pool() if first and first.graph else None
            run = Step(
                lambda: self.step(held), [self.optimiser], f"rows of {length}", warm=2, pool=shared
            )
            self.steps[length] = held, run
        held, run = self.steps[length]
        held.load(batch)
        return run

    def run(self, budget: Budget, out: Path, resume: Path) -> int:
        """Train until the budget, what earlier runs spent counted, is over."""
        workers = self.settings.loader_workers if self.cuda else 0
        extra = {"prefetch_factor": 6} if workers else {}
        loader = torch.utils.data.DataLoader(
            Rows(self.settings, self.spoken, seed=1000 + int(self.spent)),
            batch_size=None, num_workers=workers, pin_memory=self.cuda, **extra,
        )  # fmt: skip
        batches = iter(loader)
        told = saved = time.monotonic()
        steps = told_steps = 0
        budget.spent = self.spent
        began = time.monotonic()
        self.unseen_loss()  # compiles
        budget.excuse(began)
        while (share := budget.share(steps)) < 1:
            set_rate(self.optimiser, self.settings.ar_rate * schedule(steps, share))
            batch, known, began = next(batches), len(self.steps), time.monotonic()
            step = self.ready(batch)
            if len(self.steps) > known:
                budget.excuse(began)
            step()
            steps += 1
            now = time.monotonic()
            if now - told > self.settings.log_every:
                self.tell(steps, steps - told_steps, now - told, share)
                told, told_steps = now, steps
            if now - saved > self.settings.save_every:
                self.save(out, resume, budget.used())
                saved = now
        self.save(out, resume, budget.used())
        log(f"DualAR done: {steps} steps after {budget.used():.0f} s")
        return steps

    def tell(self, steps: int, count: int, seconds: float, share: float) -> None:
        values = (self.sums / max(1, count)).tolist()
        self.sums.zero_()
        told = " ".join(f"{value:.2f}" for value in values[1:])
        log(
            f"DualAR {steps} ({share:.0%}) {1000 * seconds / max(1, count):.0f} ms:"
            f" semantic {values[0]:.3f}, unseen {self.unseen_loss():.3f}, residual {told}"
        )
        if not all(map(math.isfinite, values)):
            raise RuntimeError("a loss of the DualAR is not finite")

    def save(self, out: Path, resume: Path, spent: float) -> None:
        save(self.averages.state(), out)
        state = {
            "spent": spent,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "averages": self.averages.values,
        }
        partial = resume.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(resume)

    def load(self, resume: Path) -> None:
        state = torch.load(resume, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        for value, stored in zip(self.averages.values, state["averages"], strict=True):
            value.copy_(stored)
        self.spent = float(state["spent"])
        log(f"DualAR goes on after {self.spent:.0f} s")


def schedule(steps: int, share: float) -> float:
    """Rate over its peak: a climb, then a cosine down to one hundredth."""
    down = min(1.0, max(0.0, share - _LEVEL) / (1 - _LEVEL))
    return min(1.0, (steps + 1) / _WARM_STEPS) * (0.01 + 0.495 * (1 + math.cos(math.pi * down)))


def train_dual_ar(
    settings: Settings,
    codes: Path,
    texts: list[str],
    out: Path,
    budget: Budget,
    device: torch.device,
    *,
    resume: bool = False,
) -> int:
    """Train on `codes`; `out` gets the averaged weights, `out`.resume what a later run needs."""
    torch.set_float32_matmul_precision("high")
    spoken = Spoken.read(codes, texts)
    log(f"{len(spoken.text)} sentences, {spoken.codes.shape[1]} frames")
    training = DualARTraining(settings, spoken, device)
    state = out.with_suffix(".resume")
    if resume and state.exists():
        training.load(state)
    return training.run(budget, out, state)
