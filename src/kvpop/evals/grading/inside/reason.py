"""Scores answers to tasks of reasoning-gym, line by line: {"task", "size", "seed", "options", "index",
"answer"} to {"score": number}."""

import json
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
        import reasoning_gym
    except ImportError as error:
        say(str(error))
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    say("ready")
    made = {}
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(int(request["seconds"]) + 5)  # its default action ends this process, whatever that is busy with
        try:
            options = request["options"]
            key = (request["task"], request["size"], request["seed"], json.dumps(options, sort_keys=True))
            if key not in made:
                made[key] = reasoning_gym.create_dataset(key[0], size=key[1], seed=key[2], **options)
            entry = made[key][request["index"]]
            say({"score": float(made[key].score_answer(answer=request["answer"], entry=entry))})
        except Exception as error:  # an answer that cannot be read is a wrong one
            say({"score": 0.0, "error": f"{type(error).__name__}: {error}"[:200]})


if __name__ == "__main__":
    main()
