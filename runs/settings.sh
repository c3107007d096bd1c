# What all scripts of this directory share; they source it. Nothing runs from here.
#
#   MODEL=qwen3-4b|qwen3-8b|smollm2   the model (default: what the script is about, or smollm2)
#   --quick                           a few steps, items and tokens, of smollm2: everything end to end on 2 CPU cores
#   DRY_RUN=1                         print the commands, one a line, and run none
#   GPUS=8, GPU_MEMORY=141            processes of training and of rollouts (default 1); GB of one GPU (kvpop plan: 80)
#   OUT=out/runs                      where everything goes
#   SEED=0                            of training and of held-out prompts; rollouts have seeds of their own
#   STEPS=100                         of training, where it has no recipe (smollm2: 200, scorers alone 300); what has been trained
#                                     stays as it is
#   WORKERS=4                         processes that run and grade code
#   TASKS="a b", BUDGETS="a b", METHODS="a b", ITEMS=n   other ones than below
#   TASK_FILES=DIR                    DIR/TASK.* in place of the hub's file, as in DIR/aime-2024.jsonl
#   NAME, DATA, CORPUS                another model directory, training source, prepared corpus
#   ROWS=32, DENSE_ROWS=8             rollouts at a time, and of the dense model (Qwen3: 8, or 16 with GPU_MEMORY from 140 on)
#   JOBS=3                            commands at a time that need nothing of each other, where one leaves a large GPU idle
#   GRAPH=0                           on a GPU: decoding steps launched one by one, not as one CUDA graph
#   KVPOP="python -m kvpop"           how to call the command line (default: kvpop)
#
# Every script can be stopped and run again: finished commands are left out, others go on where they were.

set -euo pipefail

QUICK=${QUICK:-}
for word in "$@"; do
  case $word in
    --quick) QUICK=1 ;;
    *) echo "error: unknown argument $word; there is --quick, and settings by environment (runs/settings.sh)" >&2; exit 2 ;;
  esac
done
export QUICK
DRY_RUN=${DRY_RUN:-} GPUS=${GPUS:-1} JOBS=${JOBS:-1} OUT=${OUT:-out/runs} SEED=${SEED:-0} GRAPH=${GRAPH:-}
read -ra KVPOP <<<"${KVPOP:-kvpop}"
MODEL=${MODEL:-smollm2}
[[ -z $QUICK ]] || MODEL=smollm2

# numbers NAME VALUE...: or an error that names both.
numbers() {
  local name=$1 value
  shift
  for value in "$@"; do
    [[ $value =~ ^[1-9][0-9]*$ ]] || { echo "error: $name must be a number above 0, got $value" >&2; exit 2; }
  done
}
for word in GPUS GPU_MEMORY DENSE_ROWS ROWS STEPS ITEMS JOBS; do numbers "$word" "${!word:-1}"; done
((GPUS == 1 || JOBS == 1)) || { echo "error: JOBS must be 1 on several GPUS, got $JOBS on $GPUS" >&2; exit 2; }

