"""For tests of and with vToken: an engine without a model, the fuzzing campaign on it, and the
conformance suites, which hold other implementations to the same laws."""

from vtoken.testing.conformance import ConformanceError, ConformanceReport
from vtoken.testing.conformance_model import ModelTable, TokenTableLike
from vtoken.testing.conformance_mover import MoverLike, check_mover
from vtoken.testing.conformance_stream import check_copy_stream
from vtoken.testing.conformance_stream_run import ComputeStream
from vtoken.testing.conformance_table import check_token_table
from vtoken.testing.harness import ByteFault, FakeEngine
from vtoken.testing.pool import FakePool, PoolFault

__all__ = [
    "ByteFault",
    "ComputeStream",
    "ConformanceError",
    "ConformanceReport",
    "FakeEngine",
    "FakePool",
    "ModelTable",
    "MoverLike",
    "PoolFault",
    "TokenTableLike",
    "check_copy_stream",
    "check_mover",
    "check_token_table",
]
