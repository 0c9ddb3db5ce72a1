# shellcheck shell=bash
# Plain Ethernet: TCP between nodes, shared memory within them.
network=${MPITRAIN_NETWORK:?set it to the nodes\' network, as in 10.0.0.0/16}
export OMPI_MCA_pml=ob1                 # UCX would try devices that are not there
export OMPI_MCA_btl=self,sm,tcp         # memory within a node, TCP between them
export OMPI_MCA_btl_tcp_if_include=$network  # not docker0 or a management network
export OMPI_MCA_btl_tcp_links=3         # one connection sends large messages in turns
export OMPI_MCA_osc=^ucx                # the same for windows
export PRTE_MCA_prte_if_include=$network     # the launcher's own messages
export UCX_TLS=tcp,sm,self              # MPICH's wheel uses UCX
export FI_TCP_IFACE=${MPITRAIN_INTERFACE:-eth0}  # or libfabric
