"""vToken's own configuration: plain values, checked on their own, before any engine exists.

The same names everywhere: command line (`--budget-ratio`), configuration file, and
`additional_config={"vtoken": {...}}` of vLLM (`budget_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from vtoken.core.background import UNBOUNDED, BackgroundParams
from vtoken.core.reclaimer import ReclaimMode
from vtoken.errors import Rejected
from vtoken.policies import Policy, PolicyParams, ScoreNeed, find_policy

CHECK_LEVELS = (0, 1, 2, 3)
SHARED_PREFIX = ("keep", "copy-out")
ON_POLICY_ERROR = ("stop-request", "keep-tokens")
REQUEST_POLICIES = ("registered", "any")
SCORE_MODES = ("exact", "sampled")
SCORE_COUNTS = ("score_layers", "score_every", "score_window")
REQUEST_OPTIONS = tuple(
    f"vtoken_{name}" for name in ("policy", "budget", "budget_ratio", "score_mode", *SCORE_COUNTS)
)
"""What a single request may set, under these names."""
OPTIONAL_COUNTS = ("copy_budget", "moves_per_plan")
_COUNTS = (
    *("slack", "keep_first", "keep_recent", "sinks", "seed", "window", "checks"),
    *("headroom", "commit_delay"),
    *OPTIONAL_COUNTS,
)
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
        slack: tokens over the budget before eviction fires; then it goes down to the budget, so
            that evictions come in bursts.
        keep_first: first tokens that no policy may evict.
        keep_recent: newest tokens that no policy may evict, beside the newest one.
        keep_prompt: no policy may evict tokens of the prompt. Protection wins over the budget.
        on_policy_error: what becomes of a request whose policy fails: "stop-request" ends it,
            "keep-tokens" lets it go on without further eviction.
        policy_time_limit_ms: a policy that takes longer than this in one call has failed; looked
            at after the call, so one that never returns is not stopped. None for no limit.
        request_policies: which policies a request may name for itself: "registered" ones by their
            name, or "any", which includes `module:Class` and so lets it import modules.
        sinks: first tokens that StreamingLLM and FastGen keep.
        seed: seed of policies that draw.
        recent_share: share of the kept tokens, in [0, 1), that H2O and Scissorhands reserve for
            the newest ones.
        window: observations that Scissorhands looks back over, 1 to 32.
        recovery: share of a head's attention, in (0, 1], that FastGen's choice has to retain.
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
        score_mode: how attention weights are taken for policies that ask for them: "exact", of all
            layers in every step, or "sampled".
        score_layers: sampled: the last of every so many layers is looked at.
        score_every: sampled: a decode step is looked at when the request's length is a multiple
            of this; prompts always are.
        score_window: how many of a prompt chunk's last queries are observed.
        checks: 0 off; 1 counters and touched entries; 2 also payload digests of moved tokens
            and periodic full scans; 3 everything every step, with the spec in lock step.
    """

    policy: str = "none"
    budget: int | None = None
    budget_ratio: float | None = None
    slack: int = 0
    keep_first: int = 0
    keep_recent: int = 0
    keep_prompt: bool = False
    on_policy_error: str = "stop-request"
    policy_time_limit_ms: float | None = None
    request_policies: str = "registered"
    sinks: int = 4
    seed: int = 0
    recent_share: float = 0.5
    window: int = 32
    recovery: float = 0.95
    reclaim: str = "eager"
    threshold: float = 0.25
    headroom: int = 0
    copy_budget: int | None = None
    moves_per_plan: int | None = None
    commit_delay: int = 2
    force_sync: bool = False
    shared_prefix: str = "keep"
    score_mode: str = "exact"
    score_layers: int = 5
    score_every: int = 8
    score_window: int = 32
    checks: int = 1
    trace: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if self.reclaim not in [mode.value for mode in ReclaimMode]:
            modes = ", ".join(mode.value for mode in ReclaimMode)
            raise Rejected(f"unknown reclaim mode {self.reclaim!r}; choose one of: {modes}")
        _check_background(self)
        _check_scores(self)
        if self.checks not in CHECK_LEVELS:
            raise Rejected(f"checks must be 0, 1, 2 or 3, not {self.checks}")
        _check_eviction(self)
        if self.policy == "none":
            if self.budget is not None or self.budget_ratio is not None:
                raise Rejected("a budget needs a policy; name one with --policy")
            return
        least = self.least_budget  # rejects an unknown policy
        if self.budget is not None and self.budget_ratio is not None:
            raise Rejected("budget is given both in tokens and as a ratio; give one of them")
        if self.budget is None and self.budget_ratio is None:
            raise Rejected(
                f"policy {self.policy} needs a budget; give --budget TOKENS or --budget-ratio SHARE"
            )
        if self.budget is not None and self.budget < least:
            if self.budget < 1:
                raise Rejected(f"budget must be positive, not {self.budget}")
            raise Rejected(
                f"budget {self.budget} is too small for {self.policy}: at least {least} "
                f"({self._kept_by_protection} + 1)"
            )
        if self.budget_ratio is not None and not 0.0 < self.budget_ratio <= 1.0:
            raise Rejected(f"budget_ratio must be in (0, 1], not {self.budget_ratio}")

    @property
    def params(self) -> PolicyParams:
        """What the policies are given. Raises `Rejected` for a value out of range."""
        return PolicyParams(
            sinks=self.sinks,
            seed=self.seed,
            recent_share=self.recent_share,
            window=self.window,
            recovery=self.recovery,
        )

    @cached_property
    def policy_class(self) -> type[Policy] | None:
        return None if self.policy == "none" else find_policy(self.policy)

    @property
    def needs_scores(self) -> bool:
        """Whether the policy asks for attention weights."""
        return self.policy_class is not None and self.policy_class.needs is not ScoreNeed.NONE

    @cached_property
    def least_budget(self) -> int:
        """Smallest budget in tokens that the policy and the protected tokens leave room for."""
        policy = self.policy_class
        if policy is None:
            return 1
        try:
            least = int(policy.min_budget(self.params))
        except Exception as error:
            raise Rejected(
                f"policy {self.policy} does not say its least budget: {error}"
            ) from error
        return max(least, self.keep_first + 1) + self.keep_recent

    @property
    def _kept_by_protection(self) -> str:
        values = {
            "sinks": self.sinks,
            "keep_first": self.keep_first,
            "keep_recent": self.keep_recent,
        }
        known = [f"{name} {value}" for name, value in values.items() if value]
        return ", ".join(known) or "what the policy keeps"

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
        share = self.budget_ratio * num_tokens
        return max(self.least_budget, math.ceil(share - 1e-9))  # 0.07 of 100 is 7, also in binary

    def for_request(self, values: Mapping[str, Any]) -> VTokenConfig:
        """The same with what one request asks for itself; this very object if it asks nothing.

        Args:
            values: the request's extra arguments: `vtoken_policy` ("none" evicts nothing),
                `vtoken_budget` (tokens), `vtoken_budget_ratio` (share), `vtoken_score_mode` and
                the other options of scores. Those that do not begin with `vtoken_` are left
                alone. A policy without a budget keeps the server's.

        Raises:
            Rejected: an unknown name, or a value that this server does not take.
        """
        asked = {name: values[name] for name in values if str(name).startswith("vtoken_")}
        if not asked:
            return self
        for name in asked:
            if name not in REQUEST_OPTIONS:
                raise Rejected(
                    f"unknown request option {name!r}; known: {', '.join(REQUEST_OPTIONS)}"
                )
        if self.policy == "none":
            raise Rejected(
                "requests can choose a policy or budget only where the server has a policy; start "
                "it with --policy"
            )
        changes: dict[str, Any] = {name.removeprefix("vtoken_"): v for name, v in asked.items()}
        if "budget" in changes or "budget_ratio" in changes or changes.get("policy") == "none":
            changes = {"budget": None, "budget_ratio": None, **changes}
        if changes.get("score_mode") == "exact":  # the server's options of sampling go with it
            plain = {name: getattr(VTokenConfig, name) for name in ("score_layers", "score_every")}
            changes = {**plain, **changes}
        policy = changes.get("policy", self.policy)
        if (
            self.request_policies != "any"
            and policy != self.policy
            and isinstance(policy, str)
            and ":" in policy
        ):
            raise Rejected(
                f"vtoken_policy {policy!r} names a module, which only a server with "
                "--request-policies any takes from a request; give a registered name"
            )
        try:
            return replace(self, **changes)
        except Rejected as refused:
            reason = refused.reason
            for flag in ("budget-ratio", "budget", "policy", "score-mode"):
                reason = reason.replace(f"--{flag}", f"vtoken_{flag.replace('-', '_')}")
            raise Rejected(f"this request's vtoken options: {reason}") from None

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


