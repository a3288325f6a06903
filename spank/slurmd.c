/* In slurmd: its log is where an administrator sees a wrong plugstack.conf before any job runs. */
#include "common.h"
#include "contexts.h"

int sres_slurmd_init(int ac, char *av[])
{
	struct sres_config config = sres_config_parse(ac, av);

	sres_config_complain(&config);
	return ESPANK_SUCCESS;
}
