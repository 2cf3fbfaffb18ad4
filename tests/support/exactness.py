"""Compares an engine's logits with a Hugging Face reference that masks the evicted tokens.

The reference is one forward pass over a request's whole token sequence with a 4-D attention
mask: query q sees key k if k <= q and k had not been evicted when q was computed. That is what
eviction means, whatever the memory did meanwhile: keys keep their logical positions, and later
keys and values are computed from the pruned context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vtoken.policies import StepScores


@dataclass
class Life:
    """One request between admission and finish or preemption."""

    req_id: str
    evictions: list[tuple[int, np.ndarray]] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    scores: list[StepScores] = field(default_factory=list)

    def evicted_at(self, length: int) -> np.ndarray:
        """For each id, the logical length at which it was evicted; a huge number if never."""
        when = np.full(length, np.iinfo(np.int64).max)
        for at, ids in self.evictions:
            when[ids] = at
        return when


class Recorder:
    """Watches an in-process engine: every logits row, every eviction, every step's blocks, and the
    attention weights that policies are shown."""

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.lives: list[Life] = []
        self._open: dict[str, Life] = {}

    def life(self, req_id: str) -> Life:
        if req_id not in self._open:
            self._open[req_id] = Life(req_id)
            self.lives.append(self._open[req_id])
        return self._open[req_id]

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
        """Record while inside; the engine is left as it was."""
        reclaimer = getattr(self.scheduler, "vtoken", None)
        model = self.runner.model
        originals = (
            model.compute_logits,
            getattr(reclaimer, "evict", None),
            getattr(reclaimer, "drop", None),
            getattr(reclaimer, "schedule", None),
        )

        def compute_logits(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = originals[0](hidden, *args, **kwargs)
            for row, (req_id, last) in enumerate(last_tokens()):
                self.life(req_id).rows[last] = logits[row].detach().clone().cpu()
            return logits

        def last_tokens() -> list[tuple[str, int]]:
            """Request and position of each row's last token, in whichever runner."""
            runner = self.runner
            if sampled:
                batch, starts, positions = (
                    sampled[-1],
                    sampled[-1].query_start_loc_np,
                    sampled[-1].positions,
                )
            else:
                batch, starts = runner.input_batch, runner.query_start_loc.np
                positions = runner.positions
            ends = [int(starts[row + 1]) - 1 for row in range(len(batch.req_ids))]
            return [(i, int(positions[end])) for i, end in zip(batch.req_ids, ends, strict=True)]

        #: Model Runner V2 keeps no batch between steps
        sampled: list[Any] = []

        def sample(hidden: torch.Tensor, batch: Any, *args: Any) -> Any:
            sampled[:] = [batch]
            return type(self.runner).sample(self.runner, hidden, batch, *args)

        def evict(req_id: str, ids: np.ndarray) -> None:
            at = reclaimer.tables[req_id].logical_len
            originals[1](req_id, ids)
            if len(ids):
                self.life(req_id).evictions.append((at, np.array(ids)))

        def drop(req_id: str, **how: bool) -> None:
            originals[2](req_id, **how)
            self._open.pop(req_id, None)

        def schedule(req_id: str, *args: Any, **kwargs: Any) -> Any:
            layout = originals[3](req_id, *args, **kwargs)
            table = reclaimer.tables[req_id]
            self.life(req_id).blocks.append((table.num_live, table.num_blocks))
            return layout

        host = getattr(self.scheduler, "vtoken_policies", None)
        shown = getattr(host, "observe", None)

        def observe(req_id: str, scores: StepScores) -> None:
            self.life(req_id).scores.append(scores)
            shown(req_id, scores)

        model.compute_logits = compute_logits
        second = hasattr(self.runner, "sample")
        if second:
            self.runner.sample = sample
        if host is not None:
            host.observe = observe
        if reclaimer is not None:
            reclaimer.evict, reclaimer.drop, reclaimer.schedule = evict, drop, schedule
        try:
            yield self
        finally:
            del model.compute_logits
            if second:
                del self.runner.sample
            if host is not None:
                del host.observe
            if reclaimer is not None:
                del reclaimer.evict, reclaimer.drop, reclaimer.schedule


class Reference:
    """Hugging Face model, eager attention, fp32."""

    def __init__(self, checkpoint: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            str(checkpoint), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, token_ids: Sequence[int], evicted_at: np.ndarray | None) -> torch.Tensor:
        """`[tokens, vocab]`; `evicted_at` None: nothing is masked (the control)."""
        found: torch.Tensor = self._forward(token_ids, evicted_at).logits[0]
        return found

    def attentions(self, token_ids: Sequence[int], evicted_at: np.ndarray | None) -> torch.Tensor:
        """Softmax weights, `[layers, heads, queries, keys]`."""
        found = self._forward(token_ids, evicted_at, output_attentions=True).attentions
        return torch.stack([layer[0] for layer in found])

    def _forward(
        self, token_ids: Sequence[int], evicted_at: np.ndarray | None, **more: bool
    ) -> Any:
        length = len(token_ids)
        query, key = np.arange(length)[:, None], np.arange(length)[None, :]
        sees = key <= query
        if evicted_at is not None:
            sees &= evicted_at[None, :length] > query
        mask = torch.zeros((1, 1, length, length), dtype=self.model.dtype)
        mask[0, 0][torch.from_numpy(~sees)] = torch.finfo(torch.float32).min
        with torch.no_grad():
            return self.model(
                input_ids=torch.tensor([list(token_ids)]),
                attention_mask=mask,
                position_ids=torch.arange(length)[None],
                use_cache=False,
                **more,
            )