# The first slots are 75 %, the second 88 % below CONTEXT. RECIPE: the paper's run, for the methods that have one.
# STATE: slots that the bytes of a recurrent scorer are worth (recipes take them off by themselves).
ALONE=() # where scorers learn alone, for methods without a recipe
SAMPLED=() # for tasks of reasoning-gym
THINKING=() STATE=0 RECIPE='' CORPUS=${CORPUS:-} WORK=$OUT/$MODEL${QUICK:+-quick}
case $MODEL in
  qwen3-4b | qwen3-8b)
    if [[ $MODEL == qwen3-8b ]]; then
      NAME=${NAME:-Qwen/Qwen3-8B} RECIPE=qwen3-8b THINKING=(--thinking)
    else
      NAME=${NAME:-Qwen/Qwen3-4B-Instruct-2507} RECIPE=qwen3-4b-instruct
    fi
    CORPUS=${CORPUS:-$WORK/corpus} DATA=${DATA:-nemotron-math-v2} TEST=${TEST:-champ:test}
    CONTEXT=16384 SINKS=4 WINDOW=256
    : "${BUDGETS:=4096 2048}"
    : "${TASKS_1:=${TASKS:-aime-2024 aime-2025 hmmt-feb-2025 hmmt-nov-2025}}"
    : "${TASKS_2:=${TASKS:-gpqa-diamond livecodebench-v6}}"
    TRAIN=(--mode full --steps "${STEPS:-2000}" --sequence-length 16384 --batch-size "$GPUS" --accumulate $((128 / GPUS)) --lr 1e-3
      --base-lr 8e-5 --retrieval-share 0 --dtype bfloat16 --compute same --checkpointing --checkpoint-every 10)
    SHAPE=$MODEL SEEN=(16384 32768 65536 131072)
    # A dense row of 32,768 tokens has 4.8 GB, and all rows are as long as the longest.
    ROWS=${ROWS:-32} DENSE_ROWS=${DENSE_ROWS:-$((${GPU_MEMORY:-80} < 140 ? 8 : 16))} TEXTS=8 PASSKEYS=4 NEEDLES=4
    ;;
  smollm2)
    NAME=${NAME:-smollm2} DATA=${DATA:-champ} TEST=${TEST:-champ:test}
    if [[ -z $QUICK ]]; then
      CONTEXT=4096 SINKS=4 WINDOW=64 STATE=34
      : "${BUDGETS:=1024 512}"
      : "${TASKS_1:=${TASKS:-passkey:2048 passkey:4096 ruler:niah-multi-key:2048 ruler:niah-multi-key:4096}}"
      : "${TASKS_2:=${TASKS:-reasoning:needle_haystack:min_num_statements=150:max_num_statements=250}}"
      SAMPLED=(--items 25 --rollouts 16 --max-new-tokens 64) # about 2,000 tokens a prompt; a small model says little
      TRAIN=(--mode full --steps "${STEPS:-200}" --sequence-length 4096 --batch-size 4 --retrieval-share 0.3 --lr 2e-3)
      ALONE=(--mode scorer --steps "${STEPS:-300}" --inner-updates 2)
      SEEN=(2048 8192 32768) ROWS=${ROWS:-50} TEXTS=40 PASSKEYS=8 NEEDLES=16
    else
      CONTEXT=512 SINKS=4 WINDOW=32 STATE=17 ITEMS=${ITEMS:-2}
      : "${BUDGETS:=128}"
      : "${TASKS_1:=${TASKS:-passkey:512}}"
      : "${TASKS_2:=${TASKS:-ruler:niah-multi-key:512}}"
      TRAIN=(--mode full --steps "${STEPS:-2}" --sequence-length 256 --batch-size 1 --retrieval-share 0)
      ALONE=(--mode scorer --steps "${STEPS:-2}")
      SEEN=(256 512) ROWS=${ROWS:-2} TEXTS=2 PASSKEYS=1 NEEDLES=1
    fi
    SHAPE=smollm2-135m
    : "${METHODS:=dense streaming tova streaming-plus dms kvpop-mlp kvpop kvpop-by-head}"
    ;;
  *) echo "error: MODEL must be qwen3-4b, qwen3-8b or smollm2, got $MODEL" >&2; exit 2 ;;
esac
read -ra BUDGETS <<<"$BUDGETS"
read -ra TASKS_1 <<<"$TASKS_1"
read -ra TASKS_2 <<<"$TASKS_2"
# The rows of the tables. Those without training first; the others have adapters.
read -ra METHODS <<<"${METHODS:-dense streaming tova streaming-plus dms kvpop-mlp kvpop}"

numbers BUDGETS "${BUDGETS[@]}"
for word in METHODS BUDGETS TASKS_1 TASKS_2; do
  declare -n list=$word
  twice=$(printf '%s\n' "${list[@]}" | sort | uniq -d | head -n 1)
  [[ -z $twice ]] || { echo "error: $word must name everything once, got $twice twice" >&2; exit 2; }
done
for word in "${BUDGETS[@]}"; do
  ((word < CONTEXT)) || { echo "error: BUDGETS must be below the $CONTEXT tokens of CONTEXT, got $word" >&2; exit 2; }
done

# Print a command, or run it.
run() {
  if [[ -n $DRY_RUN ]]; then
    printf '%q ' "$@"
    echo
  else
    echo "+ $*" >&2
    "$@"
  fi
}

kvpop_() { run "${KVPOP[@]}" "$@"; }

# The same in GPUS processes.
spread() {
  if ((GPUS > 1)); then
    run torchrun --nproc-per-node "$GPUS" -m kvpop "$@"
  else
    kvpop_ "$@"
  fi
}

