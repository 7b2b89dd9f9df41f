"""The program that compiles one JSON schema and exits: run by runtime/grammar.py in a separate process.

llguidance compiles references recursively, so a chain of a thousand exhausts the stack, which ends the process; some
patterns take minutes. A schema that passes here, with less stack than a server's threads have, is compiled there again.

stdin: JSON {"path": sys.path entries, "seconds", "memory", "stack", "schema", "rules", "states"};
stdout: JSON {"problem": the message, empty if there is none}.
Imports nothing from polyquant, for a fast start.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from typing import Any


def _check(job: dict[str, Any], answer: dict[str, str]) -> None:
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=job["states"], verbose_errors=False)
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(job["schema"], overrides=job["rules"])
    except ValueError as problem:
        answer["problem"] = str(problem)
    else:
        answer["problem"] = llguidance.LLMatcher.validate_grammar(grammar, limits=limits)


def main() -> None:
    """Process one job from stdin to stdout."""
    job = json.load(sys.stdin)
    sys.path[:0] = job["path"]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # terminates the process
    signal.setitimer(signal.ITIMER_PROF, job["seconds"])
    if sys.platform != "darwin":  # macOS reserves far more address space for every process, and refuses a smaller limit
        resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: dict[str, str] = {}
    threading.stack_size(job["stack"])
    worker = threading.Thread(target=_check, args=(job, answer))
    worker.start()
    worker.join()
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
