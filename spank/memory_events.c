#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory_events.h"

#define PATH_BYTES 4096

/* The number behind "oom_kill " in a file of lines "name number"; 0 when it has none. */
static long oom_kills(const char *path)
{
	static const char key[] = "oom_kill ";
	char line[128];
	long count = 0;
	FILE *file = fopen(path, "re");

	if (file == NULL)
		return 0;
	while (fgets(line, sizeof(line), file) != NULL)
		if (strncmp(line, key, sizeof(key) - 1) == 0)
			count = strtol(line + sizeof(key) - 1, NULL, 10);
	fclose(file);
	return count;
}

/* Cut a path behind its component step_N, the group that holds all of the step's tasks. */
static int cut_to_step(char *path)
{
	char *step = strstr(path, "/step_");

	if (step == NULL)
		return 0;
	step[1 + strcspn(step + 1, "/")] = '\0';
	return 1;
}

long memory_kills(const char *membership, const char *root)
{
	/* Twice the path: the file's name and the root come on top. */
	char line[PATH_BYTES], path[2 * PATH_BYTES], *group;
	long count = 0;
	FILE *file = fopen(membership, "re");

	if (file == NULL)
		return 0;
	/* "0::/path" is version 2; "9:memory:/path" is version 1. */
	while (count == 0 && fgets(line, sizeof(line), file) != NULL) {
		line[strcspn(line, "\n")] = '\0';
		if (strncmp(line, "0::", 3) == 0 && cut_to_step(line + 3)) {
			snprintf(path, sizeof(path), "%s%s/memory.events", root, line + 3);
			count = oom_kills(path);
		} else if ((group = strstr(line, ":memory:")) != NULL && cut_to_step(group + 8)) {
			snprintf(path, sizeof(path), "%s/memory%s/memory.oom_control", root, group + 8);
			count = oom_kills(path);
		}
	}
	fclose(file);
	return count;
}
