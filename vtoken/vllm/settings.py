"""Reads vToken's configuration out of vLLM's, and writes it there."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vtoken.config import VTokenConfig

KEY = "vtoken"


def settings_of(vllm_config: VllmConfig) -> VTokenConfig:
    """vToken's configuration in `additional_config["vtoken"]`; defaults if there is none.

    Raises:
        Rejected: an unknown option or a value out of range.
    """
    extra: Any = vllm_config.additional_config
    values = extra.get(KEY, {}) if isinstance(extra, dict) else {}
    return VTokenConfig.from_mapping(values)
