#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$options
# rally ends the tasks of a failed job itself, and reports first; srun would kill them meanwhile.
exec $srun $command