def _check_eviction(config: VTokenConfig) -> None:
    for name in ("slack", "keep_first", "keep_recent"):
        if getattr(config, name) < 0:
            raise Rejected(f"{name} must be 0 or more, not {getattr(config, name)}")
    for name, known in (
        ("on_policy_error", ON_POLICY_ERROR),
        ("request_policies", REQUEST_POLICIES),
    ):
        value = getattr(config, name)
        if value not in known:
            raise Rejected(f"unknown {name} {value!r}; choose one of: {', '.join(known)}")
    limit = config.policy_time_limit_ms
    if limit is not None and not limit > 0:
        raise Rejected(
            f"policy_time_limit_ms must be positive, not {limit}; leave it out for no limit"
        )
    _ = config.params  # rejects what is out of range


def _check_scores(config: VTokenConfig) -> None:
    if config.score_mode not in SCORE_MODES:
        raise Rejected(
            f"unknown score_mode {config.score_mode!r}; choose one of: {', '.join(SCORE_MODES)}"
        )
    for name in SCORE_COUNTS:
        if getattr(config, name) < 1:
            raise Rejected(f"{name} must be positive, not {getattr(config, name)}")
    defaults = {field.name: field.default for field in fields(VTokenConfig)}
    for name in ("score_layers", "score_every"):
        if config.score_mode != "sampled" and getattr(config, name) != defaults[name]:
            raise Rejected(
                f"{name} is an option of score_mode sampled, not {config.score_mode}; give "
                "--score-mode sampled, or leave it out"
            )


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
    for name in (*_COUNTS, *SCORE_COUNTS):
        value = getattr(config, name)
        if value is None and name in OPTIONAL_COUNTS:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise Rejected(f"{name} must be a whole number, not {value!r}")
    for name in ("threshold", "recent_share", "recovery", "policy_time_limit_ms"):
        value = getattr(config, name)
        if value is None and name == "policy_time_limit_ms":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Rejected(f"{name} must be a number, not {value!r}")
    for name in ("force_sync", "keep_prompt"):
        if not isinstance(getattr(config, name), bool):
            raise Rejected(f"{name} must be true or false, not {getattr(config, name)!r}")
    for name in (
        "policy",
        "reclaim",
        "shared_prefix",
        "on_policy_error",
        "request_policies",
        "score_mode",
    ):
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
