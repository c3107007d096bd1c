#!/usr/bin/env bash
# Figure 5: token accuracy over training with and without delayed scoring: the same mLSTM, read as a token leaves the window or as
# it arrives, at the larger budget. MODEL=qwen3-4b (default), qwen3-8b or smollm2.
# Needs: one more training run beside those of train.sh (mlstm-immediate; the delayed one is made if missing), as long as each of
#        them. --quick: minutes on 2 CPU cores.
# Writes: OUT/MODEL/figure-5/timing.png (and the figures of figures-6-9.sh for the delayed run), OUT/MODEL/figure-5/training.png.
MODEL=${MODEL:-qwen3-4b}
. "$(dirname "$0")/settings.sh"

BUDGETS=("${BUDGETS[0]}")
ready kvpop kvpop-immediate
delayed=$(adapter kvpop "${BUDGETS[0]}") immediate=$(adapter kvpop-immediate "${BUDGETS[0]}")
kvpop_ analyse --model "$NAME" --adapter "$delayed" --delayed "$delayed" --immediate "$immediate" --text "$TEST" \
  --tokens "$CONTEXT" --out "$WORK/figure-5"
kvpop_ plot "$delayed" "$immediate" --out "$WORK/figure-5/training.png"
