/*
 * In sbatch and salloc: --auto-resume=1 prepares the job for `srun --auto-resume=1` inside of it, and pass no
 * attempt on to a new job.
 *
 * A plugin cannot set an option of sbatch. It can set the variables that sbatch reads as defaults: after the
 * script's own #SBATCH lines, which they would overrule, and before the command line, which overrules them. So
 * each one is set only where the script says nothing of it. They are taken away again before sbatch packs the
 * job's environment: a job that is submitted from within the job is none of ours.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"
#include "contexts.h"

#define MOST_BYTES (256 * 1024) /* of a script: #SBATCH lines stand at its beginning */
#define DIRECTIVE "#SBATCH"

struct preparation {
	const char *variable;
	const char *value;
	const char *options[4]; /* by one of these the user has chosen himself */
};

static const struct preparation preparations[] = {
	/* With --no-kill the job outlives a node; an expedited requeue (Slurm 25.11) works without it alone. */
	{"SBATCH_NO_KILL", "", {"--no-kill", "-k", "--requeue=expedite", NULL}},
	{"SALLOC_NO_KILL", "", {NULL}},
	{"SBATCH_REQUEUE", "", {"--requeue", "--no-requeue", NULL}},
	{"SBATCH_OPEN_MODE", "append", {"--open-mode", NULL}},
};
#define PREPARATIONS (sizeof(preparations) / sizeof(preparations[0]))

static bool prepared;
static bool is_set[PREPARATIONS]; /* by this plugin */
static char script[MOST_BYTES + 1];
static bool script_is_known = true; /* false: it comes through a pipe, which cannot be read twice */

/* Whether a word is this option, with a value or without. */
static bool is_option(const char *word, const char *option)
{
	size_t length = strlen(option);

	if (strncmp(word, option, length) != 0)
		return false;
	return word[length] == '\0' || word[length] == '=' || (option[1] != '-' && option[0] == '-');
}

/* Whether one of the script's #SBATCH lines has this option. */
static bool script_has(const char *option)
{
	char line[4096], *rest, *word;

	for (const char *at = script; at != NULL && *at != '\0'; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL) {
		if (strncmp(at, DIRECTIVE, strlen(DIRECTIVE)) != 0)
			continue;
		at += strlen(DIRECTIVE);
		snprintf(line, sizeof(line), "%.*s", (int)strcspn(at, "\n"), at);
		for (word = strtok_r(line, " \t\"'", &rest); word != NULL && word[0] != '#';
		     word = strtok_r(NULL, " \t\"'", &rest))
			if (is_option(word, option))
				return true;
	}
	return false;
}

/* Whether a line of the script that is no directive and no comment flags an srun. */
static bool script_flags_an_srun(void)
{
	for (const char *at = script; at != NULL && *at != '\0'; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL) {
		const char *found = strstr(at, "--auto-resume");

		if (at[0] != '#' && found != NULL && found < at + strcspn(at, "\n"))
			return true;
	}
	return false;
}

static bool read_script(const char *path)
{
	struct stat about;
	ssize_t got = -1;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	if (fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode))
		got = read(fd, script, MOST_BYTES);
	if (fd >= 0)
		close(fd);
	if (got < 2 || strncmp(script, "#!", 2) != 0) {
		script[0] = '\0';
		return false;
	}
	script[got] = '\0';
	return true;
}

/*
 * Read sbatch's script: the first word of its command line that is a script. Returns whether the words before it
 * flag the job.
 */
static bool read_command_line(void)
{
	static char line[64 * 1024];
	bool flagged = false, is_sbatch, wraps = false, named = false;
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
	const char *name;

	if (fd >= 0)
		close(fd);
	if (length <= 0)
		return false;
	line[length] = '\0';
	name = strrchr(line, '/') ? strrchr(line, '/') + 1 : line;
	is_sbatch = strcmp(name, "sbatch") == 0;
	for (const char *word = line + strlen(line) + 1; word < line + length; word += strlen(word) + 1) {
		if (word[0] == '-') {
			wraps |= is_option(word, "--wrap");
			if (strcmp(word, "--auto-resume") == 0 || strcmp(word, "--auto-resume=1") == 0)
				flagged = true;
			else if (strcmp(word, "--auto-resume=0") == 0)
				flagged = false;
		} else if (is_sbatch && !wraps && read_script(word)) {
			named = true;
			break;
		} else if (!is_sbatch && strcmp(word, "srun") == 0) {
			break; /* what follows is srun's */
		}
	}
	if (is_sbatch && !wraps && !named)
		script_is_known = read_script("/proc/self/fd/0");
	return flagged;
}

static void prepare(void)
{
	if (prepared)
		return;
	prepared = true;
	if (!script_is_known) {
		slurm_error("sres: --auto-resume: the script comes through a pipe and cannot be read, so nothing is set for it; "
			    "name its file, or give --no-kill --requeue --open-mode=append");
		return;
	}
	for (size_t i = 0; i < PREPARATIONS; i++) {
		const struct preparation *one = &preparations[i];
		bool chosen = getenv(one->variable) != NULL;

		for (size_t o = 0; one->options[o] != NULL; o++)
			chosen |= script_has(one->options[o]);
		if (!chosen && setenv(one->variable, one->value, 0) == 0)
			is_set[i] = true;
	}
	if (script[0] != '\0' && !script_flags_an_srun())
		slurm_info("sres: --auto-resume prepares the job; its step is brought back where the script says "
			   "srun --auto-resume=1");
}

static int on_auto_resume(int val, const char *value, int remote)
{
	(void)val;
	(void)remote;
	if (value == NULL || value[0] == '\0' || strcmp(value, "1") == 0) {
		prepare();
	} else if (strcmp(value, "0") != 0) {
		slurm_error("sres: --auto-resume=%s: write 1 (on) or 0 (off)", value);
		sres_refuse();
	}
	return ESPANK_SUCCESS;
}

int sres_allocator_init(spank_t sp)
{
	struct spank_option auto_resume = {
		.name = "auto-resume",
		.arginfo = "N",
		.usage = "1: prepare the job for srun --auto-resume=1 (--no-kill, --requeue, --open-mode=append)",
		/* Optional, so that a bare "#SBATCH --auto-resume" is the same as 1. */
		.has_arg = 2,
		.cb = on_auto_resume,
	};

	sres_forget_attempt();
	if (spank_option_register(sp, &auto_resume) != ESPANK_SUCCESS)
		slurm_verbose("sres: could not register --auto-resume");
	/* sbatch reads its environment before it calls the callback for its own command line. */
	if (read_command_line())
		prepare();
	return ESPANK_SUCCESS;
}

int sres_allocator_post_opt(void)
{
	for (size_t i = 0; i < PREPARATIONS; i++)
		if (is_set[i])
			unsetenv(preparations[i].variable);
	return ESPANK_SUCCESS;
}
