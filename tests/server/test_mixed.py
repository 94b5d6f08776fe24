"""Many requests at once, all different: each gets the text it would get alone."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.sampling_params import SamplingParams

TEXT = "/v1/completions"
COUNT = 64
# three documents that many requests begin with, longer than a step's budget
SHARED = ("the king in a boat ", "an owl and a cat ", "the end of the tale ")
BUDGET = 32
TREE: dict[str, Any] = {"max_depth": 2, "top_k": 3, "max_nodes": 6}


def mixed(count: int) -> list[tuple[dict[str, Any], SamplingParams]]:
    """Request bodies and the same as parameters of the engine."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for index in range(count):
        tokens = 6 + index % 11
        body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        params: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        kind = index % 8
        if kind == 1:
            body |= {"temperature": 1.0, "seed": index}
            params |= {"temperature": 1.0, "seed": index}
        elif kind == 2:
            body |= {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
            params |= {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
        elif kind == 3:
            body |= {"stop": ["e", "the"], "min_tokens": 3}
            params |= {"stop": ("e", "the"), "min_tokens": 3}
        elif kind == 4:
            body |= {"speculative": {"enabled": False}, "temperature": 0.8, "top_k": 20, "seed": 9}
            params |= {"speculate": False, "temperature": 0.8, "top_k": 20, "seed": 9}
        elif kind == 5:
            body |= {"speculative": {**TREE, "adaptive": False}}
            params |= {"spec": SpecConfig(**TREE, adaptive=False)}
        elif kind == 6:
            body |= {"speculative": {**TREE, "adaptive": True}, "temperature": 0.9, "seed": index}
            params |= {"spec": SpecConfig(**TREE), "temperature": 0.9, "seed": index}
        elif kind == 7:
            body |= {"speculative": {"max_depth": 3, "adaptive": True}, "presence_penalty": 0.7}
            params |= {"spec": SpecConfig(max_depth=3, max_nodes=3), "presence_penalty": 0.7}
        pairs.append((body, params))
    return [(body, SamplingParams(**params)) for body, params in pairs]


@pytest.fixture(scope="module", params=["head", "ngram+head"])
def make_mixed(request: pytest.FixtureRequest, solo: Engine, drafted: Path) -> Callable[..., Engine]:
    """Engines with a head, and with lookup before it."""

    def make(**overrides: Any) -> Engine:
        spec = SpecConfig(max_depth=3, max_nodes=3, adaptive=False, ngram_min=1)
        settings: dict[str, Any] = {"block_size": 4, "kv_tokens": 4096, "spec": spec, "allow_lossy": True}
        draft = request.param.replace("head", str(drafted))
        return Engine(solo, draft=draft, config=EngineConfig(**{**settings, **overrides}))

    return make


def test_any_mix_of_64_requests_at_once_gives_each_the_text_of_its_solo_run(
    make_mixed: Callable[..., Engine], serving: Any
) -> None:
    """A small pool makes some give way, prompts come in chunks, one client in 16 leaves in the middle."""
    requests = mixed(COUNT)
    prompts = [f"{SHARED[index % 3] * 3}{'in a' * (index % 5)} {index % 7}" for index in range(COUNT)]
    alone_engine = make_mixed(prefix_cache=False)
    alone = [
        alone_engine.generate([prompt], params)[0]
        for prompt, (_, params) in zip(prompts, requests, strict=True)
    ]
    assert all(len(result.prompt_token_ids) > BUDGET for result in alone)
    texts: dict[int, str] = {}
    waiting = threading.Barrier(COUNT)
    engine = make_mixed(kv_tokens=256, max_num_seqs=COUNT, max_batch_tokens=BUDGET)
    with serving(engine, max_waiting=COUNT) as server:

        def ask(index: int) -> None:
            body = {**requests[index][0], "prompt": prompts[index]}
            waiting.wait(30)
            if index % 16 == 7:
                connection = server.connect(TEXT, {**body, "max_tokens": 60, "stream": True})
                connection.recv(1 if index % 32 == 7 else 600)
                connection.close()
            elif index % 2:
                events = server.events(TEXT, body)
                texts[index] = "".join(event["choices"][0]["text"] for event in events)
            else:
                texts[index] = server.post(TEXT, body)[1]["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.wait_until_idle()
        happened = {
            "preemptions": server.metric("num_preemptions_total"),
            "prefix hits": server.metric("prefix_cache_hits_total"),
            "drafts": server.metric("spec_decode_num_drafts_total"),
            "aborts": server.metric("request_finished_total", finished_reason="abort"),
        }
    assert all(happened.values()), happened
    assert len(texts) == COUNT - COUNT // 16
    for index, text in texts.items():
        assert text == alone[index].text, requests[index][0]


def test_streams_never_cut_a_character_nor_show_half_a_stop_string(live: Any, solo: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)
    [alone] = solo.generate(["\u00e9\u4e2d"], params)
    body = {"prompt": "\u00e9\u4e2d", "seed": 11, "max_tokens": 60, "ignore_eos": True}
    pieces = [event["choices"][0]["text"] for event in live.events(TEXT, body)]
    assert "".join(pieces) == alone.text
    assert len(pieces) > 3
    # a stop string of three characters from the middle of that text
    middle = len(alone.text) // 2
    stop = alone.text[middle : middle + 3]
    cut = alone.text[: alone.text.index(stop)]
    seen = ""
    for event in live.events(TEXT, {**body, "stop": stop}):
        seen += event["choices"][0]["text"]
        assert cut.startswith(seen), "text behind the stop string was shown"
    assert seen == cut
