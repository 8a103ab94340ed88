"""MPI through mpi4py, which is imported in this directory only."""
