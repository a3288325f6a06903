/* The plugin's entry points: pass each call on to the file of the context that it is made in. */
#include "contexts.h"

SPANK_PLUGIN(sres, 1)

int slurm_spank_init(spank_t sp, int ac, char *av[])
{
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return sres_srun_init(sp, ac, av);
	case S_CTX_ALLOCATOR:
		return sres_allocator_init(sp);
	case S_CTX_SLURMD:
		return sres_slurmd_init(ac, av);
	case S_CTX_REMOTE:
		return sres_stepd_init(sp);
	default:
		return ESPANK_SUCCESS;
	}
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char *av[])
{
	(void)sp;
	(void)ac;
	(void)av;
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return sres_srun_post_opt();
	case S_CTX_ALLOCATOR:
		return sres_allocator_post_opt();
	default:
		return ESPANK_SUCCESS;
	}
}

/* Slurm calls it in srun only, between the making of the step and its launch. */
int slurm_spank_local_user_init(spank_t sp, int ac, char *av[])
{
	(void)ac;
	(void)av;
	return sres_srun_step_made(sp);
}

/* Slurm calls it in slurmstepd only. */
int slurm_spank_task_init(spank_t sp, int ac, char *av[])
{
	(void)ac;
	(void)av;
	return sres_stepd_task_init(sp);
}

/* The same. */
int slurm_spank_task_exit(spank_t sp, int ac, char *av[])
{
	(void)ac;
	(void)av;
	return sres_stepd_task_exit(sp);
}
