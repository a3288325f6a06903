#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

#define DEFAULT_SUPERVISOR "/opt/slurm-resilience/bin/sres-resume"

/* The supervisor sets it to 1 for each srun that it starts. */
#define GUARD "SRES_SUPERVISED"

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

bool sres_config_complain(const struct sres_config *config)
{
	if (config->unknown == NULL)
		return false;
	slurm_error("sres: plugstack.conf: unknown argument \"%s\"; the only one is supervisor=PATH",
		    config->unknown);
	return true;
}

bool sres_take_guard(pid_t *parent)
{
	const char *guard = getenv(GUARD);
	long number = guard != NULL ? strtol(guard, NULL, 10) : 0;
	bool supervised = number > 0;

	*parent = number > 1 ? (pid_t)number : 0;

	/* A task that saw the guard could not have its own flagged srun supervised. */
	unsetenv(GUARD);
	return supervised;
}

static void forget(const char *const *names, size_t count)
{
	for (size_t i = 0; i < count; i++)
		unsetenv(names[i]);
}

#define FORGET(names) forget(names, sizeof(names) / sizeof((names)[0]))

void sres_forget_attempt(void)
{
	/* resume/srun/environment.py and mesh/rank_variables.py have these lists, too. */
	static const char *const of_a_step[] = {
		"SRES_TOKEN", "SRES_ATTEMPT", "SRES_RESTARTS", "SRES_STEP", "SRES_DIR", "SRES_PROGRESS",
		"SRES_NODES", "SRES_SIZES", "SRES_LENT", "SRES_COMPANION_JOB",
	};
	static const char *const beside_token[] = {
		"NODE_LIST", "MASTER_NODE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "SLURM_NODE",
	};
	static const char *const of_a_rank[] = {
		"SRES_INCARNATION", "SRES_SEAT", "SRES_SEATS", "SRES_SEATS_HERE", "SRES_MEET", "SRES_SECRET",
		"SRES_NODE", "SRES_MIN_WORLD", "SRES_KEEPER", "RANK", "LOCAL_RANK", "WORLD_SIZE",
		"LOCAL_WORLD_SIZE",
	};

	/* A user may have set some of these himself, but not the token, nor the incarnation. */
	if (getenv(of_a_step[0]) != NULL)
		FORGET(beside_token);
	if (getenv(of_a_rank[0]) != NULL)
		FORGET(of_a_rank);
	FORGET(of_a_step);
	/* slurmd sets it in a job that was requeued, and does not take it out of one that was not. */
	unsetenv("SLURM_RESTART_COUNT");
}

void sres_refuse(void)
{
	/* Slurm's clients let their user choose the exit code of their own errors; so does the plugin. */
	const char *chosen = getenv("SLURM_EXIT_ERROR");
	int status = chosen ? atoi(chosen) : 0;

	exit(status ? status : 1);
}
