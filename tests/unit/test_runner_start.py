"""A runner meets its KV cache: a small one first, where vLLM measures its CUDA graphs, then its
own."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtoken.errors import UnsupportedConfiguration

pytest.importorskip("vllm")
HEADS, SIZE, DIM = 2, 16, 8


class Impl:
    """Writes keys and values as vLLM's kernels do: a negative slot is padding."""

    alibi_slopes = None

    def __init__(self, shift: int = 0) -> None:
        self.num_heads, self.shift = HEADS, shift

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        for index, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot + self.shift, SIZE)
                cache[block, :, offset, :DIM] = key[index]
                cache[block, :, offset, DIM:] = value[index]


def runner(shift: int = 0) -> Any:
    from vtoken.vllm.runner_core import VTokenRunnerCore

    class Stock:
        """As much of a runner of vLLM's as starts."""

        def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
            gc.collect()
            self.kv_cache_config = config
            self.alive = [cache for cache in self.caches if cache() is not None]
            shape = (2, config.num_blocks, HEADS, SIZE, 2 * DIM)
            both = torch.zeros(shape)
            self.caches = [weakref.ref(both.untyped_storage())]
            for layer, cache in zip(self.layers.values(), both, strict=True):
                layer.kv_cache = cache

        def profile_run(self) -> None:
            made = self._vtoken_page_buffers, self._vtoken_queries
            self.reserved = [each is not None for each in made]

    class Runner(VTokenRunnerCore, Stock):
        pass

    made: Any = Runner()
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    made.layers = {
        name: SimpleNamespace(attn_backend=backend, impl=Impl(shift)) for name in ("a", "b")
    }
    made.caches, made.device = [], torch.device("cpu")
    made.compilation_config = SimpleNamespace(
        static_forward_context=made.layers, cudagraph_mode=None
    )
    made.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        attention_config=SimpleNamespace(backend=None),
        compilation_config=made.compilation_config,
        additional_config={},
    )
    return made


def config(num_blocks: int) -> Any:
    group = SimpleNamespace(layer_names=["a", "b"])
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])


def drop(made: Any) -> None:
    """As vLLM does with the cache that it has measured with."""
    for layer in made.layers.values():
        layer.kv_cache = None


@pytest.mark.parametrize("forgets", [True, False], ids=["let go of", "control"])
def test_a_cache_of_one_block_is_measured_with(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner()
    if not forgets:
        monkeypatch.setattr(made, "_forget_cache", lambda: None)
    made.initialize_kv_cache(config(1), is_profiling=True)
    drop(made)
    made.initialize_kv_cache(config(8))
    assert len(made.alive) == (0 if forgets else 1), "two caches at a time"
    assert made.vtoken_layout.num_blocks == 8


def test_the_cache_that_serves_is_probed() -> None:
    made = runner(shift=1)
    made.initialize_kv_cache(config(1), is_profiling=True)
    with pytest.raises(UnsupportedConfiguration, match="reads back other values"):
        made.initialize_kv_cache(config(8))


@pytest.mark.parametrize(
    ("policy", "reclaim", "full", "reserved"),
    [
        ("random", "off", True, [True, True]),
        ("random", "off", False, [True, False]),  # q is used in the layers
        ("random", "eager", True, [False, True]),  # no hole waits
        ("none", "eager", True, [False, False]),
    ],
)
def test_buffers_are_there_before_vllm_measures_what_is_left_for_its_pool(
    policy: str, reclaim: str, full: bool, reserved: list[bool]
) -> None:
    from vllm.config.compilation import CUDAGraphMode

    made = runner()
    budget = {} if policy == "none" else {"budget": 64}
    made.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False, cache_dtype="auto"),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="TRITON_ATTN")),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL if full else CUDAGraphMode.PIECEWISE,
            max_cudagraph_capture_size=8,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=32),
        model_config=SimpleNamespace(max_model_len=64, dtype=torch.float32),
        additional_config={"vtoken": {"policy": policy, "reclaim": reclaim, **budget}},
    )
    for layer in made.layers.values():
        layer.attn_backend = SimpleNamespace(get_name=lambda: "TRITON_ATTN")
        layer.impl.head_size = DIM
    made._meet_layers(made.layers)
    made.profile_run()
    assert made.reserved == reserved
    if reserved[1]:
        assert made._vtoken_queries.query("b").shape == (8, HEADS, DIM)
