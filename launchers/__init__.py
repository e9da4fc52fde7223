"""Starting and watching runs: SLURM, torchrun, mpirun, DeepSpeed's launcher."""
