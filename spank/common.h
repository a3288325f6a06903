/*
 * sres.so: the SPANK side of slurm-resilience. The plugin registers the options, hands
 * `srun --auto-resume=1` over to the supervisor, and sets the supervisor's variables in each task's
 * environment. The supervisor decides what to do about a failure.
 *
 * Here: what more than one context needs.
 */
#ifndef SRES_COMMON_H
#define SRES_COMMON_H

#include <stdbool.h>
#include <sys/types.h>

#include <slurm/spank.h>

/* The supervisor's variables travel in this option of srun; only a supervised srun knows it. */
#define SRES_ENV_OPTION "sres-env"
/*
 * The number of the form in which plugin and supervisor talk to each other: of the options' values, of the marks
 * in them, and of the datagrams. resume/srun/env_option.py has the same number.
 */
#ifndef SRES_PROTOCOL /* tests build a plugin of another release */
#define SRES_PROTOCOL 5
#endif
#define SRES_TEXT(number) SRES_TEXT_(number)
#define SRES_TEXT_(number) #number
/* Where slurmstepd reports to. A secret: it comes by srun's environment, never by its command line. */
#define SRES_REPORT_OPTION "sres-report"

/* What plugstack.conf says after the plugin's path. */
struct sres_config {
	const char *supervisor; /* the program that `srun --auto-resume=1` becomes */
	const char *unknown;    /* the first argument that is no option of the plugin, or NULL */
};

struct sres_config sres_config_parse(int ac, char *av[]);

/* Log the argument in plugstack.conf that is no option of the plugin. False when there is none. */
bool sres_config_complain(const struct sres_config *config);

/*
 * Take the supervisor's mark out of the environment. True when it was set: the supervisor started this
 * srun, which must not be handed over again. `parent` is the supervisor's process then, where this srun is its child,
 * else 0.
 */
bool sres_take_guard(pid_t *parent);

/*
 * Take what names the attempt out of the environment: a task submits a job, which is none of the attempt's. Its
 * programs would take themselves for stale, and write no checkpoint.
 */
void sres_forget_attempt(void);

/*
 * End the client (srun, sbatch, salloc) before it starts anything; the caller has logged the reason.
 * Slurm ignores what a plugin returns when plugstack.conf calls the plugin "optional".
 */
void sres_refuse(void) __attribute__((noreturn));

#endif
