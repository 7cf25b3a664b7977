#!/usr/bin/env bash
# Submits a run of `meshflash train`; a preset sets model, number of ranks and time. From the repository's root:
#   deploy/train.sh PRESET [OPTIONS] [ARGUMENTS OF MESHFLASH TRAIN]
#   deploy/train.sh llama3-8b-1m --account ABC123 --data data --output runs/1m
#   deploy/train.sh vit-2.6b --site frontier --nodes 4 --chain 5 --data images.npz --output runs/vit
#
#   --site NAME       job script to use: frontier, slurm, aurora, pbs or lsf. Default: that of the installed scheduler
#                     (sbatch, qsub or bsub)
#   --nodes N         number of nodes. Default: the fewest that fit the mesh of preset, --dp, --fsdp, --cp and --tp
#   --gpus N          GPUs per node, and the maximum of ranks per node. Default: the GPUs of the site's nodes
#   --time HH:MM:SS   time limit of a job
#   --account NAME    account or project;    --queue NAME    queue or partition
#   --chain N         submit N jobs; each starts when the previous one has ended
#   --dry-run         print the commands instead
#   --                pass all following arguments to meshflash train, as well as options that are not listed here
#
# A run that ends at its time limit resumes from its last checkpoint: submit the same command again, or use --chain.
# Inside a job the run starts at once, on the nodes of the job.
# Edit the tables below to change the time limits of presets and the GPUs per node of a site; options override them.
# The job gets MESHFLASH_MODULES and MESHFLASH_VENV; see deploy/README.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=deploy/common.sh
source "$here/common.sh"

# `cp` repeats the value of the preset; `ranks` is the smallest number of ranks with enough memory, at 64 GB each.
#  name          kind  preset        cp  ranks  time
presets="
  gpt-tiny       gpt   tiny           1      1  00:10:00
  gpt-125m       gpt   125m           1      1  02:00:00
  llama3.2-1b    gpt   llama3.2-1b    8      8  02:00:00
  llama3-8b      gpt   llama3-8b      1      8  02:00:00
  llama3-8b-1m   gpt   llama3-8b-1m  64     64  02:00:00
  vit-tiny       vit   tiny           1      1  00:10:00
  vit-base       vit   base           1      1  02:00:00
  vit-2.6b       vit   2.6b           8      8  02:00:00
"
#  site      script              command  job variable      GPUs per node
sites="
  slurm      slurm/nvidia.sh     sbatch   SLURM_JOB_ID       4
  frontier   slurm/frontier.sh   sbatch   SLURM_JOB_ID       8
  pbs        pbs/nvidia.sh       qsub     PBS_JOBID          4
  aurora     pbs/aurora.sh       qsub     PBS_JOBID         12
  lsf        lsf/summit-like.sh  bsub     LSB_JOBID          6
"

# Print the rest of the table row with this name; print nothing if there is none.
row() {
  local name rest
  while read -r name rest; do
    if [ "$name" = "$2" ] && [ -n "$name" ]; then echo "$rest"; fi
  done <<<"$1"
}

# Print the names of all rows of a table.
names() {
  local name rest found=''
  while read -r name rest; do found+=${name:+"${found:+, }$name"}; done <<<"$1"
  echo "$found"
}

number() {
  if ! [[ "$2" =~ ^[1-9][0-9]*$ ]]; then fail "$1 $2: expected a number, at least 1"; fi
}

preset='' site='' nodes='' gpus='' time='' account='' queue='' chain=1 dry_run=no rest=()
while [ $# -gt 0 ]; do
  case "$1" in
  -h | --help)
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
  --dry-run) dry_run=yes ;;
  --site=* | --nodes=* | --gpus=* | --time=* | --account=* | --queue=* | --chain=*)
    printf -v "$(name=${1%%=*} && echo "${name#--}")" %s "${1#*=}"
    ;;
  --site | --nodes | --gpus | --time | --account | --queue | --chain)
    if [ $# -lt 2 ]; then fail "$1: expected a value"; fi
    printf -v "${1#--}" %s "$2"
    shift
    ;;
  --) rest+=("${@:2}") && break ;;
  *)
    if [ -n "$preset" ]; then
      rest+=("$1")
    elif [[ "$1" == -* ]]; then
      fail "$1: the preset comes before options of meshflash train: one of $(names "$presets")"
    else
      preset=$1
    fi
    ;;
  esac
  shift
