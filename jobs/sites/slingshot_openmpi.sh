# shellcheck shell=bash
# HPE Slingshot with an Open MPI whose libfabric knows cxi.  pip's does not, and takes TCP.
export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-pmix}
export FI_PROVIDER=${MPITRAIN_PROVIDER:-cxi}  # Slingshot, or an error: never TCP silently
if [ "$FI_PROVIDER" = lnx ]; then       # memory within a node, Slingshot between nodes: experimental
    adapters='shm+cxi:cxi0|shm+cxi:cxi1|shm+cxi:cxi2|shm+cxi:cxi3'
    export FI_LNX_PROV_LINKS=${FI_LNX_PROV_LINKS:-$adapters}  # each rank takes the next adapter
    export FI_SHM_USE_XPMEM=1           # one copy within a node
    export OMPI_MCA_mtl_ofi_av=table    # lnx knows no other
fi
export OMPI_MCA_pml=cm                  # UCX knows no Slingshot: ucx is an error at start
export OMPI_MCA_mtl=ofi                 # libfabric
export OMPI_MCA_osc=^ucx                # the same for windows
export PMIX_MCA_psec=native             # as SLURM's PMIx, which warns otherwise
if [ "$MPITRAIN_LAUNCHER" = pmix ]; then  # the rendezvous that Cray MPICH alone can do
    export MPITRAIN_LAUNCH_OPTIONS="--network=disable_rdzv_get ${MPITRAIN_LAUNCH_OPTIONS:-}"
fi
