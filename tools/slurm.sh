#!/bin/bash
# A training job on GPUs under Slurm, one process a GPU; all arguments are train.py's. From the top of the repository:
#     sbatch --nodes=8 tools/slurm.sh --config stage1.yaml --run-dir /shared/runs/stage1
#SBATCH --job-name=olmo3
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
# gpus-per-node, not gpus-per-task: a process finds its GPU by its number on the host, so it has to see all of them.
# TERM@300: five minutes before the time limit the trainers get SIGTERM, save, and exit 143.

# JAX leaves a quarter of the memory alone, unless told otherwise.
export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92}

# wait: a process that has ended early gives the others time to save. A dead one ends them by its missing heartbeat.
srun --wait=300 python train.py --distributed "$@"
code=$?

# 143 is preempted after saving: the job goes back into the queue, and the same command goes on from there. A failure,
# wrong usage (2) or the end of the run (0) stays as it is. After a node's failure Slurm requeues by itself.
if [ $code = 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
