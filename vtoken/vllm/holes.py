"""Whether requests will have rows with holes, and what this configuration's attention does then.

Everything here is known from the configuration alone, so that the scheduler, every worker and the
refusals come to the same answer.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vtoken.config import BACKGROUND_OPTIONS, VTokenConfig
from vtoken.vllm.views import View, capability_of


def on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def leaves_holes(config: VllmConfig, settings: VTokenConfig) -> bool:
    """Whether attention may meet rows with holes before their physical end. Eager filling leaves
    them in blocks alone that requests share."""
    if settings.policy == "none":
        return False
    return settings.reclaim != "eager" or bool(config.cache_config.enable_prefix_caching)


def has_view(config: VllmConfig) -> bool:
    """Whether rows with holes can be read: by the gather view of CPU attention, or the page-1 view.

    The backend of the latter has to be named: which one vLLM would choose is not known yet.
    """
    return on_cpu() or has_page_view(config)


def has_page_view(config: VllmConfig) -> bool:
    named = config.attention_config.backend
    return named is not None and capability_of(named.name).with_holes is View.PAGE_1


def has_full_graphs(config: VllmConfig) -> bool:
    """Whether vLLM replays attention from CUDA graphs; their mode is None until it has decided."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.has_full_cudagraphs()


def filled_eagerly(config: VllmConfig, asked: VTokenConfig) -> VTokenConfig:
    """`asked`, or eager filling in place of background where no view lets holes wait for it.

    With prefix caching holes stay in shared blocks all the same, and without reclamation that is
    what was asked for: there `guards.py` refuses.
    """
    other = asked.reclaim != "background" or bool(config.cache_config.enable_prefix_caching)
    if asked.policy == "none" or other or has_view(config):
        return asked
    values = asked.as_dict()
    for name in BACKGROUND_OPTIONS:
        values.pop(name)
    return VTokenConfig.from_mapping({**values, "reclaim": "eager"})
