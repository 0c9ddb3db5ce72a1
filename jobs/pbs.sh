# shellcheck shell=bash
# PBS's part: what it says of the job, how PALS starts ranks, and how the job is queued again.
# shellcheck disable=SC2034,SC2154  # launch.sh and again.sh share these variables
: "${PBS_JOBID:?jobs: this is no job of PBS; give the script to qsub}"
cd "$PBS_O_WORKDIR" || exit 2 # a job of PBS begins in the home folder

# Value that PBS has for the job under a name; nothing where qstat does not say it.
of_job() { qstat -f "$PBS_JOBID" 2>/dev/null | sed -n "s/^ *$1 = //p" || true; }

job=${PBS_JOBID%%.*}
nodes=$(sort -u "$PBS_NODEFILE" | paste -sd,)
runs=$(of_job run_count)
restarts=$((${MPITRAIN_RESTART:-0} + (${runs:-1} > 1 ? ${runs:-1} - 1 : 0))) # those of PBS itself, too
# The file has mpiprocs lines for each node; some sites write one.
many=$(sort -u "$PBS_NODEFILE" | wc -l)
count=${MPITRAIN_RANKS_PER_NODE:+$((many * MPITRAIN_RANKS_PER_NODE))}
count=${count:-$(wc -l <"$PBS_NODEFILE")}
hosts=(-machinefile "$PBS_NODEFILE")

# Sends this shell SIGUSR1 two minutes before the walltime ends, as SLURM does by itself.
IFS=: read -r hours minutes seconds < <(of_job 'Resource_List\.walltime') || true
if [ -z "${seconds:-}" ]; then
    echo "jobs: qstat does not say the walltime; the ranks are not told before it ends"
else
    limit=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
    left=$((limit > 240 ? limit - 120 : limit / 2))
    (
        trap 'kill "$sleeper"; exit' TERM
        sleep "$((left > SECONDS ? left - SECONDS : 0))" &
        sleeper=$!
        wait "$sleeper"
        kill -USR1 $$
    ) &
    clock=$!
    trap 'kill "$clock" 2>/dev/null || true' EXIT
fi

queue_again() {
    local names
    if [ "$told" = TERM ]; then
        # qdel, or a preemption after which PBS itself runs the job again (-r y).
        echo "jobs: PBS ends the job, and it is not queued again from here"
        return
    fi
    echo "jobs: queueing $job again"
    # qrerun is for operators: a new job of this very script, which waits for the end of this one.
    export MPITRAIN_RESTART=$((restarts + 1))
    names=$(compgen -e | grep -E '^(MPITRAIN|COLLECTIVES)_' | paste -sd,)
    qsub -W "depend=afterany:$PBS_JOBID" -v "$names" "$0" ||
        echo "jobs: qsub refuses; submit the same again, and it goes on from where it was"
}

starter() {
    [ "$1" = pals ] || fail "MPITRAIN_LAUNCHER=$1: expected mpirun or pals under PBS"
    per_node=$((count / many)) # PALS has one number for all nodes
    command=(mpiexec -n $((many * per_node)) --ppn "$per_node")
    [[ " ${options[*]}" == *" --cpu-bind"* ]] ||
        command+=(--cpu-bind depth --depth "${OMP_NUM_THREADS:-1}")
}
