"""Eviction policies: one file each, behind a protocol that knows only tokens."""

from vtoken.policies.base import Policy, PolicyParams, PolicyView, oldest_live, outside_recent
from vtoken.policies.registry import find_policy, policy_names
from vtoken.policies.scores import ScoreNeed, StepScores

__all__ = [
    "Policy",
    "PolicyParams",
    "PolicyView",
    "ScoreNeed",
    "StepScores",
    "find_policy",
    "oldest_live",
    "outside_recent",
    "policy_names",
]
