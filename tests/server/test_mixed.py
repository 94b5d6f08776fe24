"""Many requests at once, all different: each gets the text it would get alone."""

import threading
from collections.abc import Callable
from typing import Any

from specdec.config import SpecConfig
from specdec.sampling_params import SamplingParams

TEXT = "/v1/completions"
COUNT = 32


def mixed(count: int) -> list[tuple[dict[str, Any], SamplingParams]]:
    """Request bodies and the same as parameters of the engine."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for index in range(count):
        tokens = 6 + index % 11
        body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        params: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        kind = index % 6
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
            shape = {"max_depth": 2, "top_k": 3, "max_nodes": 6}
            body |= {"speculative": shape}
            params |= {"spec": SpecConfig(**shape, adaptive=False)}
        pairs.append((body, params))
    return [(body, SamplingParams(**params)) for body, params in pairs]


def test_many_requests_at_once_equal_their_solo_runs(
    make_engine: Callable[..., Any], solo: Any, serving: Any
) -> None:
    """A small pool makes sequences give way; one client in eight leaves in the middle."""
    requests = mixed(COUNT)
    prompts = [f"the {'in a' * (index % 5)} {index % 7}" for index in range(COUNT)]
    alone = [
        solo.generate([prompt], params)[0] for prompt, (_, params) in zip(prompts, requests, strict=True)
    ]
    texts: dict[int, str] = {}
    # 96 rows: three or four of eight places have room
    with serving(make_engine(solo, kv_tokens=96)) as server:

        def ask(index: int) -> None:
            body = {**requests[index][0], "prompt": prompts[index]}
            if index % 8 == 7:
                server.connect(TEXT, {**body, "max_tokens": 60}).close()
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
        assert server.metric("num_preemptions_total") > 0
    assert len(texts) == COUNT - COUNT // 8
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
