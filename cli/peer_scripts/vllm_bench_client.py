"""vLLM's own load generator (`vllm bench serve`), run in vLLM's environment; all arguments are its own.

Called by module, since the package of the processor build has another name than its command looks for.
"""

from __future__ import annotations

import argparse


def run() -> None:
    """Parse vLLM's options and send the load."""
    from vllm.benchmarks.serve import add_cli_args, main  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())


if __name__ == "__main__":
    run()
