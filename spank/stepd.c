/* In slurmstepd: set the supervisor's variables in the environment of each task. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common.h"
#include "contexts.h"
#include "env_option.h"

/* Slurm numbers the batch script, the external step and the interactive step from the top. */
#define FIRST_SPECIAL_STEP 0xfffffff0u
/* As which srun sends the option --sres-env: Slurm's prefix, this plugin's name and the option's. */
#define OPTION_IN_TASKS "_SLURM_SPANK_OPTION_sres_sres_env"

/* The value of --sres-env; NULL when this step has none. */
static char *variables;

static int ignore(int val, const char *value, int remote)
{
	(void)val;
	(void)value;
	(void)remote;
	return ESPANK_SUCCESS;
}

static int on_env_option(int val, const char *value, int remote)
{
	(void)val;
	(void)remote;
	free(variables);
	variables = strdup(value ? value : "");
	return variables ? ESPANK_SUCCESS : ESPANK_ERROR;
}

int sres_stepd_init(spank_t sp)
{
	/* srun sends every option that was given; slurmstepd complains of those it does not know. */
	struct spank_option auto_resume = {
		.name = "auto-resume", .arginfo = "N", .usage = "-", .has_arg = 1, .cb = ignore,
	};
	struct spank_option env = {
		.name = SRES_ENV_OPTION, .arginfo = "VARIABLES", .usage = "-", .has_arg = 1, .cb = on_env_option,
	};

	if (spank_option_register(sp, &auto_resume) != ESPANK_SUCCESS ||
	    spank_option_register(sp, &env) != ESPANK_SUCCESS)
		slurm_error("sres: could not register --sres-env");
	return ESPANK_SUCCESS;
}

/*
 * The value for this task: a number in place of @NODEID, @PROCID and @LOCALID, which differ from task to
 * task; every other value as it is. NULL when Slurm does not tell the number.
 */
static const char *own_value(spank_t sp, const char *value, char *text, size_t size)
{
	uint32_t number;
	int local;

	if (strcmp(value, "@NODEID") == 0) {
		if (spank_get_item(sp, S_JOB_NODEID, &number) != ESPANK_SUCCESS)
			return NULL;
	} else if (strcmp(value, "@PROCID") == 0) {
		if (spank_get_item(sp, S_TASK_GLOBAL_ID, &number) != ESPANK_SUCCESS)
			return NULL;
	} else if (strcmp(value, "@LOCALID") == 0) {
		if (spank_get_item(sp, S_TASK_ID, &local) != ESPANK_SUCCESS)
			return NULL;
		number = (uint32_t)local;
	} else {
		return value;
	}
	snprintf(text, size, "%" PRIu32, number);
	return text;
}

/*
 * Say so, once on each node, where the directory of the fence is not seen: a program that asks whether it may
 * write gets the answer no there, and keeps no checkpoint.
 */
static void look_for_fence(spank_t sp, const char *directory)
{
	char path[PATH_MAX];
	int local;

	if (spank_get_item(sp, S_TASK_ID, &local) != ESPANK_SUCCESS || local != 0)
		return;
	if (snprintf(path, sizeof(path), "%s/token", directory) < (int)sizeof(path) && access(path, F_OK) == 0)
		return;
	slurm_error("sres: this node does not see %s: programs that ask attempt.is_current() write nothing here; "
		    "start srun in a directory that all nodes share", directory);
}

int sres_stepd_task_init(spank_t sp)
{
	uint32_t step;
	char *cursor = variables, *name, *value, text[16];
	const char *own, *fence = NULL;
	int more;

	if (variables == NULL)
		return ESPANK_SUCCESS;
	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS)
		goto fail;
	if (step >= FIRST_SPECIAL_STEP)
		return ESPANK_SUCCESS;
	/* Newer releases (seen on 26.05) show the tasks how the option travelled. */
	spank_unsetenv(sp, OPTION_IN_TASKS);
	while ((more = env_option_next(&cursor, &name, &value)) > 0) {
		own = own_value(sp, value, text, sizeof(text));
		if (own == NULL || spank_setenv(sp, name, own, 1) != ESPANK_SUCCESS)
			goto fail;
		if (strcmp(name, "SRES_DIR") == 0)
			fence = own;
	}
	if (more < 0)
		goto fail;
	if (fence != NULL)
		look_for_fence(sp, fence);
	return ESPANK_SUCCESS;

fail:
	/*
	 * A task with only some of its variables would train wrongly or hang. This is the task's own
	 * process, before it becomes the program, and Slurm ignores an error from an "optional"
	 * plugin: so end the process.
	 */
	slurm_error("sres: the supervisor's environment could not be set; the task is not started");
	_exit(1);
}