done

if [ -z "$preset" ]; then fail "expected a preset: one of $(names "$presets"); -h says more"; fi
row=$(row "$presets" "$preset")
if [ -z "$row" ]; then fail "$preset: no such preset; expected one of $(names "$presets")"; fi
read -r kind name cp least default_time <<<"$row"
time=${time:-$default_time}
number --chain "$chain"
if ! [[ "$time" =~ ^[0-9]+:[0-5][0-9]:[0-5][0-9]$ ]]; then fail "--time $time: expected hours, as in 02:00:00"; fi

# Read the mesh and checkpoint options from the arguments of meshflash train.
dp='' fsdp=1 tp=1 output=no fresh=no
for ((n = 0; n < ${#rest[@]}; n++)); do
  word=${rest[n]} value=${rest[n + 1]:-}
  if [[ "$word" == --*=* ]]; then value=${word#*=} word=${word%%=*}; fi
  if [[ "$word $value" =~ ^--set\ mesh\.(dp|fsdp|cp|tp)=(.*)$ ]]; then
    word=--${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
  fi
  case "$word $value" in
  "--dp -1") dp='' ;;
  "--dp "* | "--fsdp "* | "--cp "* | "--tp "*) number "$word" "$value" && printf -v "${word#--}" %s "$value" ;;
  "--output "*) output=yes ;;
  "--fresh "* | "--from-step "*) fresh=yes ;;
  esac
done
if [ "$chain" -gt 1 ]; then
  if [ $output = no ]; then fail "--chain $chain: give --output FOLDER, where the next job finds checkpoints"; fi
  if [ $fresh = yes ]; then fail "--chain $chain: each job would begin there; leave out --fresh and --from-step"; fi
fi

command=(meshflash train "$kind" --preset "$name" ${rest[@]+"${rest[@]}"})

# Print the site of the current job, else the first site whose scheduler is installed.
find_site() {
  local inside name submit job _
  for inside in yes no; do
    while read -r name _ submit job _; do
      if [ -z "$name" ]; then continue; fi
      if { [ $inside = yes ] && [ -n "${!job:-}" ]; } || { [ $inside = no ] && command -v "$submit" >/dev/null; }; then
        # Frontier sets this name.
        if [ "$name" = slurm ] && [ "${LMOD_SYSTEM_NAME:-}" = frontier ]; then name=frontier; fi
        echo "$name"
        return
      fi
    done <<<"$sites"
  done
}

site=${site:-$(find_site)}
if [ -z "$site" ]; then
  printf -v text '%q ' "${command[@]}"
  fail "found none of sbatch, qsub, bsub: run this on a login node of the cluster, see what a site would get with" \
    "--site NAME --dry-run, or start ranks by yourself, as in: mpirun -np $((${dp:-1} * fsdp * cp * tp)) ${text% }"
fi
row=$(row "$sites" "$site")
if [ -z "$row" ]; then fail "--site $site: expected one of $(names "$sites")"; fi
read -r script submit job site_gpus <<<"$row"
script=$here/$script
gpus=${gpus:-${MESHFLASH_PER_NODE:-$site_gpus}}
number --gpus "$gpus"

# Print the most ranks per node with which $1 nodes hold a multiple of the mesh, or exactly the mesh if dp is given.
ranks_of_node() {
  local each
  for ((each = gpus; each > 0; each--)); do
    if (($1 * each == mesh)) || { [ -z "$dp" ] && (($1 * each % mesh == 0)); }; then
      echo "$each"
      return
    fi
  done
}

mesh=$((${dp:-1} * fsdp * cp * tp))
if [ -n "$dp" ] || [ "$mesh" -gt "$least" ]; then least=$mesh; fi
enough=$(((least + gpus - 1) / gpus))
while [ -z "$(ranks_of_node "$enough")" ]; do enough=$((enough + 1)); done
nodes=${nodes:-$enough}
number --nodes "$nodes"
per_node=$(ranks_of_node "$nodes")
if [ -z "$per_node" ]; then
  fail "--nodes $nodes: with up to $gpus ranks each they do not make the mesh's $mesh ranks; take --nodes $enough"
fi

# Set `words` to the command that submits a job; with an argument, the job starts after that job.
submission() {
  local text name names after=${1:-}
  case "$submit" in
  sbatch)
    words=(sbatch "--nodes=$nodes" "--time=$time")
    if [ "$per_node" != "$site_gpus" ]; then words+=("--ntasks-per-node=$per_node" "--gpus-per-node=$per_node"); fi
    words+=(${account:+"--account=$account"} ${queue:+"--partition=$queue"} ${after:+"--dependency=afterany:$after"})
    words+=("$script" "${command[@]}")
    ;;
  qsub)
    # qsub passes no arguments, and only named variables. Pass names without values: qsub splits its list at commas.
    printf -v text '%q ' "${command[@]}"
    names=MESHFLASH_COMMAND,MESHFLASH_PER_NODE
    for name in $(compgen -e); do
      if [[ "$name" == MESHFLASH_* && ",$names," != *",$name,"* ]]; then names+=,$name; fi
    done
    words=(env "MESHFLASH_COMMAND=${text% }" "MESHFLASH_PER_NODE=$per_node" qsub -v "$names")
    if [ "$site" = aurora ]; then
      words+=(-l "select=$nodes")
    else
      words+=(-l "select=$nodes:ncpus=$((8 * per_node)):ngpus=$per_node:mpiprocs=$per_node")
    fi
    words+=(-l "walltime=$time" ${account:+-A "$account"} ${queue:+-q "$queue"} ${after:+-W "depend=afterany:$after"})
    words+=("$script")
    ;;
  bsub)
    words=(env "MESHFLASH_PER_NODE=$per_node" bsub -nnodes "$nodes" -W "${time%:*}") # bsub takes hours and minutes
    words+=(${account:+-P "$account"} ${queue:+-q "$queue"} ${after:+-w "ended($after)"} "$script" "${command[@]}")
    ;;
  esac
}

