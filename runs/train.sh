#!/usr/bin/env bash
# Trains everything that the tables and figures compare: StreamingLLM+, DMS, KVpop mlp and KVpop at both budgets.
# Needs: MODEL=qwen3-4b or qwen3-8b: the hub, 8 GPUs of 80 GB (GPUS=8); by kvpop plan about 18 to 19 h (4B) or 30 to 31 h (8B)
#        for each of the 8 runs. smollm2 (default): one GPU, no network, about an hour. --quick: minutes on 2 CPU cores.
# Writes: OUT/MODEL/corpus (Qwen only, 4.2 billion tokens), OUT/MODEL/adapters/METHOD-BUDGET, OUT/MODEL/training.png.
# Tables and figures call the same by themselves: what is there is not trained again.
. "$(dirname "$0")/settings.sh"

ready "${METHODS[@]}"
runs=()
for method in "${METHODS[@]}"; do
  trained "$method" || continue
  for budget in "${BUDGETS[@]}"; do runs+=("$(adapter "$method" "$budget")"); done
done
((!${#runs[@]})) || kvpop_ plot "${runs[@]}" --out "$WORK/training.png"
