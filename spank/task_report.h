/*
 * Tell the supervisor that a node's tasks began and how each task ended. That they began is one datagram, sent
 * without ever waiting; an end is sent again until it is heard, for less than a second. A node that cannot reach
 * the supervisor loses detail, and nothing else.
 *
 * Where to is the value of --sres-report: TOKEN,PORT,ADDRESS. The token proves to the supervisor that a
 * datagram comes from its own step.
 */
#ifndef SRES_TASK_REPORT_H
#define SRES_TASK_REPORT_H

#include <stdbool.h>

#include <slurm/spank.h>

/* True when the text is a TOKEN,PORT,ADDRESS that can be sent to. */
bool task_report_valid(const char *text);

/* Where to send from now on; a malformed text: nowhere. */
void task_report_to(const char *text);

/* In the first task's own process, before it becomes the program. */
void task_report_began(spank_t sp);

/* In slurmstepd, when a task has ended. */
void task_report_ended(spank_t sp);

#endif
