"""Runs a program as a script, after the usual imports: ``program.py PART ...``."""

import sys

if __name__ == "__main__":
    parts, sys.argv = sys.argv[1:], ["program.py"]
    for part in parts:
        with open(part, encoding="utf-8", errors="surrogatepass") as file:
            code = compile(file.read(), part, "exec")
        exec(code, globals())
