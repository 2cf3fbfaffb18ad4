"""What a single request may ask for itself, judged where vLLM validates requests.

That is the front end's process, which has no access to the engine's configuration. Where vToken
built that configuration (`vtoken serve`, `engine_kwargs`), it leaves it in an environment variable,
which further front-end processes inherit. With vLLM's own flags alone there is none: names, types
and ranges are judged all the same, and what depends on the server's options is left to the
scheduler, which ends the request and tells why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import Rejected

#: environment variable with the configuration as JSON; empty where engines of one process differ
SETTINGS = "VTOKEN_SETTINGS"

#: stands for an unknown configuration: refuses nothing that some server would take
_UNKNOWN = VTokenConfig(policy="sliding-window", budget=1 << 30, sinks=0)


def announce(settings: VTokenConfig) -> None:
    """Leave the configuration for the front end's processes."""
    text = json.dumps(settings.as_dict())
    known = os.environ.get(SETTINGS, text)
    os.environ[SETTINGS] = text if known == text else ""


def check_request(extra_args: Mapping[str, Any] | None) -> None:
    """Raise `Rejected` if the request's own options are not for this server."""
    if not extra_args or not any(str(name).startswith("vtoken_") for name in extra_args):
        return
    text = os.environ.get(SETTINGS)
    if text:
        _check_scores(VTokenConfig.from_mapping(json.loads(text)).for_request(extra_args))
        return
    values = dict(extra_args)
    policy = values.get("vtoken_policy")
    if isinstance(policy, str) and ":" in policy:
        values.pop("vtoken_policy")  # whether it may be loaded is the server's to say
    _check_scores(_UNKNOWN.for_request(values))


def _check_scores(asked: VTokenConfig) -> None:
    if not asked.needs_scores:
        return
    from vtoken.vllm.score_support import announced, no_scores_for  # imports vLLM

    if why_not := no_scores_for(asked, announced()):
        raise Rejected(f"this request's vtoken options: {why_not}")
