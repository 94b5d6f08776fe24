"""Every option of every command, frozen: adding, renaming or dropping one is a conscious edit here."""

import subprocess
import sys

import pytest
import typer

from specdec.cli.main import app

OPTIONS: dict[str, str] = {
    "pull": "target --name --source --cache-dir",
    "select-layers": (
        "target --num-layers --data --tokens --objective --estimator --estimators --lambda --search --theta "
        "--min-gap --allowed --force --forbid --engine --probe --resamples --out --picture --print-pictures "
        "--resume --dtype --device --device-map --seed"
    ),
    "regenerate": (
        "prompts --target --out --max-tokens --max-prompt-tokens --total-tokens --limit --temperature "
        "--top-p --seed --order --batch-size --device --dtype --weights"
    ),
    "train": (
        "target --layers --data --out --states-cache --init-from --draft-vocab-size "
        "--intermediate-size --kv-heads --lm-head --embed --hidden-size --fc-norm --norm-output "
        "--norm-before-residual --norm-before-fc --attention-bias --qk-norm --init --self-attending "
        "--unroll --step-weight --loss --distill-top-k --prompt-rows --depth-sampling --epochs --steps "
        "--max-hours --batch-tokens --micro-batch-tokens --lr --schedule --decay-ratio --warmup-ratio "
        "--clip-norm --ema --seed --dtype --save-dtype --target-dtype --device-map --shard-weights "
        "--max-length --eval-sequences --eval-depth --eval-every --save-every --keep --accept-every "
        "--accept-prompts --accept-tokens --tracker --resume --dry-run --config"
    ),
    "study": (
        "target --data --out --layers --recipe --k --seeds --random-sets --random-seed --scores "
        "--probe-tokens --train-tokens --epochs --draft-vocab-size --lr --held-out --served "
        "--served-tokens --chain --max-hours --states-cache --keep-heads --picture"
    ),
    "export": "draft --to --target --out --target-name",
    "import": "folder --from --target --out",
    "generate": (
        "target --draft --prompt --prompts --out --raw --shape --max-tokens --temperature --top-k "
        "--top-p --min-p --typical-p --repetition-penalty --presence-penalty --frequency-penalty "
        "--logit-bias --bad-word --min-tokens --json-schema --regex --ebnf --logprobs --rule --knob "
        "--lossy --exact --seed --stop --simulate-acceptance --device --dtype --kernels --weights "
        "--kv-cache-dtype --deterministic --prefix-cache --gpu-memory-utilization --cuda-graphs --overlap "
        "--batch-size --limit"
    ),
    "serve": (
        "target --draft --shape --max-shape --speculative-config --rule --knob --lossy --exact --host --port "
        "--served-model-name --max-model-len --max-num-seqs --max-batch-tokens --max-waiting "
        "--max-connections --kv-tokens --prefix-cache --max-kv-ttl --host-cache-gb --disk-cache-dir "
        "--disk-cache-gb --device --dtype --kernels --weights --kv-cache-dtype --deterministic "
        "--gpu-memory-utilization --cuda-graphs "
        "--overlap --timeout --drain-timeout --step-timeout --api-key --api-key-file --allow-origins "
        "--max-body-mb --page --log-prompts --log-level --otlp-traces-endpoint --ssl-certfile --ssl-keyfile "
        "--ssl-keyfile-password"
    ),
    "bench": (
        "target --draft --shape --rule --knob --lossy --exact --data --limit --spread --max-tokens "
        "--batch-size --temperature --seed --repeats --warm-up --adaptive --pass-costs --simulate-acceptance "
        "--device --dtype --deterministic --kernels --weights --kv-cache-dtype --gpu-memory-utilization "
        "--cuda-graphs --transformers --verify-cost --micro --trace --out --resume --url "
        "--model --endpoint --concurrency --request-rate --shared-prefix --prefix-groups --turns "
        "--think-time --cold --ignore-eos --goodput --extra-body --request-timeout --duration "
        "--server-pid"
    ),
    "compare": (
        "target --peer --draft --shape --data --limit --max-tokens --batch-size --repeats --warm-up "
        "--adaptive --device --dtype --out"
    ),
    "replay": (
        "target --draft --shape --data --limit --turns --max-tokens --batch-size --temperature --seed "
        "--adaptive --block-size --kv-tokens --out"
    ),
    "audit": (
        "target --draft --levels --rule --lossy --knob --exact --dtype --weights --shape --batch-size --data "
        "--limit --tasks --task-limit --max-tokens --task-tokens --draws --engine-draws --temperature --seed "
        "--out"
    ),
    "sweep": (
        "target --out --draft --rule --shape --batch-size --tasks --task-limit --max-tokens --temperature "
        "--dtype --lossy --exact --seed"
    ),
    "load-sweep": (
        "target --out --draft --concurrency --data --shape --fixed --max-tokens --turns --max-minutes "
        "--prefix-words"
    ),
    "report": "runs --out --format --title --diff --allow-differences",
    "watch": (
        "run --baseline --setting --min-acceptance-length --max-drop --min-speedup --max-speedup-drop "
        "--exact --junit --github-summary --summary-file"
    ),
    "rules": "name",
    "demo": "--train --work --prompts --max-tokens",
}

# modules that cost seconds, or that only a running command needs
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "huggingface_hub", "rich")


def _commands() -> dict[str, str]:
    group = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        words = [max(param.opts, key=len) for param in command.params]
        found[name] = " ".join(word for word in words if word != "--help")
    return found


def test_the_commands_are_these() -> None:
    assert list(_commands()) == list(OPTIONS)


@pytest.mark.parametrize("name", _commands())
def test_the_options_are_these(name: str) -> None:
    assert _commands()[name] == OPTIONS[name]


@pytest.mark.parametrize("name", ["", *_commands()])
def test_help_imports_nothing_heavy(name: str) -> None:
    """Catches a torch import at the top of a command file, which makes every --help wait for seconds."""
    code = (
        "import sys; from specdec.cli.main import main; code = main(sys.argv[1:]); "
        f"print('heavy:', *[name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    words = [name, "--help"] if name else ["--help"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"
    assert "Usage: specdec" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", _commands())
def test_every_option_says_what_it_is_for(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.help
    assert all(param.help for param in command.params if param.name != "help")


def test_the_package_itself_imports_no_torch() -> None:
    code = "import sys, specdec; assert 'torch' not in sys.modules; print(specdec.__version__, *dir(specdec))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Engine" in done.stdout


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import specdec

    with pytest.raises(AttributeError, match="SamplingParams"):
        _ = specdec.Engin
