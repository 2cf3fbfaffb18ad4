"""For tests of and with vToken: an engine without a model, and the fuzzing campaign on it."""

from vtoken.testing.harness import ByteFault, FakeEngine
from vtoken.testing.pool import FakePool, PoolFault

__all__ = ["ByteFault", "FakeEngine", "FakePool", "PoolFault"]
