/*
 * sres.so: the SPANK side of slurm-resilience. It registers the options, hands `srun --auto-resume=1`
 * over to the supervisor, and sets what the supervisor wants in each task's environment. What to do
 * about a failure is decided elsewhere.
 */
#ifndef SRES_H
#define SRES_H

#include <slurm/spank.h>

/* Set by the supervisor for the srun it starts, so that this one is not handed over again. */
#define SRES_GUARD "SRES_SUPERVISED"

/* What plugstack.conf said after the plugin's path. */
struct sres_config {
	const char *supervisor; /* the program that `srun --auto-resume=1` becomes */
	const char *unknown;    /* the first argument that means nothing to us, or NULL */
};

struct sres_config sres_config_parse(int ac, char *av[]);

/*
 * End the client (srun, sbatch, salloc) before it starts anything: the caller has logged why.
 * Needed because Slurm ignores what a plugin returns when plugstack.conf calls it "optional".
 */
void sres_refuse(void) __attribute__((noreturn));

/* srun */
int sres_srun_init(spank_t sp, int ac, char *av[]);
int sres_srun_post_opt(void);

/* sbatch, salloc, scrontab */
int sres_allocator_init(spank_t sp);

/* slurmd */
int sres_slurmd_init(int ac, char *av[]);

/* slurmstepd */
int sres_stepd_init(spank_t sp);
int sres_stepd_task_init(spank_t sp);

#endif