@dataclass
class Comparison:
    """Totals over all compared rows."""

    rows: int = 0
    rows_after_eviction: int = 0
    max_error: float = 0.0
    max_relative: float = 0.0
    max_control: float = 0.0
    wrong_tokens: int = 0
    min_margin: float = float("inf")

    def add(self, other: Comparison) -> None:
        self.rows += other.rows
        self.rows_after_eviction += other.rows_after_eviction
        self.max_error = max(self.max_error, other.max_error)
        self.max_relative = max(self.max_relative, other.max_relative)
        self.max_control = max(self.max_control, other.max_control)
        self.wrong_tokens += other.wrong_tokens
        self.min_margin = min(self.min_margin, other.min_margin)


def compare(reference: Reference, life: Life, token_ids: Sequence[int]) -> Comparison:
    """One life's rows against the reference, with the unmasked control.

    Args:
        token_ids: prompt and output of the request, in order.
    """
    result = Comparison()
    positions = sorted(p for p in life.rows if p < len(token_ids))
    if not positions:
        return result
    length = positions[-1] + 1
    evicted_at = life.evicted_at(length)
    expected = reference.logits(token_ids[:length], evicted_at)
    control = reference.logits(token_ids[:length], None)
    first = life.evictions[0][0] if life.evictions else length
    for position in positions:
        row = life.rows[position]
        result.rows += 1
        error = float((row - expected[position]).abs().max())
        result.max_error = max(result.max_error, error)
        largest = float(expected[position].abs().max())
        result.max_relative = max(result.max_relative, error / largest)
        if position >= first:
            result.rows_after_eviction += 1
            difference = float((row - control[position]).abs().max())
            result.max_control = max(result.max_control, difference)
        top = torch.topk(expected[position], 2)
        result.min_margin = min(result.min_margin, float(top.values[0] - top.values[1]))
        result.wrong_tokens += int(row.argmax() != top.indices[0])
    return result


@dataclass
class ScoreComparison:
    """Totals over all observed steps. `max_error` is the largest difference of one token's weight,
    averaged over the step's observed queries, all heads and all layers; `max_head_error` that of a
    single head's, averaged over the queries."""

    steps: int = 0
    prompts: int = 0
    after_eviction: int = 0
    max_error: float = 0.0
    max_head_error: float = 0.0
    missed: int = 0

    def add(self, other: ScoreComparison) -> None:
        self.steps += other.steps
        self.prompts += other.prompts
        self.after_eviction += other.after_eviction
        self.max_error = max(self.max_error, other.max_error)
        self.max_head_error = max(self.max_head_error, other.max_head_error)
        self.missed += other.missed


def compare_scores(
    reference: Reference,
    life: Life,
    token_ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
) -> ScoreComparison:
    """One life's attention weights against the reference's.

    Args:
        layers: the tapped ones; all by default.

    `missed` counts steps with a logits row that no weights came for.
    """
    result = ScoreComparison()
    if not life.scores:
        return result
    newest = [int(scores.token_ids.max()) for scores in life.scores]
    length = max(newest) + 1
    weights = reference.attentions(token_ids[:length], life.evicted_at(length))
    if layers is not None:
        weights = weights[list(layers)]
    first = life.evictions[0][0] if life.evictions else length
    for last, scores in zip(newest, life.scores, strict=True):
        by_head = weights[:, :, last + 1 - scores.queries : last + 1, : last + 1].sum(2)
        by_head = by_head.flatten(0, 1)
        assert scores.heads == len(by_head)
        found = torch.zeros(by_head.shape[1])
        found[torch.from_numpy(scores.token_ids.astype(np.int64))] = torch.from_numpy(scores.values)
        error = float((found - by_head.sum(0)).abs().max()) / (scores.heads * scores.queries)
        result.max_error = max(result.max_error, error)
        if scores.per_head is not None:
            own = torch.from_numpy(scores.per_head)
            ids = torch.from_numpy(scores.token_ids.astype(np.int64))
            difference = float((own - by_head[:, ids]).abs().max())
            result.max_head_error = max(result.max_head_error, difference / scores.queries)
        result.steps += 1
        result.prompts += scores.prompt
        result.after_eviction += last >= first
    result.missed = len([p for p in life.rows if p < length and p not in newest])
    return result
