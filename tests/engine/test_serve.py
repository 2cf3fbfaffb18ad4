"""`vtoken serve` as its users meet it: OpenAI clients, vLLM's own flags, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from support import broken_policies
from support.processes import BLOCKS, SMALL, VTOKEN, Server, environment, vtoken
from vtoken.config import VTokenConfig
from vtoken.models import ensure_tiny_llama
from vtoken.vllm.enable import engine_flags

pytestmark = pytest.mark.engine

BUDGET = 48
POLICY = ("--policy", "streaming-llm", "--budget", str(BUDGET), "--reclaim", "eager")
#: ceil(budget / block) + 1
MOST_BLOCKS = 3
MODEL = "tiny"
PROMPT = "a tale of two blocks, and of what was left of them when their tokens had gone"


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(ensure_tiny_llama())


@pytest.fixture(scope="module")
def shared_server(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    flags = [*POLICY, "--checks", "3", *SMALL, "--served-model-name", MODEL]
    started = Server([str(VTOKEN), "serve", tiny, *flags], log)
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.kill()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server; each test must leave it healthy, idle and without a block held."""
    yield shared_server
    assert shared_server.healthy()
    shared_server.wait_until_idle()


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(server: Server, text: str = PROMPT, tokens: int = 80, **more: Any) -> Any:
    return client(server).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        **more,
    )


def test_a_chat_runs_past_the_budget(server: Server) -> None:
    answer = chat(server)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 80
    assert answer.usage.prompt_tokens > BUDGET


def test_a_stream_gives_the_text_of_the_whole_answer(server: Server) -> None:
    whole = chat(server).choices[0].message.content
    chunks = [c for c in chat(server, stream=True) if c.choices]
    assert len(chunks) > 10
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole


def test_a_long_answer_holds_no_more_blocks_than_its_budget_needs(server: Server) -> None:
    assert 0 < most_blocks_held(server) <= MOST_BLOCKS


def most_blocks_held(server: Server) -> int:
    """Blocks held while 400 tokens are produced, as vLLM's own metrics tell; natively 13.

    A busy server may answer for its metrics only when all is over, so it may take more than once.
    """

    def produce() -> None:
        client(server).completions.create(
            model=MODEL,
            prompt="once",
            max_tokens=400,
            temperature=0,
            extra_body={"ignore_eos": True},
        )

    peaks = (watch(server, [produce])[0] for _ in range(5))
    return next((peak for peak in peaks if peak), 0)


def watch(server: Server, calls: Sequence[Callable[[], None]]) -> tuple[int, int]:
    """Make the calls at once; the most blocks held and the most requests running meanwhile."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    loads = [server.load()]
    deadline = time.monotonic() + 90
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < deadline, "a client waits for ever"
        loads.append(server.load())
    return max(load.blocks for load in loads), max(load.running for load in loads)


def test_eight_clients_of_which_one_leaves_midway(server: Server) -> None:
    """The other seven get what was asked for; no request and no block stays behind."""
    produced = server.metrics()["vllm:generation_tokens_total"]
    answers: dict[int, Any] = {}
    seen: list[str] = []
    gate = threading.Barrier(8)

    def ask(number: int) -> None:
        gate.wait(timeout=30)
        answers[number] = chat(server, f"client {number}: {PROMPT}", 300)

    def leave() -> None:
        gate.wait(timeout=30)
        stream = chat(server, f"the one who leaves: {PROMPT}", 350, stream=True)
        for chunk in stream:
            seen.extend(c.delta.content for c in chunk.choices if c.delta.content)
            if len(seen) == 10:
                break
        stream.close()

    blocks, running = watch(server, [*(partial(ask, n) for n in range(7)), leave])
    assert sorted(answers) == list(range(7))
    for answer in answers.values():
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 300
    assert running > 1, "the clients were not served together"
    # A prompt of some 120 tokens comes whole, and is pruned when the decode starts.
    assert MOST_BLOCKS < blocks <= 8 * (MOST_BLOCKS + 2)
    server.wait_until_idle()
    produced = server.metrics()["vllm:generation_tokens_total"] - produced
    assert 7 * 300 < produced < 7 * 300 + 350, "the request that was left ran to its end"
    assert chat(server, tokens=5).usage.completion_tokens == 5


@pytest.mark.parametrize(
    "request_body",
    [{"extra_body": {"prompt_logprobs": 1}}, {"echo": True, "logprobs": 1}],
    ids=["prompt_logprobs", "echo"],
)
def test_prompt_logprobs_are_refused_with_the_reason(
    server: Server, request_body: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be combined with token eviction"):
        client(server).completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, **request_body)


def complete(server: Server, **xargs: Any) -> Any:
    return client(server).completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": xargs},
    )


def test_a_request_chooses_its_own_policy_and_budget(server: Server) -> None:
    """Claim: what it asks for is what it gets: with everything kept, another answer than with
    little, and the server's own policy where it asks for nothing."""
    everything = complete(server, vtoken_policy="none").choices[0]
    little = complete(server, vtoken_policy="random", vtoken_budget=8).choices[0]
    share = complete(server, vtoken_budget_ratio=1.0).choices[0]
    seldom = {"vtoken_score_mode": "sampled", "vtoken_score_every": 2, "vtoken_score_layers": 1}
    looked_at = complete(server, vtoken_policy="h2o", vtoken_budget=12, **seldom).choices[0]
    assert {c.finish_reason for c in (everything, little, share, looked_at)} == {"length"}
    assert share.text == everything.text != little.text


