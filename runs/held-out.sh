#!/usr/bin/env bash
# Beside the paper: KL to the dense model, agreement with it, perplexity and retrieval on held-out text, teacher-forced, of all rows
# of Table 1 at both budgets. Cheap, and with far less noise than pass@1.
# Needs: the adapters of train.sh (made if missing), one GPU; minutes to an hour (TOVA goes token by token). --quick: 2 CPU cores.
# Writes: OUT/MODEL/held-out-BUDGET.json.
. "$(dirname "$0")/settings.sh"

ready "${METHODS[@]}"
more=(--lengths "$CONTEXT")
[[ -n $QUICK ]] || more+=(--lengths $((CONTEXT / 2)))
for method in "${METHODS[@]}"; do
  case $method in
    dense) ;;
    streaming | tova) more+=(--policy "$method") ;;
  esac
done
# A call a budget. A scorer with a state has a little fewer slots, to pay for it: all policies are measured at both numbers, and
# the row to read of such an adapter is that of the smaller one.
for budget in "${BUDGETS[@]}"; do
  adapters=() stamps=''
  for method in "${METHODS[@]}"; do
    ! trained "$method" || adapters+=(--adapter "$(adapter "$method" "$budget")")
    stamps+=$(stamp "$method" "$budget")
  done
  aside once "$WORK/held-out-$budget.done" "$stamps" kvpop_ eval --model "$NAME" "${more[@]}" "${adapters[@]}" --sinks "$SINKS" \
    --window "$WINDOW" --data "$TEST" --texts "$TEXTS" --length "$CONTEXT" --passkey "$PASSKEYS" --needle "$NEEDLES" \
    --seed "$SEED" --out "$WORK/held-out-$budget.json"
done
together
