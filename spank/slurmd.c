/* In slurmd: the one place where an administrator sees a wrong plugstack.conf without running a job. */
#include <stddef.h>

#include "sres.h"

int sres_slurmd_init(int ac, char *av[])
{
	struct sres_config config = sres_config_parse(ac, av);

	if (config.unknown != NULL)
		slurm_error("sres: plugstack.conf: unknown argument \"%s\"; the only one is supervisor=PATH",
			    config.unknown);
	return ESPANK_SUCCESS;
}