@pytest.mark.parametrize(
    ("xargs", "reason"),
    [
        ({"vtoken_policy": "h3o"}, "unknown policy 'h3o'; choose one of"),
        ({"vtoken_policy": "os:path"}, "only a server with --request-policies any"),
        ({"vtoken_budget": 4}, "budget 4 is too small for streaming-llm: at least 5"),
        ({"vtoken_budget": "many"}, "budget must be a whole number of tokens, not 'many'"),
        ({"vtoken_budget_ratio": 2}, r"budget_ratio must be in \(0, 1\], not 2"),
        ({"vtoken_budgte": 9}, "unknown request option 'vtoken_budgte'"),
        ({"vtoken_score_mode": "guessed"}, "unknown score_mode 'guessed'; choose one of: exact"),
        ({"vtoken_score_every": 4}, "give vtoken_score_mode sampled, or leave it out"),
    ],
)
def test_what_a_request_asks_for_wrongly_is_refused_with_the_reason(
    server: Server, xargs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        complete(server, **xargs)


def test_what_vllm_rejects_stays_a_clear_rejection(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(server, "word " * 600)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client(server).completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client(server).completions.create(model="nobody", prompt=PROMPT)


def test_sigterm_lets_it_finish_what_it_answers(shared_server: Server) -> None:
    """The last test of the shared server."""
    stream = iter(chat(shared_server, tokens=40, stream=True))
    next(stream)
    begin = time.monotonic()
    assert shared_server.stop(signal.SIGTERM) == 0
    assert time.monotonic() - begin < 30
    assert [c.choices[0].finish_reason for c in stream][-1] == "length"
    assert not shared_server.healthy()
    for unwanted in ("Traceback", "violated", "nanobind", "resource_tracker"):
        assert unwanted not in shared_server.log


@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_while_the_engine_starts_ends_all_of_it(
    tiny: str, tmp_path: Path, number: int, group: bool
) -> None:
    """vLLM alone overlooks a SIGTERM at this time, and serves on."""
    starting = Server([str(VTOKEN), "serve", tiny, *POLICY, *SMALL], tmp_path / "log.txt")
    try:
        starting.wait_for_log("EngineCore pid=")
        assert starting.stop(number, group=group) == 130, starting.log[-2000:]
        assert last_line(starting.log) == "vtoken: interrupted"
        starting.wait_until_gone()
    finally:
        starting.kill()


def test_a_refusal_in_the_engine_process_is_one_line(tiny: str) -> None:
    """Only the engine knows its pool; the server says what it said, without a stack trace."""
    done = vtoken("serve", tiny, "--policy", "random", "--budget", "100000", *SMALL)
    assert done.returncode == 2
    assert last_line(done.stderr).startswith(
        f"vtoken: the KV pool holds {32 * BLOCKS} tokens ({BLOCKS} blocks of 32), less than the "
        "budget of 100000; lower --budget"
    )
    assert "Traceback" not in done.stderr


def test_a_violation_stops_the_server_and_is_its_last_word(tiny: str, tmp_path: Path) -> None:
    others = broken_policies.install(tmp_path)
    flags = ["--policy", "unlawful", "--budget", "16", *SMALL, "--served-model-name", MODEL]
    failing = Server([str(VTOKEN), "serve", tiny, *flags], tmp_path / "log.txt", others)
    try:
        failing.wait_until_healthy()
        with pytest.raises(openai.InternalServerError):
            chat(failing)
        assert failing.process.wait(timeout=30) == 1
    finally:
        failing.kill()
    assert failing.log.rstrip().endswith(f"vtoken: {broken_policies.REPORT}")


def test_a_policy_that_fails_ends_its_requests_and_nobody_waits(tiny: str, tmp_path: Path) -> None:
    others = broken_policies.install(tmp_path)
    flags = ["--policy", "crashing", "--budget", "16", *SMALL, "--served-model-name", MODEL]
    failing = Server([str(VTOKEN), "serve", tiny, *flags], tmp_path / "log.txt", others)
    try:
        failing.wait_until_healthy()
        choice = complete(failing).choices[0]
        assert choice.finish_reason == "abort"
        assert "policy crashing failed for request" in choice.model_extra["stop_reason"]
        assert "it raised RuntimeError: no idea" in choice.model_extra["stop_reason"]
        *_, last = (c.choices[0] for c in chat(failing, stream=True) if c.choices)
        assert last.finish_reason == "abort"
        # Another policy serves on, beside it.
        assert complete(failing, vtoken_policy="random").choices[0].finish_reason == "length"
        failing.wait_until_idle()
    finally:
        failing.kill()
    assert failing.log.count("--on-policy-error keep-tokens would let it go on") == 2


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--no-such-flag", "3"], "unrecognized arguments: --no-such-flag"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (["--max-model-len", "99999999"], "vLLM does not accept these options"),
        (["--worker-cls", "some.Worker"], "--worker-cls is vToken's own here"),
        (["--additional-config", '{"vtoken": {}}'], "--additional-config has a 'vtoken' entry"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_in_one_line(
    tiny: str, flags: list[str], reason: str
) -> None:
    """In this process, since only the import of vLLM takes long."""
    from vtoken.errors import Rejected
    from vtoken.vllm.server import parse_flags, serve_forever

    with pytest.raises(Rejected) as caught:
        serve_forever(parse_flags(VTokenConfig(), [tiny, *flags]))
    assert str(caught.value).startswith(reason)


def test_flags_of_vllm_pass_through_next_to_vtokens_own(tiny: str) -> None:
    from vtoken.vllm.server import parse_flags

    config = VTokenConfig(policy="random", budget=64)
    flags = ["--model", tiny, "--seed", "7", "--additional-config", '{"other": 1}']
    args = parse_flags(config, [*flags, "--logits-processors", "some.module:Processor", "-tp", "2"])
    assert (args.model, args.seed, args.tensor_parallel_size) == (tiny, 7, 2)
    assert (args.dtype, args.block_size) == ("float32", 32)
    assert parse_flags(config, [tiny, "--dtype", "bfloat16"]).dtype == "bfloat16"
    assert args.additional_config == {"other": 1, "vtoken": config.as_dict()}
    assert args.logits_processors == [
        "some.module:Processor",
        "vtoken.vllm.request_guard:RequestGuard",
    ]


@pytest.mark.parametrize(
    ("policy", "flags", "named"),
    [
        ("random", [], "TRITON_ATTN"),
        ("random", ["--attention-backend", "FLASH_ATTN"], "FLASH_ATTN"),
        ("random", ["--attention-config.backend", "FLASH_ATTN"], None),
        ("none", [], None),
    ],
)
def test_on_a_gpu_a_policy_gets_the_backend_that_can_skip_holes(
    monkeypatch: pytest.MonkeyPatch, tiny: str, policy: str, flags: list[str], named: str | None
) -> None:
    from vtoken.vllm import holes
    from vtoken.vllm.server import parse_flags

    monkeypatch.setattr(holes, "on_cpu", lambda: False)
    config = VTokenConfig(policy=policy, budget=None if policy == "none" else 64)
    args = parse_flags(config, [tiny, *flags])
    assert getattr(args.attention_backend, "name", args.attention_backend) == named


def test_vllms_own_flags_alone_turn_it_on(tiny: str, tmp_path: Path) -> None:
    config = VTokenConfig(policy="streaming-llm", budget=BUDGET, checks=2)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", tiny, "--served-model-name", MODEL, *SMALL),
        *engine_flags(config, platform="cpu"),
    ]
    plain = Server(command, tmp_path / "log.txt")
    try:
        plain.wait_until_healthy()
        assert 0 < most_blocks_held(plain) <= MOST_BLOCKS
        with pytest.raises(openai.BadRequestError, match="token eviction"):
            client(plain).completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=4, extra_body={"prompt_logprobs": 1}
            )
        plain.wait_until_idle()
        plain.stop()
    finally:
        plain.kill()


_PYTHON_FORM = """
import json, sys
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST as known

load_general_plugins()
managers = {spec.__name__: entry.manager_class.__name__ for spec, entry in known.items()}

from vllm import LLM, SamplingParams
from vtoken.vllm.enable import engine_kwargs

llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", block_size=32, max_model_len=512,
          kv_cache_memory_bytes=16 << 20, disable_log_stats=True,
          **engine_kwargs(policy="streaming-llm", budget=48, checks=2))
params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
output = llm.generate(["once upon a time"], params, use_tqdm=False)[0]
report = llm.llm_engine.engine_core.engine_core.scheduler.vtoken_report()
print(json.dumps([managers, len(output.outputs[0].token_ids), report]))
"""


def test_python_turns_it_on_with_one_call_and_vllm_loads_the_plugin(tiny: str) -> None:
    """vLLM only logs a plugin that fails, so what the plugin registers is looked at."""
    done = subprocess.run(
        [sys.executable, "-c", _PYTHON_FORM, tiny],
        capture_output=True,
        text=True,
        env=environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    managers, tokens, report = json.loads(done.stdout.splitlines()[-1])
    assert managers["VTokenAttentionSpec"] == "VTokenManager"
    assert tokens == 100
    assert report["tokens"]["evicted"] > 0
    assert report["blocks_peak"]["vtoken"] <= MOST_BLOCKS < report["blocks_peak"]["native"]
    assert report["pool"]["free"] == report["pool"]["total"]


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]
