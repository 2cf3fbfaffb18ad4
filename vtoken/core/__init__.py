"""The virtualization boundary itself: table, block usage index, planner, reclaimer.

Takes events and returns plans. Imports neither torch nor vLLM.
"""

from vtoken.core.arrays import NO_SLOT
from vtoken.core.background import BackgroundParams
from vtoken.core.evacuation import plan_evacuation
from vtoken.core.flight import EvacuationPlan, Flight
from vtoken.core.layout import CopyOrder, LayoutChange, StepLayout, StepOrders
from vtoken.core.meter import BlockMeter, BlockUsage
from vtoken.core.observer import Observer, Observers
from vtoken.core.planner import DensePlan, plan_dense, releasable_blocks
from vtoken.core.ports import PoolPort
from vtoken.core.reclaimer import Reclaimer, ReclaimMode
from vtoken.core.request_table import RequestTable
from vtoken.core.table import TokenTable

__all__ = [
    "NO_SLOT",
    "BackgroundParams",
    "BlockMeter",
    "BlockUsage",
    "CopyOrder",
    "DensePlan",
    "EvacuationPlan",
    "Flight",
    "LayoutChange",
    "Observer",
    "Observers",
    "PoolPort",
    "ReclaimMode",
    "Reclaimer",
    "RequestTable",
    "StepLayout",
    "StepOrders",
    "TokenTable",
    "plan_dense",
    "plan_evacuation",
    "releasable_blocks",
]
