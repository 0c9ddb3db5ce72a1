# shellcheck shell=bash
# Each rank's python is that of an Apptainer image; the launcher stays outside.
[ -z "${SLURM_JOB_ID:-}" ] || export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-pmix}
container=apptainer
command -v apptainer >/dev/null || container=singularity # as LUMI calls it
unset 'rank[-1]' # the host's python
rank+=("$container" exec --bind "$PWD" --pwd "$PWD")
if [ -e /dev/kfd ]; then
    rank+=(--rocm)
elif [ -n "${SLURM_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] || [ -e /dev/nvidiactl ]; then
    rank+=(--nv)
fi
rank+=("$MPITRAIN_IMAGE" python)
