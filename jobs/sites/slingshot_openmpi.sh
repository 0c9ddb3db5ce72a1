# shellcheck shell=bash
# HPE Slingshot with an Open MPI whose libfabric knows cxi.  pip's does not, and takes TCP.
export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-pmix}
export FI_PROVIDER=cxi                  # Slingshot, or an error: never TCP silently
export OMPI_MCA_pml=cm                  # UCX knows no Slingshot: ucx is an error at start
export OMPI_MCA_mtl=ofi                 # libfabric
export OMPI_MCA_osc=^ucx                # the same for windows
export PMIX_MCA_psec=native             # as SLURM's PMIx, which warns otherwise
if [ "$MPITRAIN_LAUNCHER" = pmix ]; then  # the rendezvous that Cray MPICH alone can do
    export MPITRAIN_LAUNCH_OPTIONS="--network=disable_rdzv_get ${MPITRAIN_LAUNCH_OPTIONS:-}"
fi