# aside COMMAND...: beside what runs already, JOBS at a time; together: all of it has ended, and well. After one that failed
# nothing more begins, and the script ends with its status. What ends the script reaches all of them.
ASIDE=()
aside() {
  if ((JOBS == 1)) || [[ -n $DRY_RUN ]]; then
    "$@"
    return
  fi
  local one running status
  while :; do
    running=" $(jobs -rp | tr '\n' ' ')"
    for one in "${!ASIDE[@]}"; do
      [[ $running != *" ${ASIDE[one]} "* ]] || continue
      status=0
      wait "${ASIDE[one]}" || status=$?
      unset "ASIDE[$one]"
      if ((status)); then
        together || true
        return "$status"
      fi
    done
    ((${#ASIDE[@]} >= JOBS)) || break
    sleep 1
  done
  set -m # a group of its own, which heeds signals, and ends when the command in it has
  (trap 'exit 130' INT; trap 'exit 143' TERM; "$@") </dev/null &
  set +m
  ASIDE+=($!)
}

together() {
  local one status=0
  for one in "${ASIDE[@]}"; do wait "$one" || status=$?; done
  ASIDE=()
  return "$status"
}

# ended SIGNAL NUMBER
ended() {
  trap '' INT TERM HUP
  local group
  for group in $(jobs -p); do kill "-$1" -- "-$group" 2>/dev/null || true; done
  wait
  exit $((128 + $2))
}
trap 'ended INT 2' INT
trap 'ended TERM 15' TERM
trap 'ended TERM 1' HUP

# once FILE STAMP COMMAND...: unless FILE says that this very command has ended well, with what STAMP stands for.
once() {
  local mark=$1 stamp=$2
  shift 2
  if [[ -z $DRY_RUN && -f $mark && $(<"$mark") == "$*${stamp:+ $stamp}" ]]; then
    return
  fi
  "$@"
  [[ -n $DRY_RUN ]] || { mkdir -p "$(dirname "$mark")" && echo "$*${stamp:+ $stamp}" >"$mark"; }
}

# stamp METHOD BUDGET: of an adapter, which is another once it is trained or matched again; nothing for the others.
stamp() { ! trained "$1" || [[ ! -f $(config "$1" "$2") ]] || cksum <"$(config "$1" "$2")" | tr -d ' '; }

trained() { [[ $1 != dense && $1 != streaming && $1 != tova ]]; }

# adapter METHOD BUDGET: its directory; config: what is written last of it.
adapter() { echo "$WORK/adapters/$1-$2"; }
config() { echo "$(adapter "$1" "$2")/kvpop.json"; }

# held METHOD BUDGET: how the command line is told which policy.
held() {
  case $1 in
    dense) echo --policy dense ;;
    streaming | tova) echo --policy "$1" --budget "$2" --sinks "$SINKS" --window "$WINDOW" ;;
    *) echo --adapter "$(adapter "$1" "$2")" ;;
  esac
}

# ready METHOD...: the adapters of these methods at all budgets, trained if they are not there.
ready() {
  local method budget
  for method in "$@"; do
    trained "$method" || continue
    for budget in "${BUDGETS[@]}"; do
      [[ -z $DRY_RUN ]] && whole "$method" "$budget" && continue
      corpus
      aside train_one "$method" "$budget"
    done
  done
  together
}

# whole METHOD BUDGET: its adapter is there, and DMS has the memory of its row.
whole() { [[ -f $(config "$1" "$2") ]] && { [[ $1 != dms ]] || grep -q '"matched"' "$(config "$1" "$2")"; }; }

# The corpus of models that need one on disk.
CORPUS_READY=
corpus() {
  if [[ -n $CORPUS && -z $CORPUS_READY ]]; then
    once "$CORPUS.done" "" kvpop_ prepare --data "$DATA" --model "$NAME" --length "$CONTEXT" --packing shared --tokens 4200000000 \
      --out "$CORPUS"
    CORPUS_READY=1
  fi
}

