/*
 * In srun: which node has rank 0. Of a step whose tasks are laid out in another order than its nodes
 * (--distribution=arbitrary, some topologies), slurmstepd cannot tell; slurmctld can, once for the step.
 */
#ifndef SRES_STEP_LAYOUT_H
#define SRES_STEP_LAYOUT_H

#include <slurm/spank.h>

/*
 * From srun to its tasks, as NODE_ID,NODE. Slurm hands every SLURM_* variable on, whatever --export says.
 */
#define RANK_0_NODE "SLURM_SRES_RANK_0_NODE"

/* Leave RANK_0_NODE in srun's environment, if it is not the step's first node. */
void step_layout_export(spank_t sp);

#endif
