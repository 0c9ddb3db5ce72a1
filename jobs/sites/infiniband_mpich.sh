# shellcheck shell=bash
# InfiniBand with MPICH: UCX where its wheel has it, libfabric's verbs otherwise.
export MPICH_CH4_NETMOD=ucx             # ofi for libfabric
export UCX_TLS=rc,sm,self               # reliable connections between nodes, memory within them
export FI_PROVIDER=verbs                # where the netmod is ofi
export MPITRAIN_LAUNCHER=${MPITRAIN_LAUNCHER:-pmi2}  # what SLURM and MPICH both speak
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}  # BLAS threads
