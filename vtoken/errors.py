"""Every error type of vToken; the type says who broke the contract.

| type | whose fault | expected in normal operation |
| --- | --- | --- |
| `Rejected` | the caller's | yes |
| `UnsupportedConfiguration` | the environment's | yes, at start |
| `ModelUnavailable` | the environment's | yes, before start |
| `EngineFailed` | vLLM's or the environment's | no |
| `PolicyError` | the eviction policy's | no |
| `TraceFormatError` | whoever wrote the file | yes |
| `InvariantViolation` | ours | never |

All of them survive pickling, because vLLM's engine may run in another process than its caller.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "EngineFailed",
    "InvariantViolation",
    "ModelUnavailable",
    "PolicyError",
    "Rejected",
    "TraceFormatError",
    "UnsupportedConfiguration",
    "VTokenError",
]


class VTokenError(Exception):
    """Base of all errors that vToken raises on purpose.

    When: never raised itself. What to do: catch this to tell vToken's own errors from others.
    """


class Rejected(VTokenError):
    """An operation was asked for that its contract does not allow; nothing was changed.

    When: evicting an unknown, dead or not yet computed token, an option out of range, and the like.
    Whose fault: the caller's. What to do: read `reason`, mend the call; the state is as before.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnsupportedConfiguration(VTokenError):
    """This model, vLLM version or combination of options is outside what vToken can serve exactly.

    When: at start, before any request is accepted. Whose fault: the environment's. What to do: the
    message names the reason and the way out, in one line.
    """


class ModelUnavailable(VTokenError):
    """A local checkpoint could be neither found nor built.

    When: the download failed, a checksum differs, the cache folder cannot be written. Whose fault:
    the environment's. What to do: the message names the cause and the way out, in one line.
    """


class EngineFailed(VTokenError):
    """vLLM's engine stopped, for a reason that is not one of vToken's own errors.

    When: out of memory, a killed process, a bug elsewhere. Whose fault: vLLM's or the
    environment's. What to do: the message has the cause; vLLM's own log has the place.
    """


class PolicyError(VTokenError):
    """An eviction policy failed: it raised, named a token that may not go, or took too long.

    When: asked for victims, or shown attention weights, while serving. Whose fault: the policy's.
    What to do: mend the policy, or choose another. Contained: nothing of the call took effect, and
    only the request it was asked for ends, or goes on without eviction (`on_policy_error`).

    Attributes:
        policy: name of the policy.
        req_id: request concerned.
        reason: what it did, in one line.
    """

    def __init__(
        self, message: str, *, policy: str = "", req_id: str = "", reason: str = ""
    ) -> None:
        super().__init__(message)
        self.policy = policy
        self.req_id = req_id
        self.reason = reason


class TraceFormatError(VTokenError):
    """A trace is empty, cut off, of an unknown version, or not a trace at all.

    When: reading a trace, before any of it is replayed. Whose fault: whoever wrote or cut the file.
    What to do: record again, or replay with the version of vToken that the trace names.
    """


class InvariantViolation(VTokenError):
    """A law of `spec/LAWS.md` does not hold: a bug in vToken, found by its own checks.

    When: an online check failed. Whose fault: ours. What to do: do not trust the outputs of that
    request; keep the report and the trace, and file them. Never caught in order to go on silently.

    Attributes:
        law: id of the law, such as "I2".
        message: one sentence that names the broken part of the law, with its terms.
        req_id: request concerned, or None where the law is about the whole pool.
        token_id: logical token id, or None.
        slot: block * block_size + offset, or None.
        before: the state that the law was entitled to (any value with a readable repr), or None.
        after: the state found, or None.
    """

    def __init__(
        self,
        law: str,
        message: str,
        *,
        req_id: str | None = None,
        token_id: int | None = None,
        slot: int | None = None,
        before: object = None,
        after: object = None,
    ) -> None:
        super().__init__(law, message)
        self.law = law
        self.message = message
        self.req_id = req_id
        self.token_id = token_id
        self.slot = slot
        self.before = before
        self.after = after

    def __str__(self) -> str:
        """The report, several lines; a field that does not apply is left out."""
        fields: tuple[tuple[str, object], ...] = (
            ("request", self.req_id),
            ("token", self.token_id),
            ("slot", self.slot),
            ("before", self.before),
            ("after", self.after),
        )
        lines = [f"law {self.law} is violated: {self.message}"]
        lines += [f"  {name:<8} {_readable(value)}" for name, value in fields if value is not None]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from `args` alone. Fields and notes live in __dict__, which travels
        # as the third item and is put back after construction.
        return (type(self), (self.law, self.message), self.__dict__)


def _readable(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
