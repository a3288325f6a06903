/* In sbatch and salloc: refuse --auto-resume and say where it belongs; pass no attempt on to a new job. */
#include "common.h"
#include "contexts.h"

static int on_auto_resume(int val, const char *value, int remote)
{
	(void)val;
	(void)value;
	(void)remote;
	slurm_error("sres: --auto-resume belongs on the srun inside the allocation: "
		    "srun --auto-resume=1 ...");
	sres_refuse();
}

int sres_allocator_init(spank_t sp)
{
	struct spank_option auto_resume = {
		.name = "auto-resume",
		.arginfo = "N",
		.usage = "not here: belongs on the srun inside the allocation",
		/* Optional, so that a bare "#SBATCH --auto-resume" gets this refusal, not getopt's. */
		.has_arg = 2,
		.cb = on_auto_resume,
	};

	sres_forget_attempt();
	if (spank_option_register(sp, &auto_resume) != ESPANK_SUCCESS)
		slurm_verbose("sres: could not register --auto-resume");
	return ESPANK_SUCCESS;
}
