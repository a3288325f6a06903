/* The plugin's entry points: each one goes to the file of the context it was called in. */
#include <stdlib.h>
#include <string.h>

#include "sres.h"

SPANK_PLUGIN(sres, 1)

#define DEFAULT_SUPERVISOR "/usr/bin/sres-resume"

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
	if (spank_context() == S_CTX_LOCAL)
		return sres_srun_post_opt();
	return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t sp, int ac, char *av[])
{
	(void)ac;
	(void)av;
	return sres_stepd_task_init(sp);
}

struct sres_config sres_config_parse(int ac, char *av[])
{
	static const char key[] = "supervisor=";
	struct sres_config config = { .supervisor = DEFAULT_SUPERVISOR, .unknown = NULL };

	for (int i = 0; i < ac; i++) {
		if (strncmp(av[i], key, sizeof(key) - 1) == 0)
			config.supervisor = av[i] + sizeof(key) - 1;
		else if (config.unknown == NULL)
			config.unknown = av[i];
	}
	return config;
}

void sres_refuse(void)
{
	/* Slurm's clients let their user choose the exit code of their own errors; so do we. */
	const char *chosen = getenv("SLURM_EXIT_ERROR");
	int status = chosen ? atoi(chosen) : 0;

	exit(status ? status : 1);
}
