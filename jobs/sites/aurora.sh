# shellcheck shell=bash
# Aurora: its own MPICH over Slingshot, started by PALS.
export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-pals}
export MPIR_CVAR_ENABLE_GPU=${MPIR_CVAR_ENABLE_GPU:-0}  # messages are in the host's memory
export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}  # many messages under way
export FI_CXI_CQ_FILL_PERCENT=${FI_CXI_CQ_FILL_PERCENT:-20}  # beyond 16 nodes, by ALCF's guide
