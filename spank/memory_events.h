/* How often the kernel killed a process of this step for want of memory, from the step's control group. */
#ifndef SRES_MEMORY_EVENTS_H
#define SRES_MEMORY_EVENTS_H

/*
 * `membership` is /proc/self/cgroup of slurmstepd, `root` where control groups are mounted. 0 when the site
 * has none, or none can be read.
 */
long memory_kills(const char *membership, const char *root);

#endif
