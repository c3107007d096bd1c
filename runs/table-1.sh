#!/usr/bin/env bash
# Table 1: pass@1 on AIME 2024, 2025 and HMMT February, November 2025 of the dense teacher, StreamingLLM, TOVA, StreamingLLM+,
# DMS, KVpop mlp and KVpop, at 4,096 and 2,048 slots. MODEL=qwen3-4b (default) or qwen3-8b; with MODEL=smollm2 the same on
# passkeys and needles of 2,048 and 4,096 tokens, at 1,024 and 512 slots.
# Needs: the hub (questions, model), the adapters of train.sh (made if missing), GPUs. 1,920 rollouts a row, 13 rows a model, at
#        most 32,768 tokens each: at most 63 million tokens a row. Hours depend on how long the answers are: kvpop tasks run says
#        what is left. smollm2: one GPU, an hour or two. --quick: minutes on 2 CPU cores.
# Writes: OUT/MODEL/table-1/TASK/METHOD-BUDGET (rollouts, grades), OUT/MODEL/table-1.md and .tex.
MODEL=${MODEL:-qwen3-4b}
. "$(dirname "$0")/settings.sh"

table table-1 "${TASKS_1[@]}"
