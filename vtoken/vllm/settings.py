"""Reads vToken's configuration out of vLLM's, and writes it there."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vtoken.config import VTokenConfig
from vtoken.vllm.holes import filled_eagerly

KEY = "vtoken"


def settings_of(vllm_config: VllmConfig) -> VTokenConfig:
    """What is in force: `asked_of`, or eager filling where the attention has no view for holes.

    Raises:
        Rejected: as there.
    """
    return filled_eagerly(vllm_config, asked_of(vllm_config))


def asked_of(vllm_config: VllmConfig) -> VTokenConfig:
    """vToken's configuration in `additional_config["vtoken"]`; defaults if there is none.

    Raises:
        Rejected: an unknown option or a value out of range.
    """
    extra: Any = vllm_config.additional_config
    values = extra.get(KEY, {}) if isinstance(extra, dict) else {}
    return VTokenConfig.from_mapping(values)
