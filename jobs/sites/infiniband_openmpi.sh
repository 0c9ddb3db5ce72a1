# shellcheck shell=bash
# InfiniBand with Open MPI over UCX.
export OMPI_MCA_pml=ucx                 # all messages through UCX, or an error: never TCP silently
export OMPI_MCA_osc=^ucx                # windows of one node need none of it, and it is noisy
export UCX_TLS=rc,sm,self               # reliable connections between nodes, memory within them
if [ -e /dev/nvidiactl ]; then
    export UCX_TLS=$UCX_TLS,cuda_copy,gdr_copy,cuda_ipc  # device memory, and GPU to GPU in a node
    export UCX_MEMTYPE_CACHE=n          # it misses what CuPy's wheels allocate: their CUDA is linked in
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}  # BLAS threads
