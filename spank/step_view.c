#include <stdlib.h>
#include <string.h>

#include "env_option.h"
#include "step_layout.h"
#include "step_view.h"

/* Slurm numbers the batch script, the external step and the interactive step from the top. */
#define FIRST_SPECIAL_STEP 0xfffffff0u
/* The longest node list that is read; one of 10,000 nodes in brackets has a few kilobytes. */
#define NODE_LIST_MAX_BYTES (4u << 20)

bool step_is_special(uint32_t step)
{
	return step >= FIRST_SPECIAL_STEP;
}

/* Append one byte; false when only the place for the NUL is left. */
static bool put(char *host, size_t size, size_t *used, char c)
{
	if (*used + 1 >= size)
		return false;
	host[(*used)++] = c;
	return true;
}

bool first_host(const char *node_list, char *host, size_t size)
{
	size_t used = 0;
	const char *in = node_list;

	/* In brackets: the text up to the first '-' or ','. There may be several pairs of them. */
	while (*in != '\0' && *in != ',') {
		if (*in == ']')
			return false;
		if (*in != '[') {
			if (!put(host, size, &used, *in++))
				return false;
			continue;
		}
		for (in++; *in != '\0' && *in != '-' && *in != ',' && *in != ']'; in++)
			if (*in == '[' || !put(host, size, &used, *in))
				return false;
		in = strchr(in, ']');
		if (in == NULL)
			return false;
		in++;
	}
	if (used == 0)
		return false;
	host[used] = '\0';
	return true;
}

/* A variable of the task, in memory of its own; NULL when it is not set or there is no memory. */
static char *task_variable(spank_t sp, const char *name)
{
	spank_err_t rc;
	char *buffer = NULL, *grown;

	for (size_t size = 4096; size <= NODE_LIST_MAX_BYTES; size *= 4) {
		grown = realloc(buffer, size);
		if (grown == NULL)
			break;
		buffer = grown;
		rc = spank_getenv(sp, name, buffer, (int)size);
		if (rc == ESPANK_SUCCESS)
			return buffer;
		if (rc != ESPANK_NOSPACE)
			break;
	}
	free(buffer);
	return NULL;
}

/* The address of a node, from the pair @NODE=ADDRESS; else its name. NULL without memory. */
static char *address_of(const char *variables, const char *node)
{
	char *copy = strdup(variables), *cursor = copy, *name, *value, *found = NULL;

	if (copy == NULL)
		return NULL;
	while (env_option_next(&cursor, &name, &value) > 0)
		if (name[0] == '@' && strcmp(name + 1, node) == 0) {
			found = strdup(value);
			free(copy);
			return found;
		}
	free(copy);
	return strdup(node);
}

/*
 * The node id and the name of the node with rank 0, where srun says that it is not the first one. False: it
 * is the first one.
 */
static bool told_first(spank_t sp, uint32_t *node_id, char name[HOST_BYTES])
{
	char text[HOST_BYTES + 16], *comma;

	if (spank_getenv(sp, RANK_0_NODE, text, sizeof(text)) != ESPANK_SUCCESS)
		return false;
	comma = strchr(text, ',');
	if (comma == NULL || comma[1] == '\0' || strlen(comma + 1) >= HOST_BYTES)
		return false;
	*node_id = (uint32_t)strtoul(text, NULL, 10);
	strcpy(name, comma + 1);
	return true;
}

bool step_node_rank(spank_t sp, uint32_t *rank)
{
	char name[HOST_BYTES];
	uint32_t first;

	if (spank_get_item(sp, S_JOB_NODEID, rank) != ESPANK_SUCCESS)
		return false;
	if (!told_first(sp, &first, name))
		return true;
	if (*rank == first)
		*rank = 0;
	else if (*rank == 0)
		*rank = first;
	return true;
}

bool step_view_read(spank_t sp, const char *variables, struct step_view *view)
{
	uint32_t unused;

	memset(view, 0, sizeof(*view));
	if (spank_get_item(sp, S_JOB_STEPID, &view->step) != ESPANK_SUCCESS)
		return false;
	view->node_list = task_variable(sp, "SLURM_STEP_NODELIST");
	if (view->node_list == NULL)
		return false;
	if (!told_first(sp, &unused, view->first) &&
	    !first_host(view->node_list, view->first, sizeof(view->first)))
		return false;
	view->address = address_of(variables, view->first);
	return view->address != NULL;
}

void step_view_free(struct step_view *view)
{
	free(view->node_list);
	free(view->address);
	memset(view, 0, sizeof(*view));
}
