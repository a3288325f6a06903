/* In slurmstepd: set the supervisor's variables in each task, and tell it how each task ended. */
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common.h"
#include "contexts.h"
#include "env_option.h"
#include "step_layout.h"
#include "step_view.h"
#include "task_report.h"

/* As which srun sends an option: Slurm's prefix, this plugin's name and the option's. */
#define ENV_IN_TASKS "_SLURM_SPANK_OPTION_sres_sres_env"
#define REPORT_IN_TASKS "_SLURM_SPANK_OPTION_sres_sres_report"

/* MASTER_PORT, below the kernel's ephemeral ports; resume/srun/environment.py has the same numbers. */
#define PORT_BASE 20000u
#define PORT_SPAN 10000u
#define PORTS_PER_STEP 7u
#define PORT_MARK "@PORT."

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

static int on_report_option(int val, const char *value, int remote)
{
	(void)val;
	(void)remote;
	task_report_to(value ? value : "");
	return ESPANK_SUCCESS;
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
	struct spank_option report = {
		.name = SRES_REPORT_OPTION, .arginfo = "TARGET", .usage = "-", .has_arg = 1,
		.cb = on_report_option,
	};

	if (spank_option_register(sp, &auto_resume) != ESPANK_SUCCESS ||
	    spank_option_register(sp, &env) != ESPANK_SUCCESS ||
	    spank_option_register(sp, &report) != ESPANK_SUCCESS)
		slurm_error("sres: could not register the supervisor's options");
	return ESPANK_SUCCESS;
}

/*
 * Whether a value is this mark, alone or as MARK+N: N are the nodes or tasks of the parts of the world that come
 * before this one, in other jobs.
 */
static bool is_mark(const char *value, const char *mark, uint32_t *before)
{
	size_t length = strlen(mark);

	*before = 0;
	if (strncmp(value, mark, length) != 0)
		return false;
	if (value[length] == '\0')
		return true;
	if (value[length] != '+' || value[length + 1] < '0' || value[length + 1] > '9')
		return false;
	*before = (uint32_t)strtoul(value + length + 1, NULL, 10);
	return true;
}

/* The numbers that differ from task to task or from step to step; false when the mark is none of them. */
static bool own_number(spank_t sp, const struct step_view *view, const char *mark, uint32_t *number)
{
	uint32_t before;
	int local;

	if (is_mark(mark, "@NODEID", &before)) {
		if (!step_node_rank(sp, number))
			return false;
		*number += before;
		return true;
	}
	if (strcmp(mark, "@NNODES") == 0)
		return spank_get_item(sp, S_JOB_NNODES, number) == ESPANK_SUCCESS;
	if (is_mark(mark, "@PROCID", &before)) {
		if (spank_get_item(sp, S_TASK_GLOBAL_ID, number) != ESPANK_SUCCESS)
			return false;
		*number += before;
		return true;
	}
	if (strcmp(mark, "@LOCALID") == 0) {
		if (spank_get_item(sp, S_TASK_ID, &local) != ESPANK_SUCCESS)
			return false;
		*number = (uint32_t)local;
		return true;
	}
	if (strncmp(mark, PORT_MARK, sizeof(PORT_MARK) - 1) != 0)
		return false;
	/* The number behind it is the job's; the steps of a job lie apart. */
	*number = (uint32_t)strtoul(mark + sizeof(PORT_MARK) - 1, NULL, 10) % PORT_SPAN;
	*number = PORT_BASE + (*number + view->step % PORT_SPAN * PORTS_PER_STEP) % PORT_SPAN;
	return true;
}

static bool is_number_mark(const char *value)
{
	uint32_t unused;

	return is_mark(value, "@NODEID", &unused) || strcmp(value, "@NNODES") == 0 ||
	       is_mark(value, "@PROCID", &unused) || strcmp(value, "@LOCALID") == 0 ||
	       strncmp(value, PORT_MARK, sizeof(PORT_MARK) - 1) == 0;
}

