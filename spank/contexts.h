/* The entry of each context that the plugin acts in; dispatch.c calls them. */
#ifndef SRES_CONTEXTS_H
#define SRES_CONTEXTS_H

#include <slurm/spank.h>

/* srun.c */
int sres_srun_init(spank_t sp, int ac, char *av[]);
int sres_srun_post_opt(void);
int sres_srun_step_made(spank_t sp);

/* allocator.c: sbatch, salloc, scrontab */
int sres_allocator_init(spank_t sp);
int sres_allocator_post_opt(void);

/* slurmd.c */
int sres_slurmd_init(int ac, char *av[]);

/* stepd.c: slurmstepd */
int sres_stepd_init(spank_t sp);
int sres_stepd_task_init(spank_t sp);
int sres_stepd_task_exit(spank_t sp);

#endif
