# shellcheck shell=bash
# Ranks that come back: `come_back` and a job file, PROGRAM.py or -m MODULE, with arguments.
# shellcheck disable=SC2154  # job, nodes and restarts are the scheduler's
# shellcheck disable=SC2317  # traps call it
tell() {
    told=${told:-$1}
    echo "jobs: told to stop; the ranks stop after a step"
    kill -USR1 "$ranks" 2>/dev/null || true
}

come_back() {
    told='' ended='' usual=20
    echo "jobs: job $job on $nodes, restart $restarts"
    case ${1:?a job file or a program is needed} in
        *.py | -m) usual=0 ;; # one that resumes says so by the variable
        *)
            # Some launchers return 0 when the daemon of a node dies; what ended as it should says so.
            ended=$PWD/.mpitrain-$job-$restarts.ended
            set -- -m mpitrain train "$@" --resume --ended "$ended"
            ;;
    esac
    limit=${MPITRAIN_MAX_RESTARTS:-$usual}
    [[ $limit =~ ^[0-9]{1,9}$ ]] ||
        fail "MPITRAIN_MAX_RESTARTS=$limit: a number of at most 9 digits is needed"
    [ "$restarts" -le "$limit" ] ||
        fail "the scheduler has started this again, and MPITRAIN_MAX_RESTARTS allows $limit restarts; a program that goes on from what it has saved needs more" 1
    # A rank that waits for so many seconds says who is missing, and the job comes back.
    export COLLECTIVES_TIMEOUT=${COLLECTIVES_TIMEOUT:-600}
    (launch "$@") &
    ranks=$!
    trap 'tell USR1' USR1
    [ -n "$ended" ] || [ "$limit" -gt 0 ] || trap '' USR1 # such a program may have no handler
    trap 'tell TERM' TERM
    # A wait that a signal ended is no end of the ranks.
    while status=0 && { wait "$ranks" || status=$?; } && kill -0 "$ranks" 2>/dev/null; do :; done
    if [ -n "$ended" ] && ! rm "$ended" 2>/dev/null && [ "$status" -eq 0 ]; then
        echo "jobs: the launcher returned 0, but training has not ended"
        status=255
    fi
    # 0 is done; 1 and 2 are the program's own errors, 126 and 127 a command that is not there: all
    # would come again.  75: it was told to stop; others: a rank, a node or a network died.  When told,
    # a launcher may return 1 whatever ranks do, and srun may kill ranks on their way out.
    case $status/$told in
        0/* | 1/ | 2/* | 126/* | 127/*) exit "$status" ;;
        75/*) echo "jobs: stopped as told" ;;
        */?*) echo "jobs: the ranks were told to stop and ended with status $status" ;;
        *) echo "jobs: the ranks died with status $status${ended:+; going on from the newest checkpoint}" ;;
    esac
    [ "$restarts" -lt "$limit" ] ||
        fail "restarted $restarts times, which is the limit (MPITRAIN_MAX_RESTARTS); submit it again to go on" "$status"
    queue_again
    exit "$status"
}
