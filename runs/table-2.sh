#!/usr/bin/env bash
# Table 2: GPQA Diamond and LiveCodeBench v6, out of the domain of training, for the rows of Table 1. MODEL=qwen3-4b (default), as
# in the paper, or qwen3-8b; with MODEL=smollm2 a needle in a haystack of reasoning-gym (pip install 'kvpop[reasoning]').
# Needs: as table-1.sh. LiveCodeBench runs the code that the model writes, in a sandbox (--allow-code), WORKERS processes.
# Writes: OUT/MODEL/table-2/TASK/METHOD-BUDGET (rollouts, grades), OUT/MODEL/table-2.md and .tex.
MODEL=${MODEL:-qwen3-4b}
. "$(dirname "$0")/settings.sh"

table table-2 "${TASKS_2[@]}"
