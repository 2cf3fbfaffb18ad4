"""What is evaluated: which policies at which budgets, which tasks, on how many samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vtoken.errors import Rejected
from vtoken.evaluation import passkey, perplexity, rouge
from vtoken.evaluation.requests import FULL, Cell

TASKS = ("passkey", "perplexity", "rouge")
BUDGETS = (0.5, 0.25)
LENGTH, QUICK_LENGTH = 1024, 512
_SAMPLES = {"passkey": 20, "perplexity": 12, "rouge": 12}
_QUICK_SAMPLES = {"passkey": 4, "perplexity": 2, "rouge": 2}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        policies: their names, without "none"; the full cache is always there.
        budgets: shares of a request's length, in (0, 1].
        tasks: some of `TASKS`, in that order.
        samples: most samples of each task; a short text gives fewer excerpts.
        length: tokens of a pass key prompt.
        scored: tokens of each excerpt that perplexity is measured on.
        reclaim: mode of vToken's runs; the naive ones are `off`.
        seed: of the pass keys and of policies that draw.
    """

    policies: tuple[str, ...]
    budgets: tuple[float, ...] = BUDGETS
    tasks: tuple[str, ...] = TASKS
    samples: dict[str, int]
    length: int = LENGTH
    scored: int = perplexity.SCORED
    reclaim: str = "background"
    seed: int = 0

    @property
    def cells(self) -> list[Cell]:
        """All rows but the full cache."""
        return [Cell(policy, budget) for policy in self.policies for budget in self.budgets]

    @property
    def rows(self) -> list[Cell]:
        return [FULL, *self.cells]

    @property
    def longest(self) -> int:
        """Most tokens that a request has at its end."""
        lengths = {
            "passkey": self.length + passkey.NEW_TOKENS,
            "perplexity": perplexity.CONTEXT + 1 + self.scored,
            "rouge": rouge.PROMPT + rouge.NEW_TOKENS,
        }
        return max(lengths[task] for task in self.tasks)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    *,
    policies: Sequence[str],
    budgets: Sequence[str] = (),
    tasks: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    reclaim: str = "background",
    seed: int = 0,
    quick: bool = False,
) -> Plan:
    """A plan from what a user asks for; lists may come as one string with commas in it.

    Raises:
        Rejected: an unknown task, a budget that is none, or no policy at all.
    """
    names = tuple(name for name in _items(policies) if name != "none")
    if not names:
        raise Rejected(
            "no policy to evaluate; the full cache is in every table without being named"
        )
    wanted = _items(tasks) or list(TASKS)
    for task in wanted:
        if task not in TASKS:
            raise Rejected(f"unknown task {task!r}; choose from: {', '.join(TASKS)}")
    counts = _QUICK_SAMPLES if quick else _SAMPLES
    return Plan(
        policies=names,
        budgets=tuple(dict.fromkeys(_budget(item) for item in _items(budgets))) or BUDGETS,
        tasks=tuple(task for task in TASKS if task in wanted),
        samples={task: count if samples is None else samples for task, count in counts.items()},
        length=length or (QUICK_LENGTH if quick else LENGTH),
        scored=perplexity.QUICK_SCORED if quick else perplexity.SCORED,
        reclaim=reclaim,
        seed=seed,
    )


def _items(values: Sequence[str]) -> list[str]:
    """Each once, in order, also those that commas keep together."""
    parts = [part.strip() for value in values for part in value.split(",")]
    return list(dict.fromkeys(part for part in parts if part))


def _budget(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        raise Rejected(
            f"budget {text!r} is not a number; give shares of the length such as 0.5,0.25"
        ) from None
    if not 0.0 < share <= 1.0:
        raise Rejected(f"budget {text} is not a share of the length, in (0, 1]")
    return share