if [ -n "${!job:-}" ]; then
  if [ "$chain" -gt 1 ]; then fail "--chain $chain: this is inside a job; submit from a login node"; fi
  variables=("MESHFLASH_PER_NODE=$per_node")
  if [ "$submit" = sbatch ]; then
    variables=() # an interactive job may leave the number of ranks unset
    if [ -z "${SLURM_NTASKS_PER_NODE:-}${SLURM_NTASKS:-}" ]; then variables=("SLURM_NTASKS_PER_NODE=$per_node"); fi
  fi
  run_or_print "$dry_run" env ${variables[@]+"${variables[@]}"} "$script" "${command[@]}"
  exit
fi

if [ $dry_run = no ] && ! command -v "$submit" >/dev/null; then
  fail "found no $submit: run this on a login node of $site, or see the command with --dry-run"
fi
echo "${0##*/}: $nodes x $per_node ranks" >&2
if [ "$per_node" -lt "$gpus" ]; then
  echo "${0##*/}: $((gpus - per_node)) of a node's $gpus GPUs stay idle: $mesh ranks do not fit them evenly" >&2
fi

before=''
for ((n = 1; n <= chain; n++)); do
  submission "$before"
  if [ $dry_run = yes ]; then
    run_or_print yes "${words[@]}"
    before=JOB_$n
    continue
  fi
  submitted=$("${words[@]}")
  echo "$submitted"
  # "Submitted batch job 12", "12.server", "Job <12> is submitted"
  if [[ "$submitted" =~ [0-9]+[^[:space:]\>]* ]]; then before=${BASH_REMATCH[0]}; else before=''; fi
  if [ -z "$before" ] && [ "$n" -lt "$chain" ]; then
    fail "$submit gave job $n no number; those after it are not submitted"
  fi
done