# train_one METHOD BUDGET
train_one() {
  local method=$1 budget=$2 out scorer='' more=()
  out=$(adapter "$method" "$budget")
  case $method in
    kvpop) scorer=mlstm ;;
    kvpop-mlp) scorer=mlp ;;
    kvpop-immediate) scorer=mlstm-immediate ;;
    kvpop-by-head) scorer=mlp more=(--by-head --residual 64 --target-power 1 "${ALONE[@]}") ;;
    streaming-plus | dms) ;;
    *) echo "error: $method is not trained" >&2; exit 2 ;;
  esac
  if [[ -n $scorer && -n $RECIPE && $method != kvpop-by-head ]]; then
    kvpop_ plan "$RECIPE:$budget:$scorer:full" --gpus "$GPUS" ${GPU_MEMORY:+--memory "$GPU_MEMORY"}
    spread distill --recipe "$RECIPE:$budget:$scorer:full" --data "$CORPUS" --seed "$SEED" --out "$out"
    return
  fi
  local how=(--model "$NAME" --data "${CORPUS:-$DATA}" --sinks "$SINKS" --window "$WINDOW" --seed "$SEED")
  case $method in
    streaming-plus) how+=(--policy streaming --budget "$budget") ;;
    dms)
      how+=(--policy dms --ratio "$(awk "BEGIN { printf \"%.6g\", $CONTEXT / $budget }")" --gate mlp)
      ;;
    *)
      [[ $scorer == mlp ]] || budget=$((budget - STATE))
      how+=(--policy kvpop --scorer "$scorer" --budget "$budget")
      ;;
  esac
  if [[ -z $DRY_RUN && -f $out/kvpop.json ]]; then
    : # dms that is not matched yet
  elif [[ $MODEL == smollm2 ]]; then # one GPU is plenty
    kvpop_ distill "${how[@]}" "${TRAIN[@]}" "${more[@]}" --out "$out"
  else
    spread distill "${how[@]}" "${TRAIN[@]}" "${more[@]}" --out "$out"
  fi
  # Gates are drawn towards a compression and end short of it: their threshold gives them the memory of the row, at CONTEXT tokens.
  [[ $method != dms ]] || kvpop_ match "$out" --model "$NAME" --data "${CORPUS:-$DATA}" --length "$CONTEXT" --seed "$SEED"
}

# own TASK: numbers and a file of its own; code TASK: how code is graded. Tasks with either get a command for themselves.
own() {
  local file
  for file in ${TASK_FILES:+"$TASK_FILES/$1".*}; do
    [[ ! -f $file ]] || printf '%s\n' --file "$file"
  done
  [[ $1 != reasoning:* ]] || ((!${#SAMPLED[@]})) || printf '%s\n' "${SAMPLED[@]}"
}
code() { [[ $1 != livecodebench* && $1 != humaneval ]] || printf '%s\n' --allow-code --workers "${WORKERS:-4}"; }

# roll METHOD BUDGET PLACE ITEMS TASK...: rollouts and grades of cells of a row; PLACE has {task} in it.
roll() {
  local method=$1 budget=$2 place=$3 items=$4 rows=$ROWS policy task more=() graded=()
  shift 4
  [[ $method != dense ]] || rows=${DENSE_ROWS:-$ROWS}
  read -ra policy <<<"$(held "$method" "$budget")"
  if (($# == 1)); then
    mapfile -t more < <(own "$1")
    mapfile -t graded < <(code "$1")
  fi
  [[ $items == all ]] || more+=(--items "$items")
  [[ -z $QUICK ]] || more+=(--max-new-tokens 24)
  [[ $GRAPH != 0 ]] || more+=(--no-graph)
  local what=(tasks run "$@" --model "$NAME" "${policy[@]}" "${THINKING[@]}" "${more[@]}" --rows "$rows" --out "$place")
  if ((GPUS > 1)); then
    spread "${what[@]}" --no-grade
    for task in "$@"; do
      kvpop_ tasks merge "${place//\{task\}/$(folder "$task")}"
      kvpop_ tasks grade "${place//\{task\}/$(folder "$task")}" "${graded[@]}"
    done
  else
    kvpop_ "${what[@]}" "${graded[@]}"
  fi
}

# folder TASK: what kvpop puts in the place of {task}.
folder() { echo "${1//[:\/]/-}"; }

# table NAME TASK...: all methods at all budgets, and the report. Cells of a row share a command: their model is loaded once.
table() {
  local name=$1 task method budget row place alike=() apart=()
  shift
  ready "${METHODS[@]}"
  for task in "$@"; do
    if [[ -n $(own "$task")$(code "$task") ]]; then apart+=("$task"); else alike+=("$task"); fi
  done
  for method in "${METHODS[@]}"; do
    for budget in "${BUDGETS[@]}"; do
      row=$method-$budget
      [[ $method != dense ]] || row=dense
      place=$WORK/$name/{task}/$row
      ((!${#alike[@]})) || aside once "$WORK/$name/$row.done" "$(stamp "$method" "$budget")" roll "$method" "$budget" "$place" "${ITEMS:-all}" "${alike[@]}"
      for task in "${apart[@]}"; do
        aside once "$WORK/$name/$(folder "$task")/$row/done" "$(stamp "$method" "$budget")" roll "$method" "$budget" "$place" "${ITEMS:-all}" "$task"
      done
      [[ $method != dense ]] || break
    done
  done
  together
  kvpop_ report "$WORK/$name" --context "$CONTEXT" --out "$WORK/$name.md"
  kvpop_ report "$WORK/$name" --context "$CONTEXT" --format latex --out "$WORK/$name.tex"
}
