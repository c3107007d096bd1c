#!/usr/bin/env bash
# Figure 4: latency and peak memory of a decoded token against the tokens seen, batch 1, 75 % compression, of Qwen3-8B's shape
# with random weights (default); MODEL=smollm2: of SmolLM2's.
# Needs: one GPU of 80 GB, no network, no training; some minutes. --quick: a minute or two on 2 CPU cores.
# Writes: OUT/MODEL/figure-4/decode.json and decode.png.
MODEL=${MODEL:-qwen3-8b}
. "$(dirname "$0")/settings.sh"

more=()
for seen in "${SEEN[@]}"; do more+=(--seen "$seen"); done
[[ -z $QUICK ]] || more+=(--layers 2 --steps 4)
kvpop_ bench decode --shape "$SHAPE" --policy dense-eager --policy dense-static --policy dense --policy streaming \
  --policy kvpop-mlp --policy kvpop-mlstm --policy dms --batch 1 --budget "${BUDGETS[0]}" --sinks "$SINKS" --window "$WINDOW" "${more[@]}" \
  --out "$WORK/figure-4"
