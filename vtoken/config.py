"""vToken's own configuration: plain values, checked on their own, before any engine exists.

The same names everywhere: command line (`--budget-ratio`), configuration file, and
`additional_config={"vtoken": {...}}` of vLLM (`budget_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vtoken.core.background import UNBOUNDED, BackgroundParams
from vtoken.core.reclaimer import ReclaimMode
from vtoken.errors import Rejected
from vtoken.policies import Policy, PolicyParams, find_policy

CHECK_LEVELS = (0, 1, 2, 3)
SHARED_PREFIX = ("keep", "copy-out")
OPTIONAL_COUNTS = ("copy_budget", "moves_per_plan")
BACKGROUND_OPTIONS = (
    *("threshold", "headroom", "commit_delay", "force_sync", "shared_prefix"),
    *OPTIONAL_COUNTS,
)
"""Options that mean nothing in the other modes."""


@dataclass(frozen=True, kw_only=True)
class VTokenConfig:
    """What to evict, how to reclaim it, how hard to check.

    Attributes:
        policy: name of an eviction policy, or "none": indirection only, nothing is evicted.
        budget: tokens that a decode step may attend to, its own included; a prefill chunk comes
            on top. The newest computed token always stays, whatever the budget.
        budget_ratio: the same as a share of the request's length, in (0, 1]; one of the two.
        sinks: first tokens that StreamingLLM keeps.
        seed: seed of policies that draw.
        reclaim: "eager", "off" or "background", see `ReclaimMode`.
        threshold: background: share of a request's physical slots that are holes, in (0, 1], from
            which on it is relocated; ignored while an allocation fails for want of a block.
        headroom: background: blocks kept free of requests, as targets for `shared_prefix`.
        copy_budget: background: most bytes of K and V, per rank, given to the copy stream in one
            step; None for no bound. At least one block's.
        moves_per_plan: background: most tokens that one plan moves; None for no bound.
        commit_delay: background: steps between a plan's copies and the switch of the layout.
        force_sync: background: copy in step order instead of beside the steps (for comparison).
        shared_prefix: background: "keep" leaves tokens in shared or cached blocks where they are;
            "copy-out" copies a request's few live ones out of them when a block is gained.
        checks: 0 off; 1 counters and touched entries; 2 also payload digests of moved tokens
            and periodic full scans; 3 everything every step, with the spec in lock step.
    """

    policy: str = "none"
    budget: int | None = None
    budget_ratio: float | None = None
    sinks: int = 4
    seed: int = 0
    reclaim: str = "eager"
    threshold: float = 0.25
    headroom: int = 0
    copy_budget: int | None = None
    moves_per_plan: int | None = None
    commit_delay: int = 2
    force_sync: bool = False
    shared_prefix: str = "keep"
    checks: int = 1
    trace: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if self.reclaim not in [mode.value for mode in ReclaimMode]:
            modes = ", ".join(mode.value for mode in ReclaimMode)
            raise Rejected(f"unknown reclaim mode {self.reclaim!r}; choose one of: {modes}")
        _check_background(self)
        if self.checks not in CHECK_LEVELS:
            raise Rejected(f"checks must be 0, 1, 2 or 3, not {self.checks}")
        params = self.params  # rejects bad sinks and seeds
        if self.policy == "none":
            if self.budget is not None or self.budget_ratio is not None:
                raise Rejected("a budget needs a policy; name one with --policy")
            return
        policy = find_policy(self.policy)
        if self.budget is not None and self.budget_ratio is not None:
            raise Rejected("budget is given both in tokens and as a ratio; give one of them")
        if self.budget is None and self.budget_ratio is None:
            raise Rejected(
                f"policy {self.policy} needs a budget; give --budget TOKENS or --budget-ratio SHARE"
            )
        least = policy.min_budget(params)
        if self.budget is not None and self.budget < least:
            if self.budget < 1:
                raise Rejected(f"budget must be positive, not {self.budget}")
            raise Rejected(
                f"budget {self.budget} is too small for {self.policy}: "
                f"at least {least} (sinks {self.sinks} + 1)"
            )
        if self.budget_ratio is not None and not 0.0 < self.budget_ratio <= 1.0:
            raise Rejected(f"budget_ratio must be in (0, 1], not {self.budget_ratio}")

    @property
    def params(self) -> PolicyParams:
        return PolicyParams(sinks=self.sinks, seed=self.seed)

    @property
    def policy_class(self) -> type[Policy] | None:
        return None if self.policy == "none" else find_policy(self.policy)

    @property
    def mode(self) -> ReclaimMode:
        return ReclaimMode(self.reclaim)

    def background(self, *, block_size: int, token_bytes: int) -> BackgroundParams:
        """Parameters of the background mode in the core's units.

        Args:
            token_bytes: K and V of one token in all layers of one rank.

        Raises:
            Rejected: the copy budget is less than one block.
        """
        budget = UNBOUNDED
        if self.copy_budget is not None:
            budget = self.copy_budget // token_bytes
            if budget < block_size:
                raise Rejected(
                    f"copy_budget {self.copy_budget} does not hold one block of "
                    f"{block_size * token_bytes} bytes; raise --copy-budget"
                )
        params = BackgroundParams(
            threshold=self.threshold,
            headroom=self.headroom,
            copy_budget=budget,
            moves_per_plan=UNBOUNDED if self.moves_per_plan is None else self.moves_per_plan,
            commit_delay=self.commit_delay,
            copy_out=self.shared_prefix == "copy-out",
        )
        params.check(block_size=block_size)
        return params

    def budget_for(self, num_tokens: int) -> int:
        """Budget in tokens of a request that will have `num_tokens` after its next token."""
        if self.budget is not None:
            return self.budget
        if self.budget_ratio is None:
            return num_tokens
        policy = self.policy_class
        least = policy.min_budget(self.params) if policy else 1
        share = self.budget_ratio * num_tokens
        return max(least, math.ceil(share - 1e-9))  # 0.07 of 100 is 7, also in binary

    def idle_reason(self, *, evicted: int, asked: int) -> str | None:
        """Why a policy has evicted nothing, and the way out; None if it has, or there is none.

        Args:
            evicted: tokens evicted since start.
            asked: how often the policy was asked for victims.
        """
        if self.policy == "none" or evicted:
            return None
        if asked:
            return (
                f"nothing was evicted: policy {self.policy} was asked {asked} times and named no "
                "token; choose another policy"
            )
        option = "--budget" if self.budget_ratio is None else "--budget-ratio"
        return f"nothing was evicted: no request reached the budget; lower {option}"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> VTokenConfig:
        """Build from a configuration file or `additional_config["vtoken"]`.

        Raises:
            Rejected: an unknown name or a value out of range.
        """
        if not isinstance(values, Mapping):
            raise Rejected(f"vtoken configuration must be a mapping, not {type(values).__name__}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise Rejected(f"unknown vtoken option {name!r}; known: {', '.join(known)}")
        return cls(**dict(values))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _check_background(config: VTokenConfig) -> None:
    if not 0 < config.threshold <= 1:
        raise Rejected(f"threshold must be in (0, 1], not {config.threshold}")
    for name, least in (("headroom", 0), ("commit_delay", 0)):
        if getattr(config, name) < least:
            raise Rejected(f"{name} must not be negative, not {getattr(config, name)}")
    for name in ("copy_budget", "moves_per_plan"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise Rejected(f"{name} must be positive, not {value}; leave it out for no bound")
    if config.shared_prefix not in SHARED_PREFIX:
        raise Rejected(
            f"unknown shared_prefix {config.shared_prefix!r}; choose one of: "
            + ", ".join(SHARED_PREFIX)
        )
    if config.mode is ReclaimMode.BACKGROUND:
        return
    defaults = {field.name: field.default for field in fields(VTokenConfig)}
    for name in BACKGROUND_OPTIONS:
        if getattr(config, name) != defaults[name]:
            raise Rejected(f"{name} is an option of --reclaim background, not {config.reclaim}")


def _check_types(config: VTokenConfig) -> None:
    """Reject values of a wrong type with the option's name (JSON and YAML let anything in)."""
    for name in ("sinks", "seed", "checks", "headroom", "commit_delay", *OPTIONAL_COUNTS):
        value = getattr(config, name)
        if value is None and name in OPTIONAL_COUNTS:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise Rejected(f"{name} must be a whole number, not {value!r}")
    if isinstance(config.threshold, bool) or not isinstance(config.threshold, (int, float)):
        raise Rejected(f"threshold must be a number, not {config.threshold!r}")
    if not isinstance(config.force_sync, bool):
        raise Rejected(f"force_sync must be true or false, not {config.force_sync!r}")
    for name in ("policy", "reclaim", "shared_prefix"):
        if not isinstance(getattr(config, name), str):
            raise Rejected(f"{name} must be a name, not {getattr(config, name)!r}")
    if config.trace is not None and not isinstance(config.trace, str):
        raise Rejected(f"trace must be a file name, not {config.trace!r}")
    budget, ratio = config.budget, config.budget_ratio
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise Rejected(
            f"budget must be a whole number of tokens, not {budget!r}; "
            "a share goes into budget_ratio"
        )
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float))):
        raise Rejected(f"budget_ratio must be a number, not {ratio!r}")