/*
 * The value for this task: what the step itself says in place of a mark, and every other value as it is.
 * NULL when Slurm does not tell it.
 */
static const char *own_value(spank_t sp, const struct step_view *view, const char *value, char *text,
			     size_t size)
{
	uint32_t number;

	if (strcmp(value, "@NODELIST") == 0)
		return view->node_list;
	if (strcmp(value, "@MASTER_NODE") == 0)
		return view->first;
	if (strcmp(value, "@MASTER_ADDR") == 0)
		return view->address;
	if (!is_number_mark(value))
		return value;
	if (!own_number(sp, view, value, &number))
		return NULL;
	snprintf(text, size, "%" PRIu32, number);
	return text;
}

/*
 * Say so, once on each node, where the directory of the fence is not seen: a program that asks whether it may
 * write gets the answer no there, and keeps no checkpoint.
 */
static void look_for_fence(spank_t sp, const char *directory)
{
	char path[PATH_MAX], node[HOST_NAME_MAX + 1];
	int local;

	if (spank_get_item(sp, S_TASK_ID, &local) != ESPANK_SUCCESS || local != 0)
		return;
	if (snprintf(path, sizeof(path), "%s/token", directory) < (int)sizeof(path) && access(path, F_OK) == 0)
		return;
	/* Newer releases of srun do not say which node a line comes from. */
	if (spank_getenv(sp, "SLURMD_NODENAME", node, sizeof(node)) != ESPANK_SUCCESS)
		snprintf(node, sizeof(node), "this node");
	slurm_error("sres: %s does not see %s: programs that ask attempt.is_current() write nothing there; "
		    "start srun in a directory that all nodes share", node, directory);
}

/* Say once on each node that its plugin cannot read what the supervisor wants of the tasks. */
static void complain_of_protocol(spank_t sp, unsigned protocol)
{
	int local;

	if (spank_get_item(sp, S_TASK_ID, &local) == ESPANK_SUCCESS && local != 0)
		return;
	slurm_error("sres: the plugin on this node and the supervisor of this srun are of different releases (protocol "
		    "%d and %u), so no task is started here; install the same release on all machines",
		    SRES_PROTOCOL, protocol);
}

int sres_stepd_task_init(spank_t sp)
{
	uint32_t step;
	unsigned protocol;
	char *cursor, *name, *value, text[16];
	const char *own, *fence = NULL;
	struct step_view view = { .node_list = NULL };
	int more;

	if (variables == NULL)
		return ESPANK_SUCCESS;
	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS)
		goto fail;
	if (step_is_special(step))
		return ESPANK_SUCCESS;
	/* Newer releases (seen on 26.05) show the tasks how the options travelled. */
	spank_unsetenv(sp, ENV_IN_TASKS);
	spank_unsetenv(sp, REPORT_IN_TASKS);
	cursor = (char *)env_option_pairs(variables, &protocol);
	if (protocol != SRES_PROTOCOL) {
		complain_of_protocol(sp, protocol);
		_exit(1);
	}
	if (!step_view_read(sp, cursor, &view))
		goto fail;
	while ((more = env_option_next(&cursor, &name, &value)) > 0) {
		/* @NODE=ADDRESS is no variable. */
		if (name[0] == '@')
			continue;
		own = own_value(sp, &view, value, text, sizeof(text));
		if (own == NULL || spank_setenv(sp, name, own, 1) != ESPANK_SUCCESS)
			goto fail;
		if (strcmp(name, "SRES_DIR") == 0)
			fence = own;
	}
	if (more < 0)
		goto fail;
	if (fence != NULL)
		look_for_fence(sp, fence);
	step_view_free(&view);
	task_report_began(sp);
	/* Last: what is above looks at it. */
	spank_unsetenv(sp, RANK_0_NODE);
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

int sres_stepd_task_exit(spank_t sp)
{
	task_report_ended(sp);
	return ESPANK_SUCCESS;
}
