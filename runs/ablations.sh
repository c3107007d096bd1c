#!/usr/bin/env bash
# Ablations of scorer, target, loss, window, decay, budgets by head and training data, one change at a time, scorers alone (the
# model stays as it is), on the embedded model; then KL, agreement and retrieval of all on held-out text.
# Needs: one GPU, no network, minutes a run. --quick: 2 steps each on 2 CPU cores.
# Writes: OUT/MODEL/ablations/NAME, OUT/MODEL/ablations.json. A scorer with a state has as many slots as the others here.
. "$(dirname "$0")/settings.sh"

budget=${BUDGETS[0]}
if [[ -z $QUICK ]]; then
  how=(--steps "${STEPS:-150}" --sequence-length 4096 --batch-size 4 --inner-updates 2 --lr 2e-3)
  share=(--retrieval-share 0.3)
else
  how=(--steps "${STEPS:-2}" --sequence-length 256 --batch-size 1)
  share=(--retrieval-share 0)
fi
decay=$(awk -v length_="$CONTEXT" 'BEGIN { printf "%.8f", -0.2 / length_ }')
declare -A variants=(
  [base]='' [immediate]='--scorer mlstm-immediate' [delayed]='--scorer mlstm' [sum]='--scorer mlp+mlstm'
  [power-1]='--target-power 1' [power-4]='--target-power 4' [mean]='--aggregate mean' [dense-lse]='--lse dense'
  [paper-weights]='--regret 0' [regret-half]='--regret 0.5' [residual]='--residual 64 --target-power 1'
  [window-half]="--window $((WINDOW / 2))" [window-double]="--window $((2 * WINDOW))" [decay-small]="--decay $decay"
  [by-head]='--by-head' [no-retrieval]='--retrieval-share 0'
)
names=(base immediate delayed sum power-1 power-4 mean dense-lse paper-weights regret-half residual window-half window-double
  decay-small by-head no-retrieval)
[[ -z $QUICK ]] || names=(base sum residual by-head)
adapters=()
for name in "${names[@]}"; do
  read -ra change <<<"${variants[$name]}"
  out=$WORK/ablations/$name
  adapters+=(--adapter "$out")
  [[ -z $DRY_RUN && -f $out/kvpop.json ]] && continue
  words=" ${change[*]} "
  settings=(--policy kvpop --budget "$budget" --sinks "$SINKS")
  [[ $words == *' --scorer '* ]] || settings+=(--scorer mlp)
  [[ $words == *' --window '* ]] || settings+=(--window "$WINDOW")
  [[ $words == *' --retrieval-share '* ]] || settings+=("${share[@]}")
  aside kvpop_ distill --model "$NAME" --data "$DATA" "${settings[@]}" "${how[@]}" "${change[@]}" --seed "$SEED" --out "$out"
done
together
once "$WORK/ablations.done" "" kvpop_ eval --model "$NAME" "${adapters[@]}" --policy streaming --budget "$budget" --data "$TEST" \
  --texts "$TEXTS" --length "$CONTEXT" --passkey "$PASSKEYS" --needle "$NEEDLES" --lengths "$CONTEXT" --seed "$SEED" \
  --out "$WORK/ablations.json"
