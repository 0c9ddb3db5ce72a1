# shellcheck shell=bash
# How ranks are started, in one place: the job scripts source this and call `launch` with the
# arguments of Python.  The allocation is SLURM's, PBS's or PJM's; docs/sites.md has the settings of
# sites.
#
#   MPITRAIN_PYTHON          the interpreter of the environment (default: python)
#   MPITRAIN_LAUNCHER        mpirun  the environment's mpiexec within the allocation (the default)
#                            pmix    srun --mpi=pmix: Open MPI where SLURM has that plugin
#                            pmi2    srun --mpi=pmi2: MPICH
#                            srun    srun with the site's own plugin: Cray MPICH
#                            pals    the mpiexec of HPE's PALS, under PBS
#   MPITRAIN_LAUNCH_OPTIONS  more options of that launcher, with spaces between them
#   MPITRAIN_WRAP            a command before each rank's python, with spaces between its words
#   MPITRAIN_IMAGE           an Apptainer image whose python runs instead; the launcher stays outside,
#                            under SLURM by default pmix
#   MPITRAIN_RANKS_PER_NODE  under PBS, where the lines of the node file do not say it
#   MPITRAIN_SITE            a file of sites/, beside this one, to source first: slingshot_mpich, ...

# shellcheck source=/dev/null
[ -z "${MPITRAIN_SITE:-}" ] || . "$(dirname "${BASH_SOURCE[0]}")/sites/$MPITRAIN_SITE.sh"

if [ -n "${PBS_JOBID:-}" ]; then
    cd "$PBS_O_WORKDIR" || exit 2  # a job of PBS begins in the home folder
elif [ -z "${SLURM_JOB_ID:-}${PJM_JOBID:-}" ]; then
    echo "jobs: this is no job of SLURM, PBS or PJM; give the script to sbatch, qsub or pjsub" >&2
    exit 2
fi
python=${MPITRAIN_PYTHON:-python}

# Gives srun's ranks one thread of each core, where the job has whole nodes and cores enough.  srun
# refuses a hint beside other options of threads and cores, and these are the user's.
hint() {  # the ranks, then srun's options
    local cores cpus ranks=$1
    shift
    [[ ! " $* " =~ \ --(hint|cpu.bind|(threads|ntasks)-per-core) ]] || return 0
    cpus=$(lscpu -p=CPU 2>/dev/null | grep -vc '^#') || return 0
    cores=$(lscpu -p=CORE,SOCKET | grep -v '^#' | sort -u | wc -l)
    if [ "$cpus" -gt "$cores" ] && [ "${SLURM_CPUS_ON_NODE:-0}" -eq "$cpus" ] &&
        [ $((ranks * ${SLURM_CPUS_PER_TASK:-1})) -le $((cores * ${SLURM_NNODES:-1})) ]; then
        export SLURM_HINT=${SLURM_HINT:-nomultithread}
    fi
}

launch() {
    local nodes ranks per_node='' kind=${MPITRAIN_LAUNCHER:-mpirun} mpiexec container=apptainer
    # Arrays: options stay apart whatever is in them.
    local -a command options rank
    read -r -a options <<<"${MPITRAIN_LAUNCH_OPTIONS:-}"
    read -r -a rank <<<"${MPITRAIN_WRAP:-}"
    if [ -n "${PBS_JOBID:-}" ]; then
        nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
        # The file has mpiprocs lines for each node; some sites write one.
        per_node=${MPITRAIN_RANKS_PER_NODE:-$(($(wc -l <"$PBS_NODEFILE") / nodes))}
        ranks=$((nodes * per_node))
    elif [ -n "${PJM_JOBID:-}" ]; then
        ranks=$PJM_MPI_PROC
    else
        ranks=${SLURM_NTASKS:-$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))}
        [ -z "${MPITRAIN_IMAGE:-}" ] || kind=${MPITRAIN_LAUNCHER:-pmix}
        # From SLURM 22.05 on, srun takes the allocation's --cpus-per-task only like this.
        [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    fi
    case $kind in
        pmix | pmi2) command=(srun "--mpi=$kind" --kill-on-bad-exit=1) ;;
        srun) command=(srun --kill-on-bad-exit=1) ;;
        pals)
            command=(mpiexec -n "$ranks" --ppn "${per_node:-1}")
            [[ " ${options[*]}" == *" --cpu-bind"* ]] ||
                command+=(--cpu-bind depth --depth "${OMP_NUM_THREADS:-1}")
            ;;
        mpirun)
            mpiexec=$(command -v "$python") && mpiexec=$(dirname "$mpiexec")/mpiexec
            [ -x "$mpiexec" ] || mpiexec=mpiexec
            command=("$mpiexec" -n "$ranks")
            [ -z "${PBS_JOBID:-}" ] || command+=(-machinefile "$PBS_NODEFILE")
            ;;
        *)
            echo "jobs: MPITRAIN_LAUNCHER=$kind: expected mpirun, pmix, pmi2, srun or pals" >&2
            return 2
            ;;
    esac
    [ "${command[0]}" != srun ] || hint "$ranks" "${options[@]}"
    if [ "$kind" = pals ] && [ -z "$per_node" ]; then
        echo "jobs: MPITRAIN_LAUNCHER=pals needs a job of PBS; under SLURM take srun" >&2
        return 2
    fi
    if ! command -v "${command[0]}" >/dev/null; then
        echo "jobs: MPITRAIN_LAUNCHER=$kind: there is no ${command[0]} on this node" >&2
        return 2
    fi
    command+=("${options[@]}" "${rank[@]}")
    if [ -n "${MPITRAIN_IMAGE:-}" ]; then
        command -v apptainer >/dev/null || container=singularity  # as LUMI calls it
        command+=("$container" exec --bind "$PWD" --pwd "$PWD")
        if [ -e /dev/kfd ]; then
            command+=(--rocm)
        elif [ -n "${SLURM_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] || [ -e /dev/nvidiactl ]; then
            command+=(--nv)
        fi
        command+=("$MPITRAIN_IMAGE" python)
    else
        command+=("$python")
    fi
    echo "jobs: ${command[*]} $*"
    # exec: signals to this process are the launcher's, which passes them on to the ranks.
    exec "${command[@]}" "$@"
}
