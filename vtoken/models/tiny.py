"""A random Llama of a few hundred thousand weights, for tests that need an engine but no sense.

The weights are scaled so that a mistake shows and rounding does not: attention is neither flat nor
one-hot, and every block adds to the residual about as much as it finds there. At the default sizes,
on 300 random tokens, logits have a standard deviation of 0.75, fp32 rounding moves none of them by
more than 2e-6, and hiding 36 of the tokens moves some logit of every later row by more than 0.5.
"""

from __future__ import annotations

import itertools
import math
import os
import string
from pathlib import Path
from typing import TYPE_CHECKING

from vtoken.errors import Rejected
from vtoken.models.checkpoint import Progress, Recipe, ensure_checkpoint, write_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONVERTER_VERSION = 1
"""Raise this whenever what is written here changes: cached checkpoints are then stale."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|begin|>", "<|pad|>")
"""Ids 0, 1 and 2; the 256 byte tokens follow, then pairs of letters."""
_BYTES = 256
_PAIRS = len(string.ascii_lowercase) ** 2
MIN_VOCAB = len(SPECIAL_TOKENS) + _BYTES
MAX_VOCAB = MIN_VOCAB + _PAIRS


def ensure_tiny_llama(
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    max_position: int = 4096,
    seed: int = 0,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Folder of a random Llama checkpoint in fp32 with a byte-level tokenizer; built on first use.

    Args:
        cache_dir: see `vtoken.models.checkpoint.cache_root`.
        layers, hidden, heads, kv_heads, head_dim, vocab, max_position: sizes of the model. vLLM's
            CPU attention wants a head_dim of 32, 64, 80, 96, 112, 128 or more.
        seed: of the weights; equal arguments give equal bytes.
        verify: hash every file of a checkpoint that is there, not only compare sizes.
        progress: called with (stage, fraction done).

    Raises:
        Rejected: sizes that make no model or no tokenizer.
        ModelUnavailable: an unusable cache.
    """
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "max_position": max_position,
    }
    for name, size in sizes.items():
        if size < 1:
            raise Rejected(f"{name} is {size}, and must be at least 1")
    if heads % kv_heads:
        raise Rejected(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    if head_dim % 2:
        raise Rejected(f"head_dim is {head_dim}, and must be even for rotary embedding")
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise Rejected(f"vocab is {vocab}, and must be from {MIN_VOCAB} to {MAX_VOCAB}")

    def build(checkpoint: Path, scratch: Path) -> None:
        from safetensors.numpy import save_file

        write_json(checkpoint / "config.json", _config(sizes))
        write_json(
            checkpoint / "generation_config.json",
            {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2},
        )
        _write_tokenizer(sizes, checkpoint)
        tensors = _tensors(sizes, seed)
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})

    recipe = Recipe("tiny-llama", {"converter": CONVERTER_VERSION, "seed": seed, **sizes})
    return ensure_checkpoint(recipe, build, cache_dir=cache_dir, verify=verify, progress=progress)


def _intermediate(sizes: dict[str, int]) -> int:
    return 2 * sizes["hidden"]


def _config(sizes: dict[str, int]) -> dict[str, object]:
    rope_theta = 10000.0
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "head_dim": sizes["head_dim"],
        "hidden_act": "silu",
        "hidden_size": sizes["hidden"],
        "initializer_range": 0.02,
        "intermediate_size": _intermediate(sizes),
        "max_position_embeddings": sizes["max_position"],
        "mlp_bias": False,
        "num_attention_heads": sizes["heads"],
        "num_hidden_layers": sizes["layers"],
        "num_key_value_heads": sizes["kv_heads"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": sizes["vocab"],
    }


def _tensors(sizes: dict[str, int], seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights by name, fp32. A matrix of shape [out, in] has standard deviation gain / sqrt(in), so
    that an input of unit variance leaves with variance gain squared, whatever the sizes."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * (gain / math.sqrt(columns))).astype(
            np.float32
        )

    def norm() -> NDArray[np.float32]:
        # Not all ones: a norm that is left out, or applied twice, must show.
        return (1.0 + 0.1 * rng.standard_normal(sizes["hidden"])).astype(np.float32)

    hidden, inner = sizes["hidden"], _intermediate(sizes)
    q_rows, kv_rows = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    out = {"model.embed_tokens.weight": matrix(sizes["vocab"], hidden, math.sqrt(hidden))}
    for layer in range(sizes["layers"]):
        at = f"model.layers.{layer}."
        out[at + "input_layernorm.weight"] = norm()
        # Scores q.k / sqrt(head_dim) get standard deviation 1; sharper ones amplify rounding.
        out[at + "self_attn.q_proj.weight"] = matrix(q_rows, hidden, 1.0)
        out[at + "self_attn.k_proj.weight"] = matrix(kv_rows, hidden, 1.0)
        # An average over many keys shrinks; a larger gain makes up for it.
        out[at + "self_attn.v_proj.weight"] = matrix(kv_rows, hidden, 2.0)
        out[at + "self_attn.o_proj.weight"] = matrix(hidden, q_rows, 2.0)
        out[at + "post_attention_layernorm.weight"] = norm()
        out[at + "mlp.gate_proj.weight"] = matrix(inner, hidden, 0.7)
        out[at + "mlp.up_proj.weight"] = matrix(inner, hidden, 0.7)
        out[at + "mlp.down_proj.weight"] = matrix(hidden, inner, 0.7)
    out["model.norm.weight"] = norm()
    out["lm_head.weight"] = matrix(sizes["vocab"], hidden, 0.75)
    return out


def _write_tokenizer(sizes: dict[str, int], checkpoint: Path) -> None:
    """Bytes, and pairs of letters up to the vocabulary's size: any text can be encoded, and every
    id that the model can produce can be decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = itertools.product(string.ascii_lowercase, repeat=2)
    merges = [(a, b) for a, b in itertools.islice(pairs, sizes["vocab"] - MIN_VOCAB)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS]
    )
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    write_json(
        checkpoint / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": sizes["max_position"],
            "eos_token": SPECIAL_TOKENS[0],
            "bos_token": SPECIAL_TOKENS[1],
            "pad_token": SPECIAL_TOKENS[2],
            "chat_template": "{% for message in messages %}{{ message['role'] + ': ' "
            "+ message['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        },
    )
