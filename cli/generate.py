"""`specdec generate`: one prompt, a file of prompts, or a chat at the terminal."""

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.datasets import SETS_HELP
from specdec.cli.usage import check_exact, check_rule, flags_of, usage_errors
from specdec.errors import UsageError

FLAGS = {"bad_words": "--bad-word", "rule_knobs": "--knob"}


def generate(
    target: Annotated[str, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE.")],
    draft: Annotated[
        str | None, typer.Option(help="ngram, a draft folder, a shipped draft, or ngram+DRAFT.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="One user message; without it, a chat.")] = None,
    prompts: Annotated[str | None, typer.Option(help=f"One answer to each of {SETS_HELP}.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the answers of --prompts here (JSONL).")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
    shape: Annotated[str, typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES.")] = "chain:3",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the most probable tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one.")] = 0.0,
    typical_p: Annotated[float, typer.Option(help="Mass of the most typical tokens to keep.")] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: fewer tokens of prompt and answer again.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="-2..2, off the logit of a token the answer has.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="-2..2, off the logit each time the answer has it.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=VALUE, added to a token's logit; may be repeated.")
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Text the answer must not contain; may be repeated.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="No end before this many tokens.")] = 0,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema the answer must obey.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Expression the whole answer must match.")] = None,
    ebnf: Annotated[Path | None, typer.Option(help="File with a grammar (GBNF or Lark) to obey.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Report each token's log-probability and this many best ones.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Verify drafts by this rule [default: the exact one that suits].")
    ] = None,
    knob: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the rule; may be repeated.")] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow a lossy --rule.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Promise that nothing lossy runs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of sampled text [default: a fresh one].")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    simulate_acceptance: Annotated[
        float | None,
        typer.Option(help="Draw accepted lengths with this mean, for speed alone; the text is meaningless."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    kernels: Annotated[str, typer.Option(help="auto, triton or reference.")] = "auto",
    weights: Annotated[
        str, typer.Option(help="On the cpu: auto, fp16-packed, plain, or (rounded) bf16-packed, int8.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto; int8 or fp8 through kernels: half the memory, other numbers.")
    ] = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same text in every dtype, whatever the batch.")
    ] = False,
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep the KV of texts for prompts that begin alike, such as a chat's turns.")
    ] = True,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a card's memory to use, KV pool included.")
    ] = 0.9,
    cuda_graphs: Annotated[bool, typer.Option(help="Capture a card's decoding steps as graphs.")] = True,
    overlap: Annotated[bool, typer.Option(help="Launch a card's step before the last one is read.")] = True,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts of --prompts.")] = None,
) -> None:
    """Write text with a target and a draft; the text is the target's own unless a lossy rule is named.

    Example: specdec generate smollm2-135m --draft smollm2-135m --prompt "Why is the sky blue?"
    """
    from specdec.cli.datasets import prompt_file, require_unicode
    from specdec.cli.generation import GenerationPlan, answer_file, answer_one, chat
    from specdec.cli.outputs import require_not_input
    from specdec.cli.sampling_options import parse_knobs, parse_logit_bias, read_grammar
    from specdec.cli.shapes import check_simulation, parse_shape
    from specdec.sampling_params import SamplingParams

    if prompt is not None and prompts is not None:
        raise UsageError("--prompt and --prompts exclude each other; give one of them")
    if out is not None and prompts is None:
        raise UsageError("--out needs --prompts")
    if limit is not None and prompts is None:
        raise UsageError(f"--limit ({limit}) needs --prompts")
    if lossy and exact:
        raise UsageError("--exact promises that nothing lossy runs; drop it, or --lossy")
    check_exact(exact, {"--weights": weights, "--kv-cache-dtype": kv_cache_dtype})
    if lossy and rule is None:
        raise UsageError("--lossy needs --rule, the lossy rule to verify by")
    if simulate_acceptance is not None:
        if exact:
            raise UsageError("--exact promises the target's text; --simulate-acceptance writes none")
        if draft is None:
            raise UsageError("--simulate-acceptance needs --draft, such as --draft random")
    if logprobs is not None and prompt is None and out is None:
        raise UsageError("--logprobs needs --prompt, or --prompts with --out")
    words = {"--prompt": [prompt or ""], "--regex": [regex or ""], "--stop": stop, "--bad-word": bad_word}
    for option, texts in words.items():
        for text in texts or ():
            require_unicode(option, text)
    if out is not None and prompts is not None:
        source = prompt_file(prompts, "--prompts")
        inputs = {"--prompts": source, "--json-schema": json_schema, "--ebnf": ebnf}
        require_not_input("--out", out, inputs)
    with usage_errors({"json_schema": "--json-schema"}):
        grammar = read_grammar(json_schema, regex, ebnf)
    with usage_errors(flags_of(SamplingParams.__dataclass_fields__, FLAGS)):
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_logit_bias(logit_bias or ()),
            bad_words=tuple(bad_word or ()),
            min_tokens=min_tokens,
            grammar=grammar,
            logprobs=logprobs,
            rule=rule,
            rule_knobs=parse_knobs(knob or ()),
            seed=seed,
            max_tokens=max_tokens,
            # a meaningless text must not end by chance
            ignore_eos=simulate_acceptance is not None,
            stop=tuple(stop or ()),
        )
    check_rule(rule, params.rule_knobs)
    spec = parse_shape(shape)
    if simulate_acceptance is not None:
        check_simulation(simulate_acceptance, shape, spec)
    plan = GenerationPlan(
        target=target,
        draft=draft,
        spec=spec,
        simulate_acceptance=simulate_acceptance,
        params=params,
        raw=raw,
        lossy=lossy,
        device=device,
        dtype=dtype,
        kernels=kernels,
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        gpu_memory_utilization=gpu_memory_utilization,
        cuda_graphs=cuda_graphs,
        overlap=overlap,
        prefix_cache=prefix_cache,
        batch_size=batch_size,
    )
    if prompts is not None:
        answer_file(plan, prompts, limit, out)
    elif prompt is not None:
        answer_one(plan, prompt)
    else:
        chat(plan)
