# shellcheck shell=bash
# How ranks are started, in one place: the job scripts source this and call `launch` with the
# arguments of Python.
#
#   MPITRAIN_PYTHON    the interpreter of the environment (default: python)
#   MPITRAIN_LAUNCHER  pmix    srun --mpi=pmix: Open MPI where SLURM has that plugin
#                      pmi2    srun --mpi=pmi2: MPICH
#                      mpirun  the environment's mpiexec within the allocation (the default)
#   MPITRAIN_IMAGE     an Apptainer image whose python runs instead; the launcher stays outside, by
#                      default pmix
#   MPITRAIN_SITE      a file of sites/, beside this one, to source first: infiniband_openmpi, ...

python=${MPITRAIN_PYTHON:-python}
if [ -n "${MPITRAIN_SITE:-}" ]; then
    # shellcheck source=/dev/null
    . "$(dirname "${BASH_SOURCE[0]}")/sites/$MPITRAIN_SITE.sh"
fi

launch() {
    local kind=${MPITRAIN_LAUNCHER:-mpirun}
    # Arrays: options stay apart whatever is in them.
    local -a command rank=("$python")
    if [ -n "${MPITRAIN_IMAGE:-}" ]; then
        kind=${MPITRAIN_LAUNCHER:-pmix}
        rank=(apptainer exec --bind "$SLURM_SUBMIT_DIR" --pwd "$SLURM_SUBMIT_DIR")
        [ -z "${SLURM_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] || rank+=(--nv)
        rank+=("$MPITRAIN_IMAGE" python)
    fi
    case $kind in
        pmix | pmi2)
            command=(srun "--mpi=$kind" --kill-on-bad-exit=1)
            ;;
        mpirun)
            local mpiexec
            mpiexec=$(dirname "$(command -v "$python")")/mpiexec
            [ -x "$mpiexec" ] || mpiexec=mpiexec
            command=("$mpiexec" -n "${SLURM_NTASKS:-$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))}")
            ;;
        *)
            echo "jobs: MPITRAIN_LAUNCHER=$kind: expected pmix, pmi2 or mpirun" >&2
            return 2
            ;;
    esac
    echo "jobs: ${command[*]} ${rank[*]} $*"
    # exec: signals to this process are the launcher's, which passes them on to the ranks.
    exec "${command[@]}" "${rank[@]}" "$@"
}
