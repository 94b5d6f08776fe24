"""`specdec serve`: an OpenAI-compatible server in front of one engine."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from specdec.errors import SpecdecError, UsageError

# modules of the extra that importing the server needs
_EXTRA = ("fastapi", "uvicorn", "prometheus_client")
KEY_VARIABLE = "SPECDEC_API_KEY"


def serve(
    target: Annotated[str, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE.")],
    draft: Annotated[
        str | None, typer.Option(help="ngram, a draft folder, a shipped draft, or ngram+DRAFT.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES [default: chain:3].")
    ] = None,
    max_shape: Annotated[str, typer.Option(help="Largest shape a request may ask for.")] = "tree:8x8:32",
    speculative_config: Annotated[
        str | None,
        typer.Option(help="vLLM's JSON or SGLang's three numbers, in place of --draft and --shape."),
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Rule of requests that name none [default: the exact one that suits].")
    ] = None,
    knob: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of --rule; may be repeated.")] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow requests and --rule to be lossy.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Promise that nothing lossy runs.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name clients use; may be repeated [default: TARGET].")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt with answer, in tokens [default: the target's].")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 32,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens and tree nodes of one step.")] = 1024,
    max_waiting: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more get a 429.")] = 128,
    max_connections: Annotated[int, typer.Option(help="Connections at once; more get a 503.")] = 2048,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens the KV pool holds [default: what the above needs, at most 2 GiB]."),
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep KV of finished requests for later ones.")] = True,
    max_kv_ttl: Annotated[float, typer.Option(help="Largest kv_ttl_s of a request, in seconds.")] = 600.0,
    host_cache_gb: Annotated[float, typer.Option(help="Host memory for KV that the pool gives up.")] = 0.0,
    disk_cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for KV that memory gives up; a later start finds it again.")
    ] = None,
    disk_cache_gb: Annotated[
        float | None, typer.Option(help="Most that --disk-cache-dir may hold [default: 4].")
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
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a card's memory to use, KV pool included.")
    ] = 0.9,
    cuda_graphs: Annotated[bool, typer.Option(help="Capture a card's decoding steps as graphs.")] = True,
    overlap: Annotated[bool, typer.Option(help="Launch a card's step before the last one is read.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Longest time of a request in seconds, queueing included.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds of one engine step after which it hangs and all ends; 0: no."),
    ] = 300.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Key clients must send; may be repeated; safer: --api-key-file or ${KEY_VARIABLE}."
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one key a line.")] = None,
    allow_origins: Annotated[
        list[str] | None, typer.Option(help="CORS origin; may be repeated [default: none].")
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Longest request body in MB.")] = 8.0,
    page: Annotated[bool, typer.Option(help="Show the page at /.")] = True,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and texts into the log.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="Send a span a request there: http://HOST:4318/v1/traces.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate (PEM): serve https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    ssl_keyfile_password: Annotated[str | None, typer.Option(help="Password of the key.")] = None,
) -> None:
    """Serve a target and a draft over HTTP, as OpenAI's clients expect.

    Logs are JSON lines on stderr. SIGTERM drains: running requests finish, new ones get a 503. Example:

    specdec serve smollm2-135m --draft ngram+smollm2-135m --port 8000
    """
    for module in _EXTRA:
        if find_spec(module) is None:
            raise SpecdecError(f'serve needs {module}; install it with pip install "specdec[serve]"')
    from specdec.cli.console import emit_json
    from specdec.cli.sampling_options import parse_knobs
    from specdec.cli.shapes import parse_shape
    from specdec.cli.speculative_config import parse_speculative_config
    from specdec.cli.usage import check_exact, check_rule, flags_of, named_flags, usage_errors
    from specdec.config import EngineConfig, ModelConfig
    from specdec.disk_space import check_disk_cache
    from specdec.hub import resolve_target
    from specdec.server.config import ServerConfig, SpecCaps
    from specdec.server.logs import LEVELS
    from specdec.server.otlp import check_tracing
    from specdec.server.sockets import bind
    from specdec.server.tls import TlsFiles

    if lossy and exact:
        raise UsageError("--exact promises that nothing lossy runs; drop it, or --lossy")
    check_exact(exact, {"--weights": weights, "--kv-cache-dtype": kv_cache_dtype})
    if knob and rule is None:
        raise UsageError(f"--knob ({knob[0]}) needs --rule, the rule it belongs to")
    if shape is not None and draft is None:
        raise UsageError("--shape needs --draft: without one nothing is drafted")
    if log_level not in LEVELS:
        raise UsageError(f"--log-level ({log_level}) must be one of {', '.join(LEVELS)}")
    if disk_cache_gb is not None and disk_cache_dir is None:
        raise UsageError("--disk-cache-gb needs --disk-cache-dir, the folder that is to hold so much")
    spec = parse_shape(shape or "chain:3")
    if speculative_config is not None:
        if draft is not None:
            raise UsageError("--speculative-config and --draft exclude each other; give one of them")
        chosen = parse_speculative_config(speculative_config)
        draft, spec, rule = chosen.draft, chosen.spec, rule or chosen.rule
    check_rule(rule, parse_knobs(knob or ()))
    caps = parse_shape(max_shape, option="--max-shape")
    fields = {**EngineConfig.__dataclass_fields__, **ServerConfig.__dataclass_fields__}
    with usage_errors(flags_of(fields, _FLAGS)):
        config = ServerConfig(
            model_names=tuple(served_model_name or (target,)),
            api_keys=_keys(api_key or [], api_key_file),
            allow_origins=tuple(allow_origins or ()),
            max_waiting=max_waiting,
            max_connections=max_connections,
            max_body_bytes=int(max_body_mb * 1e6),
            drain_timeout_s=drain_timeout,
            step_timeout_s=step_timeout,
            max_deadline_s=timeout,
            default_rule=rule,
            default_knobs=parse_knobs(knob or ()),
            caps=SpecCaps(max_depth=caps.max_depth, top_k=caps.top_k, max_nodes=caps.max_nodes),
            log_prompts=log_prompts,
            page=page,
            otlp_traces_endpoint=otlp_traces_endpoint,
        )
        engine_config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            kv_tokens=kv_tokens,
            prefix_cache=prefix_cache,
            max_kv_ttl_s=max_kv_ttl,
            host_cache_gb=host_cache_gb,
            disk_cache_dir=None if disk_cache_dir is None else str(disk_cache_dir),
            disk_cache_gb=EngineConfig.disk_cache_gb if disk_cache_gb is None else disk_cache_gb,
            device=device,
            dtype=dtype,
            kernels=kernels,
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            deterministic=deterministic,
            gpu_memory_utilization=gpu_memory_utilization,
            cuda_graphs=cuda_graphs,
            overlap=overlap,
            allow_lossy=lossy,
            spec=spec,
        )
    tls = TlsFiles(certfile=ssl_certfile, keyfile=ssl_keyfile, keyfile_password=ssl_keyfile_password)
    tls.check()
    if otlp_traces_endpoint is not None:
        with named_flags(flags_of(fields, _FLAGS)):
            check_tracing(otlp_traces_endpoint)
    # what can be wrong is looked at before torch is imported and weights are read
    bound = bind(host, port)
    if disk_cache_dir is not None:
        with named_flags(flags_of(fields, _FLAGS)):
            check_disk_cache(disk_cache_dir, int(engine_config.disk_cache_gb * 1e9))
    limit = ModelConfig.from_folder(resolve_target(target)).max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise SpecdecError(f"--max-model-len ({max_model_len}) exceeds the target's context ({limit})")

    from specdec.cli.serve_run import leave, start

    served = start(target, draft, engine_config, config, bound, tls, log_level)
    emit_json(served.summary)
    if served.hangs:
        leave(served.exit_code)
    if served.exit_code:
        raise typer.Exit(served.exit_code)


_FLAGS = {
    "max_deadline_s": "--timeout",
    "drain_timeout_s": "--drain-timeout",
    "step_timeout_s": "--step-timeout",
    "max_kv_ttl_s": "--max-kv-ttl",
    "model_names": "--served-model-name",
    "api_keys": "--api-key",
    "max_body_bytes": "--max-body-mb",
    "caps": "--max-shape",
}


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """All keys: of the command line, the file and the environment."""
    keys = list(given)
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise UsageError(f"--api-key-file ({file}) cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--api-key-file ({file}) must be a text in UTF-8") from error
        if not keys:
            raise UsageError(f"--api-key-file ({file}) holds no key")
    if os.environ.get(KEY_VARIABLE):
        keys.append(os.environ[KEY_VARIABLE])
    return tuple(dict.fromkeys(keys))
