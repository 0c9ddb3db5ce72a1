# shellcheck shell=bash
# HPE Slingshot with Cray MPICH: Frontier, LUMI, Perlmutter, Alps; under PBS Polaris and Derecho.
export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-${PBS_JOBID:+pals}}
export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-srun}
if [ -n "${CRAY_LD_LIBRARY_PATH:-}" ]; then  # the modules' MPI, not the older one of ld.so
    export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# 1 aborts at start where mpi4py was built without the module craype-accel-*: its GTL is missing.
export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-0}
export FI_CXI_RX_MATCH_MODE=${FI_CXI_RX_MATCH_MODE:-hybrid}  # software where the adapter's list is full
export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}  # many messages under way
