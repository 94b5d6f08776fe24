"""`specdec bench`: acceptance and speed against no speculation; with --url, a running server under load."""

from math import inf
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.benching.sides import check_sides, only, parse_numbers
from specdec.cli.datasets import SETS_HELP
from specdec.errors import UsageError

# readings of each piece of work: the least that shows a spread
MICRO_ROUNDS = 5


def bench(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE; none with --url.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="ngram, a draft folder, a shipped draft, or ngram+DRAFT; DRAFT@SHAPE takes that shape "
            "alone; may be repeated."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES; may be repeated [default: chain:3]."),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Verify by this rule; may be repeated [default: the exact one that suits]."),
    ] = None,
    knob: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of the one --rule; may be repeated.")
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow a lossy --rule.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Promise that nothing lossy runs.")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(help=f"Prompts: {SETS_HELP}; may be repeated [default: mt_bench]."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts of each set.")] = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="Take --limit prompts at even distances, not the first.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write for each prompt.")] = 128,
    batch_size: Annotated[str, typer.Option(help="Prompts decoded at once; 1,4,8 measures each.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy; 0,0.7,1 measures each.")] = "0",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first prompt's sampled text; later ones follow it.")
    ] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Times every prompt is decoded; medians are used, and how far repeats agree is said."
        ),
    ] = 1,
    warm_up: Annotated[
        int,
        typer.Option(
            min=0, help="Uncounted short batches of each setting, for each batch size and temperature once."
        ),
    ] = 1,
    adaptive: Annotated[
        bool, typer.Option(help="Let a sequence stop speculating while it does not pay, as served.")
    ] = True,
    pass_costs: Annotated[
        str,
        typer.Option(
            help="What decides that: measured costs of a pass, kept up to date as served, or the fixed "
            "ones of the program, with which two runs draft alike."
        ),
    ] = "measured",
    simulate_acceptance: Annotated[
        float | None,
        typer.Option(help="Draw accepted lengths with this mean, for speed alone; the text is meaningless."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda with a card.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Numbers of a row that do not depend on the batch."),
    ] = False,
    kernels: Annotated[str, typer.Option(help="auto, triton or reference.")] = "auto",
    weights: Annotated[
        str, typer.Option(help="On the cpu: auto, fp16-packed, plain, or (rounded) bf16-packed, int8.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto; int8 or fp8 through kernels: half the memory, other numbers.")
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a card's memory to use, KV pool included.")
    ] = 0.9,
    cuda_graphs: Annotated[bool, typer.Option(help="Capture a card's decoding steps as graphs.")] = True,
    transformers: Annotated[
        bool, typer.Option(help="Also decode with transformers generate (greedy, one by one).")
    ] = False,
    verify_cost: Annotated[
        bool, typer.Option("--verify-cost", help="Only measure what a pass over more rows costs.")
    ] = False,
    micro: Annotated[
        bool,
        typer.Option("--micro", help="Only measure kernels, steps and the cost of verifying."),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="With --micro: write steps as a Chrome trace (JSON).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the whole result (JSON), with one record a prompt; kept after every point."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Measure only the points that --out does not hold yet.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(help="Load a running OpenAI-compatible server instead: http://HOST:PORT/v1."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --url: its model [default: the first it lists].")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="With --url: chat or completions.")] = "chat",
    concurrency: Annotated[
        str | None,
        typer.Option(help="With --url: clients at once; 1,2,4 measures each [default: no bound]."),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(help="With --url: conversations begun a second, at random times; inf: no waiting."),
    ] = inf,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="With --url: tokens (about) that conversations begin with alike.")
    ] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="With --url: different shared prefixes.")] = 1,
    turns: Annotated[
        int,
        typer.Option(
            min=1,
            help="Turns of each conversation, each on the target's own answers; with --url those a prompt "
            "lacks are taken from the next, else it ends with its own.",
        ),
    ] = 1,
    think_time: Annotated[
        float, typer.Option(help="With --url: mean pause between turns in seconds, as of an agent's tools.")
    ] = 0.0,
    cold: Annotated[
        bool, typer.Option("--cold", help="With --url: a fresh cache_salt for each point of a sweep.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Write exactly --max-tokens tokens.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="With --url: ttft:MS, tpot:MS or e2el:MS that a good answer keeps; may be repeated."
        ),
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="With --url: further fields of every request, as JSON.")
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(help="With --url: seconds of a server's silence that end a request.")
    ] = 600.0,
    duration: Annotated[
        float | None,
        typer.Option(
            help="With --url: keep --concurrency clients busy so many seconds, and judge memory, throughput "
            "and counters; exit code 1 when they do not hold."
        ),
    ] = None,
    server_pid: Annotated[
        int | None,
        typer.Option(help="With --duration: the server's process on this machine [default: its /metrics]."),
    ] = None,
) -> None:
    """Measure acceptance and speed of drafters against the same engine without speculation.

    All settings (every draft in every shape under every rule) decode every prompt in turn (interleaved), on
    the same weights, at every point (prompt set, temperature, batch size). Examples:

    specdec bench smollm2-135m --draft smollm2-135m --draft ngram --shape chain:3 --shape tree:4x4:15

    specdec bench smollm2-135m --draft smollm2-135m --data gsm8k --data mbpp --limit 8 --temperature 0,1
    --batch-size 1,8 --out grid.json

    With --url, measure a running server (ours, vLLM, SGLang) under load:

    specdec bench --url http://localhost:8000/v1 --concurrency 1,2,4,8 --cold --out load.json
    """
    check_sides(context)
    data = data or ["mt_bench"]
    temperatures = parse_numbers("--temperature", temperature, float, 0.0)
    if url is not None:
        from specdec.cli.console import emit_json
        from specdec.cli.loading.plan import LoadPlan, parse_concurrency, parse_extra_body, parse_goodput
        from specdec.cli.loading.run import run_load

        summary = run_load(
            LoadPlan(
                url=url,
                model=model,
                endpoint=endpoint,
                concurrency=parse_concurrency(concurrency),
                request_rate=request_rate,
                shared_prefix=shared_prefix,
                prefix_groups=prefix_groups,
                turns=turns,
                think_time=think_time,
                cold=cold,
                ignore_eos=ignore_eos,
                goodput=parse_goodput(goodput or ()),
                extra_body=parse_extra_body(extra_body),
                request_timeout=request_timeout,
                data=only("--data", data),
                limit=limit,
                max_tokens=max_tokens,
                temperature=only("--temperature", temperatures),
                seed=seed,
                warm_up=warm_up,
                out=out,
                duration=duration,
                server_pid=server_pid,
            )
        )
        emit_json(summary)
        if not summary.get("verdict", {"holds": True})["holds"]:
            raise typer.Exit(1)
        return
    assert target is not None, "one of TARGET and --url is there"
    from specdec.cli.benching.run import BenchPlan, run_bench
    from specdec.cli.console import emit_json
    from specdec.cli.sampling_options import parse_knobs
    from specdec.cli.usage import check_exact

    if trace is not None and not micro:
        raise UsageError("--trace needs --micro")
    if micro:
        from specdec.cli.micro.run import MicroPlan, run_micro

        plan = MicroPlan(
            target=target,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
            rounds=max(repeats, MICRO_ROUNDS),
            trace=trace,
            out=out,
        )
        emit_json(run_micro(plan))
        return
    if verify_cost:
        from specdec.cli.benching.verify_cost import measure_verify_cost

        emit_json(measure_verify_cost(target, dtype=dtype, weights=weights))
        return
    if lossy and exact:
        raise UsageError("--exact promises that nothing lossy runs; drop it, or --lossy")
    check_exact(exact, {"--weights": weights, "--kv-cache-dtype": kv_cache_dtype})
    if lossy and not rule:
        raise UsageError("--lossy needs --rule, the lossy rule to verify by")
    if simulate_acceptance is not None:
        if exact:
            raise UsageError("--exact promises the target's text; --simulate-acceptance writes none")
        if not draft:
            raise UsageError("--simulate-acceptance needs --draft, such as --draft random")
    if transformers and (device, dtype) != ("cpu", "float32"):
        raise UsageError("--transformers is float32 on the processor; leave --device and --dtype alone")
    if (shape or rule) and not draft:
        raise UsageError(f"{'--shape' if shape else '--rule'} needs --draft: without one nothing is drafted")
    batch_sizes = parse_numbers("--batch-size", batch_size, int, 1)
    if transformers and temperatures != [0.0]:
        raise UsageError("--transformers compares greedy text; leave --temperature at 0")
    if transformers and batch_sizes != [1]:
        raise UsageError("--transformers decodes one prompt at a time; leave --batch-size at 1")
    if transformers and ignore_eos:
        raise UsageError("--transformers ends at the end token; drop --ignore-eos (specdec compare goes on)")
    if resume and out is None:
        raise UsageError("--resume needs --out, the record to go on with")
    if spread and limit is None:
        raise UsageError("--spread needs --limit: it says how the prompts are taken")
    if knob and len(rule or []) != 1:
        raise UsageError(f"--knob ({knob[0]}) needs one --rule to belong to, not {len(rule or [])}")
    summary = run_bench(
        BenchPlan(
            target=target,
            drafts=draft or [],
            shapes=shape or ["chain:3"],
            rules=rule or [],
            knobs=parse_knobs(knob or ()),
            lossy=lossy,
            data=data,
            limit=limit,
            max_tokens=max_tokens,
            batch_sizes=batch_sizes,
            temperatures=temperatures,
            seed=seed,
            repeats=repeats,
            warm_up=warm_up,
            adaptive=adaptive,
            pass_costs=pass_costs,
            spread=spread,
            turns=turns,
            ignore_eos=ignore_eos,
            resume=resume,
            simulate_acceptance=simulate_acceptance,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
            engine_options={
                "kernels": kernels,
                "weights": weights,
                "kv_cache_dtype": kv_cache_dtype,
                "gpu_memory_utilization": gpu_memory_utilization,
                "cuda_graphs": cuda_graphs,
            },
            transformers=transformers,
            out=out,
        )
    )
    emit_json(summary)
