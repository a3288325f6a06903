/*
 * What slurmstepd knows of the step as a whole, for values that every task of it must agree on: the
 * step's own nodes, the first of them, its address, the port of its rendezvous.
 */
#ifndef SRES_STEP_VIEW_H
#define SRES_STEP_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <slurm/spank.h>

/* A host name has at most 255 bytes. */
#define HOST_BYTES 256

struct step_view {
	uint32_t step;
	char *node_list;         /* as Slurm writes it: n[1-3],m7 */
	char first[HOST_BYTES];  /* the node with rank 0 */
	char *address;           /* of the first node */
};

/* A batch script, an external step or an interactive step: nothing of ours belongs there. */
bool step_is_special(uint32_t step);

/*
 * This node's number among the step's: its node id, but the node with rank 0 is number 0, and changes places
 * with the one that is first in Slurm's list. Programs start a rendezvous on the node with number 0.
 */
bool step_node_rank(spank_t sp, uint32_t *rank);

/*
 * Write the first host of a node list to `host`. False when it is empty, too long or malformed.
 */
bool first_host(const char *node_list, char *host, size_t size);

/*
 * Read the step's view. `variables` is the value of --sres-env: its pair @NODE=ADDRESS has the address
 * of a node; a node without one is reached by its name. False when Slurm does not tell all of it; the
 * caller frees in both cases.
 */
bool step_view_read(spank_t sp, const char *variables, struct step_view *view);

void step_view_free(struct step_view *view);

#endif
