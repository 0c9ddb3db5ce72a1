# shellcheck shell=bash
# SLURM's part: what it says of the job, how srun starts ranks, and how the job is queued again.
# shellcheck disable=SC2034,SC2154  # launch.sh and again.sh share these variables
: "${SLURM_JOB_ID:?jobs: this is no job of SLURM; give the script to sbatch}"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
nodes=${SLURM_JOB_NODELIST:-}
restarts=${SLURM_RESTART_COUNT:-0}
count=${SLURM_NTASKS:-$((${SLURM_NNODES:-1} * ${SLURM_NTASKS_PER_NODE:-1}))}
hosts=() # mpiexec asks SLURM itself
export SLURM_EXPORT_ENV=ALL # sbatch --export=NONE is about the script, and srun would obey it, too
queue_again() { # not what scancel has ended; a job that was told in time may be beyond its limit
    [ "$told" = USR1 ] || set -- Incomplete
    echo "jobs: queueing $job again${1:+, unless it was cancelled}" && scontrol requeue "$@" "$job"
}

starter() {
    case $1 in
        pmix | pmi2) command=(srun "--mpi=$1" --kill-on-bad-exit=1) ;;
        srun) command=(srun --kill-on-bad-exit=1) ;;
        *) fail "MPITRAIN_LAUNCHER=$1: expected mpirun, pmix, pmi2 or srun under SLURM" ;;
    esac
    # From SLURM 22.05 on, srun takes the allocation's --cpus-per-task only like this.  Ranks of
    # mpirun would share these cores of its daemon, a task of srun.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # One thread of each core, where the job has whole nodes and cores enough.  srun refuses a hint
    # beside other options of threads and cores, and these are the user's.
    [[ ! " ${options[*]} " =~ \ --(hint|cpu.bind|(threads|ntasks)-per-core) ]] || return 0
    cpus=$(lscpu -p=CPU 2>/dev/null | grep -vc '^#') || return 0
    cores=$(lscpu -p=CORE,SOCKET | grep -v '^#' | sort -u | wc -l)
    if [ "$cpus" -gt "$cores" ] && [ "${SLURM_CPUS_ON_NODE:-0}" -eq "$cpus" ] &&
        [ $((count * ${SLURM_CPUS_PER_TASK:-1})) -le $((cores * ${SLURM_NNODES:-1})) ]; then
        export SLURM_HINT=${SLURM_HINT:-nomultithread}
    fi
}
