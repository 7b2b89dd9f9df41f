"""python -m polyquant.integrations.lm_eval: the command `lm_eval` with our model class registered."""

from __future__ import annotations

import sys
from importlib import import_module

from polyquant.errors import PolyquantError


def main() -> None:
    """Run the harness's command line. Our own errors are one line on stderr and exit code 2."""
    try:
        import_module("polyquant.integrations.lm_eval.model")  # registers the class
        sys.argv[0] = "lm_eval"
        import_module("lm_eval.__main__").cli_evaluate()
    except PolyquantError as problem:
        print(f"polyquant: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
