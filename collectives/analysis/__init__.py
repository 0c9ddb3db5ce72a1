"""What a schedule means, costs, takes and looks like; nothing here needs MPI."""
