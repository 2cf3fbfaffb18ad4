"""Eviction policies: one file each, behind a protocol that knows only tokens."""

from vtoken.policies.base import Policy, PolicyParams, PolicyView, oldest_live
from vtoken.policies.registry import find_policy, policy_names

__all__ = ["Policy", "PolicyParams", "PolicyView", "find_policy", "oldest_live", "policy_names"]
