#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$options
# A secret of this job's own, which its tasks inherit, unless there is one for all jobs.
if [ -z "$${RALLY_SECRET+x}$${RALLY_SECRET_FILE+x}" ] && [ ! -e "$${XDG_CONFIG_HOME:-$$HOME/.config}/rallypoint/secret" ]; then
    export RALLY_SECRET=$$(head -c 32 /dev/urandom | base64)
fi
# rally ends the tasks of a failed job itself, and reports first; srun would kill them meanwhile.
exec $srun $command
