# shellcheck shell=bash
# How ranks are started, under any scheduler: `launch` and the arguments of Python.
# shellcheck disable=SC2154  # count and hosts are the scheduler's
fail() { echo "jobs: $1" >&2 && exit "${2:-2}"; }
# shellcheck source=/dev/null
[ -z "${MPITRAIN_SITE:-}" ] || . "$(dirname "${BASH_SOURCE[0]}")/sites/$MPITRAIN_SITE.sh"
python=${MPITRAIN_PYTHON:-python}
read -r -a options <<<"${MPITRAIN_LAUNCH_OPTIONS:-}"
read -r -a rank <<<"${MPITRAIN_WRAP:-}"
rank+=("$python")
# shellcheck source=container.sh
[ -z "${MPITRAIN_IMAGE:-}" ] || . "$(dirname "${BASH_SOURCE[0]}")/container.sh"

launch() {
    local kind=${MPITRAIN_LAUNCHER:-mpirun} mpiexec command carried=()
    mpiexec=$(dirname "$(command -v "$python")")/mpiexec # the environment's own, if it has one
    [ -x "$mpiexec" ] || mpiexec=mpiexec
    command=("$mpiexec" -n "$count" "${hosts[@]}")
    if [ "$kind" = mpirun ]; then
        # Open MPI's daemons beyond ssh have the environment of a login, and their libraries' path.
        mapfile -d '' -t carried < <(printf 'env\0'; env -0 |
            grep -zE '^((COLLECTIVES|MPITRAIN|UCX|FI|OMP|NCCL)_\w*|\w+_NUM_THREADS|(PYTHON)?PATH)=')
        # shellcheck disable=SC2016  # for the shell of a rank
        [ -z "${LD_LIBRARY_PATH:-}" ] || carried+=(sh -c
            'LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$0 exec "$@"' "$LD_LIBRARY_PATH")
    else
        starter "$kind"
    fi
    command -v "${command[0]}" >/dev/null ||
        fail "MPITRAIN_LAUNCHER=$kind: there is no ${command[0]} on this node"
    command+=("${options[@]}")
    echo "jobs: ${command[*]} ${rank[*]} $*"
    # exec: signals to this process are the launcher's, which passes them on to the ranks.
    exec "${command[@]}" "${carried[@]}" "${rank[@]}" "$@"
}
