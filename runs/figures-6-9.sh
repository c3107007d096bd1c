#!/usr/bin/env bash
# Figures 6 to 9 and Appendices G and H: what is kept of a reasoning trace, and how much of it the dense model would have kept, at
# 75 % compression. Figures 6 and 9: retention.png; 7: recall-dense.png; how heads share the memory (DMS): use.png.
# MODEL=qwen3-4b (default), qwen3-8b or smollm2; TEST=FILE for traces of your own.
# Needs: the adapters of train.sh at the larger budget (made if missing), then one GPU for minutes. --quick: 2 CPU cores.
# Writes: OUT/MODEL/figures-6-9: analysis.npz, a figure a question, viewer.html.
MODEL=${MODEL:-qwen3-4b}
. "$(dirname "$0")/settings.sh"

BUDGETS=("${BUDGETS[0]}")
ready kvpop-mlp kvpop dms
more=()
for method in kvpop kvpop-mlp dms; do more+=(--adapter "$(adapter "$method" "${BUDGETS[0]}")"); done
kvpop_ analyse --model "$NAME" "${more[@]}" --policy streaming --budget "${BUDGETS[0]}" --sinks "$SINKS" --window "$WINDOW" \
  --text "$TEST" --texts 2 --tokens "$CONTEXT" --out "$WORK/figures-6-9"
