"""The virtualization boundary itself: table, block usage index, planner, reclaimer.

Takes events and returns plans. Imports neither torch nor vLLM.
"""

from vtoken.core.arrays import NO_SLOT
from vtoken.core.meter import BlockMeter, BlockUsage
from vtoken.core.observer import LayoutChange, Observer, Observers
from vtoken.core.planner import DensePlan, plan_dense, releasable_blocks
from vtoken.core.reclaimer import PoolPort, Reclaimer, ReclaimMode, StepLayout
from vtoken.core.request_table import RequestTable
from vtoken.core.table import TokenTable

__all__ = [
    "NO_SLOT",
    "BlockMeter",
    "BlockUsage",
    "DensePlan",
    "LayoutChange",
    "Observer",
    "Observers",
    "PoolPort",
    "ReclaimMode",
    "Reclaimer",
    "RequestTable",
    "StepLayout",
    "TokenTable",
    "plan_dense",
    "releasable_blocks",
]
