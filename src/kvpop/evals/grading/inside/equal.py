"""Says whether two mathematical expressions are equal, line by line: {"gold": ..., "answer": ...} to {"equal": bool}."""

import json
import logging
import os
import signal
import sys

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever a library prints, it is no reply


def say(what):
    out.write(json.dumps(what) + "\n")
    out.flush()


def main():
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        say(str(error))
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    logging.disable(logging.CRITICAL)
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text):  # no timeouts of its own: the alarm is ours, and the caller kills this process
        return parse(f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=None)

    say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(int(request["seconds"]) + 5)  # its default action ends this process, whatever that is busy with
        try:
            equal = bool(verify(read(request["gold"]), read(request["answer"]), timeout_seconds=None))
            say({"equal": equal})
        except Exception as error:  # what cannot be read is not equal
            say({"equal": False, "error": f"{type(error).__name__}: {error}"[:200]})


if __name__ == "__main__":
    main()
