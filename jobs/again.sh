# shellcheck shell=bash
# Ranks that come back: the job scripts source this behind launch.sh and call `come_back`.
#
#   come_back JOB.toml [--set ...]       mpitrain train, from its newest checkpoint
#   come_back PROGRAM.py [ARGUMENT ...]  a program of one's own; or -m MODULE ...
#
#   MPITRAIN_MAX_RESTARTS  times that the job may come back (default 20; 0 for a program, which must
#                          go on from what it has saved).  With 0, a program gets no SIGUSR1 before
#                          the limit, as it may have no handler
#   COLLECTIVES_TIMEOUT    seconds after which a rank that waits says who is missing (default 600)

#: Seconds before the end of the walltime at which ranks of a PBS job are told; sbatch has --signal.
notice=120

# What PBS says of the job under a name; nothing where qstat does not say it.
of_job() { qstat -f "$PBS_JOBID" 2>/dev/null | sed -n "s/^ *$1 = //p"; }

# Seconds of a PBS job's walltime.
walltime() {
    local hours minutes seconds
    IFS=: read -r hours minutes seconds < <(of_job 'Resource_List\.walltime') || return 0
    echo $((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
}

# Sends this shell SIGUSR1 in time before the walltime ends, as SLURM does by itself.
watch_walltime() {
    local limit left
    limit=$(walltime)
    if [ -z "$limit" ]; then
        echo "jobs: qstat does not say the walltime; the ranks are not told before it ends"
        return
    fi
    left=$((limit > 2 * notice ? limit - notice : limit / 2))
    (
        trap 'kill "$sleeper"; exit' TERM
        sleep "$((left > SECONDS ? left - SECONDS : 0))" &
        sleeper=$!
        wait "$sleeper"
        kill -USR1 $$
    ) &
    clock=$!
}

queue_again() {
    local names
    echo "jobs: queueing $job again"
    if [ -z "${PBS_JOBID:-}" ]; then
        scontrol requeue "$job"
        return
    fi
    # qrerun is for operators: a new job of this very script, which waits for the end of this one.
    export MPITRAIN_RESTART=$((restarts + 1))
    names=$(compgen -e | grep -E '^(MPITRAIN|COLLECTIVES)_' | paste -sd,)
    qsub -W "depend=afterany:$PBS_JOBID" -v "$names" "$0" ||
        echo "jobs: qsub refuses; submit the same again, and it goes on from where it was"
}

# shellcheck disable=SC2317  # traps call it
tell() {
    told=${told:-$1}
    echo "jobs: told to stop; the ranks stop after a step"
    kill -USR1 "$ranks" 2>/dev/null || true
}

come_back() {
    local status=0 how=died ended='' runs hears=yes limit=${MPITRAIN_MAX_RESTARTS:-20}
    told=''
    clock=''
    restarts=${SLURM_RESTART_COUNT:-${MPITRAIN_RESTART:-0}}
    if [ -n "${PBS_JOBID:-}" ]; then
        job=${PBS_JOBID%%.*}
        runs=$(of_job run_count || true)
        restarts=$((restarts + (${runs:-1} > 1 ? ${runs:-1} - 1 : 0))) # those of PBS itself
        echo "jobs: job $job on $(sort -u "$PBS_NODEFILE" | paste -sd,), restart $restarts"
    else
        job=$SLURM_JOB_ID
        [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
        echo "jobs: job $job on $SLURM_JOB_NODELIST, restart $restarts"
    fi
    if [[ ! $limit =~ ^[0-9]{1,9}$ ]]; then
        echo "jobs: MPITRAIN_MAX_RESTARTS=$MPITRAIN_MAX_RESTARTS: a number of at most 9 digits is needed" >&2
        exit 2
    fi
    case ${1:?a job file or a program is needed} in
        *.py | -m) # one that resumes says so by the variable
            limit=${MPITRAIN_MAX_RESTARTS:-0}
            [ "$limit" -gt 0 ] || hears=''
            ;;
        *)
            # Some launchers return 0 when the daemon of a node dies; what ended as it should says so.
            ended=$PWD/.mpitrain-$job-$restarts.ended
            set -- -m mpitrain train "$@" --resume --ended "$ended"
            ;;
    esac
    if [ "$restarts" -gt "$limit" ]; then
        echo "jobs: the scheduler has started this again, and MPITRAIN_MAX_RESTARTS allows $limit restarts; a program that goes on from what it has saved needs more" >&2
        exit 1
    fi
    # A rank that waits for so many seconds says who is missing, and the job comes back.
    export COLLECTIVES_TIMEOUT=${COLLECTIVES_TIMEOUT:-600}
    (launch "$@") &
    ranks=$!
    if [ -n "$hears" ]; then trap 'tell USR1' USR1; else trap '' USR1; fi
    trap 'tell TERM' TERM
    [ -z "$hears" ] || [ -z "${PBS_JOBID:-}" ] || watch_walltime

    wait "$ranks" || status=$?
    # A wait that a signal ended is no end of the ranks.
    while kill -0 "$ranks" 2>/dev/null; do
        status=0
        wait "$ranks" || status=$?
    done
    [ -z "$clock" ] || kill "$clock" 2>/dev/null || true

    if [ "$status" -eq 0 ] && [ -n "$ended" ] && [ ! -e "$ended" ]; then
        echo "jobs: the launcher returned 0, but training has not ended"
        status=255
    fi
    [ -z "$ended" ] || rm -f "$ended"

    # 0 is done; 1 and 2 are what the program says of itself, 126 and 127 of a command that is not
    # there, and all would say it again; 75 is that it was told to stop.  Anything else is a rank, a
    # node or a network that died.  A launcher that is told, too, may return 1 whatever ranks do.
    case $status in
        1) [ -n "$told" ] || exit 1 ;;&
        0 | 2 | 126 | 127) exit "$status" ;;
        75) echo "jobs: stopped as told" ;;
        *)
            # srun may kill ranks that are on their way out.
            [ -z "$told" ] || how="were told to stop and ended"
            echo "jobs: the ranks $how with status $status${ended:+; going on from the newest checkpoint}"
            ;;
    esac
    if [ -n "${PBS_JOBID:-}" ] && [ "$told" = TERM ]; then
        # qdel, or a preemption after which PBS itself runs the job again (-r y).
        echo "jobs: PBS ends the job, and it is not queued again from here"
        exit "$status"
    fi
    if [ "$restarts" -ge "$limit" ]; then
        echo "jobs: restarted $restarts times, which is the limit (MPITRAIN_MAX_RESTARTS); submit it again to go on"
        exit "$status"
    fi
    queue_again
    exit "$status"
}
