"""python -m polyquant.integrations.lm_eval: the command `lm_eval` with our model class registered."""

from __future__ import annotations

import sys

from polyquant.errors import PolyquantError


def main() -> None:
    """The harness's command line. An expected failure of ours is one line on stderr and exit code 2."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import polyquant.integrations.lm_eval.model  # noqa: F401 - registers the class

        sys.argv[0] = "lm_eval"
        cli_evaluate()
    except PolyquantError as problem:
        print(f"polyquant: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
