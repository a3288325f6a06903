#include <dlfcn.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <slurm/slurm.h>

#include "step_layout.h"

/*
 * What srun has of libslurm is looked up when it is needed: sbatch, slurmd and slurmstepd load this plugin
 * too, and need not have it. Slurm's releases name the type of a host list differently.
 */
struct calls {
	slurm_step_layout_t *(*get)(slurm_step_id_t *step);
	void (*release)(slurm_step_layout_t *layout);
	void *(*list_create)(const char *hosts);
	char *(*list_shift)(void *list);
	void (*list_destroy)(void *list);
};

static int find_calls(struct calls *calls)
{
	/* POSIX has dlsym() hand out functions in this way. */
	*(void **)&calls->get = dlsym(RTLD_DEFAULT, "slurm_job_step_layout_get");
	*(void **)&calls->release = dlsym(RTLD_DEFAULT, "slurm_job_step_layout_free");
	*(void **)&calls->list_create = dlsym(RTLD_DEFAULT, "slurm_hostlist_create");
	*(void **)&calls->list_shift = dlsym(RTLD_DEFAULT, "slurm_hostlist_shift");
	*(void **)&calls->list_destroy = dlsym(RTLD_DEFAULT, "slurm_hostlist_destroy");
	return calls->get && calls->release && calls->list_create && calls->list_shift &&
	       calls->list_destroy;
}

/* The index of the node that has rank 0; the number of nodes when none has it. */
static uint32_t node_of_rank_0(const slurm_step_layout_t *layout)
{
	uint32_t node, task;

	for (node = 0; node < layout->node_cnt; node++)
		for (task = 0; task < layout->tasks[node]; task++)
			if (layout->tids[node][task] == 0)
				return node;
	return node;
}

static void export_node(const struct calls *calls, const char *nodes, uint32_t index)
{
	void *list = calls->list_create(nodes);
	char *name = NULL, value[512];

	if (list == NULL)
		return;
	for (uint32_t i = 0; i <= index; i++) {
		free(name);
		name = calls->list_shift(list);
		if (name == NULL)
			break;
	}
	if (name != NULL && snprintf(value, sizeof(value), "%" PRIu32 ",%s", index, name) < (int)sizeof(value))
		setenv(RANK_0_NODE, value, 1);
	free(name);
	calls->list_destroy(list);
}

void step_layout_export(spank_t sp)
{
	slurm_step_id_t step = { .step_het_comp = NO_VAL };
	slurm_step_layout_t *layout;
	struct calls calls;
	uint32_t node;

	if (!find_calls(&calls) || spank_get_item(sp, S_JOB_ID, &step.job_id) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_STEPID, &step.step_id) != ESPANK_SUCCESS)
		return;
	layout = calls.get(&step);
	if (layout == NULL)
		return;
	if (layout->node_list != NULL && layout->tasks != NULL && layout->tids != NULL) {
		node = node_of_rank_0(layout);
		if (node > 0 && node < layout->node_cnt)
			export_node(&calls, layout->node_list, node);
	}
	calls.release(layout);
}
