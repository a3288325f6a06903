/*
 * Each answer takes a process of Slurm's, and the supervisor's interpreter takes as long to load: on two cores both
 * are done at the same time. slurm_resilience/slurm/early_questions.py reads what stands in VARIABLE, and takes a
 * command only where all of its words are those that it would have started it with (command_words.py there).
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "early_questions.h"
#include "common.h"

#define VARIABLE "SRES_EARLY"
#define NEXT_COMMAND "\x1e"
#define NEXT_WORD "\x1f"
#define MOST_WORDS 8
#define MOST_COMMANDS 5
#define JOB_FIELDS "AUTBDhbPaqvLNj"
#define JOB_COLUMNS "JobID:16,Requeue:8,RestartCnt:12,BatchFlag:8"
/* Releases before it do not have the column, or leave it empty; the supervisor asks again where this is wrong. */
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 5, 0)
#define COLUMNS JOB_COLUMNS ",Exclusive:8"
#else
#define COLUMNS JOB_COLUMNS
#endif

extern char **environ;

static int outputs[2 * MOST_COMMANDS];
static size_t opened;

/* The environment without the job's own SLURM_* and squeue's formats: environment() in slurm/cli.py. */
static char **clean_environment(void)
{
	static const char *const kept[] = {"SLURM_CONF=", "SLURM_CONF_SERVER=", "SLURM_CLUSTERS="};
	static const char *const dropped[] = {"SLURM_",  "SQUEUE_", "SALLOC_", "SCANCEL_",
					      "SBATCH_", "SINFO_",  "SLURMD_", "LC_ALL="};
	size_t count = 0, next = 0;
	char **clean;

	while (environ[count] != NULL)
		count++;
	clean = calloc(count + 3, sizeof(*clean));
	if (clean == NULL)
		return NULL;
	for (size_t i = 0; i < count; i++) {
		bool keep = true;

		for (size_t d = 0; d < sizeof(dropped) / sizeof(dropped[0]); d++)
			keep &= strncmp(environ[i], dropped[d], strlen(dropped[d])) != 0;
		for (size_t k = 0; k < sizeof(kept) / sizeof(kept[0]); k++)
			keep |= strncmp(environ[i], kept[k], strlen(kept[k])) == 0;
		if (keep)
			clean[next++] = environ[i];
	}
	clean[next++] = "LC_ALL=C";
	clean[next] = "SLURM_TIME_FORMAT=standard";
	return clean;
}

/* Start one, and add it to `told`. */
static void start(const char *directory, const char *const *words, char **environment, char *told, size_t size)
{
	char path[PATH_MAX], *argv[MOST_WORDS + 1] = {NULL};
	posix_spawn_file_actions_t files;
	posix_spawnattr_t attributes;
	size_t used = strlen(told);
	sigset_t none, usual;
	int output, errors, rc;
	pid_t pid;

	if ((size_t)snprintf(path, sizeof(path), "%s/%s", directory, words[0]) >= sizeof(path))
		return;
	argv[0] = path;
	for (size_t i = 1; words[i] != NULL; i++)
		argv[i] = (char *)words[i];
	output = memfd_create("output", MFD_CLOEXEC);
	errors = memfd_create("errors", MFD_CLOEXEC);
	/* One that is among 0, 1 and 2 would be overwritten below. */
	if (output <= STDERR_FILENO || errors <= STDERR_FILENO)
		goto fail;
	if (posix_spawn_file_actions_init(&files) != 0)
		goto fail;
	if (posix_spawnattr_init(&attributes) != 0) {
		posix_spawn_file_actions_destroy(&files);
		goto fail;
	}
	/* srun has blocked signals by now, and its caller may ignore some. */
	sigemptyset(&none);
	sigemptyset(&usual);
	sigaddset(&usual, SIGPIPE);
	sigaddset(&usual, SIGTERM);
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setsigdefault(&attributes, &usual);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	rc = posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	rc = rc ? rc : posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
	rc = rc ? rc : posix_spawn_file_actions_adddup2(&files, errors, STDERR_FILENO);
	rc = rc ? rc : posix_spawn(&pid, path, &files, &attributes, argv, environment);
	posix_spawnattr_destroy(&attributes);
	posix_spawn_file_actions_destroy(&files);
	if (rc != 0)
		goto fail;
	outputs[opened++] = output;
	outputs[opened++] = errors;
	used += (size_t)snprintf(told + used, size - used, "%s%d" NEXT_WORD "%d" NEXT_WORD "%d", used ? NEXT_COMMAND : "",
				 (int)pid, output, errors);
	for (size_t i = 0; argv[i] != NULL && used < size; i++)
		used += (size_t)snprintf(told + used, size - used, NEXT_WORD "%s", argv[i]);
	return;

fail:
	if (output >= 0)
		close(output);
	if (errors >= 0)
		close(errors);
}

/* squeue -o: a word that no user can foresee, before each field. */
static bool job_format(char *format, size_t size)
{
	unsigned long long random;
	size_t used = 0;

	if (getrandom(&random, sizeof(random), GRND_NONBLOCK) != (ssize_t)sizeof(random))
		return false;
	for (const char *field = JOB_FIELDS; *field != '\0' && used < size; field++)
		used += (size_t)snprintf(format + used, size - used, "<%016llx>%%%c", random, *field);
	return used < size;
}

void early_questions_start(const char *srun)
{
	const char *job = getenv("SLURM_JOB_ID") ? getenv("SLURM_JOB_ID") : getenv("SLURM_JOBID");
	const char *slash = strrchr(srun, '/');
	char directory[PATH_MAX], format[512], told[4 * PATH_MAX] = "", **environment;
	struct rlimit largest;

	unsetenv(VARIABLE);
	/* Where `ulimit -f` counts, it counts for a file of memory too. */
	if (slash == NULL || getrlimit(RLIMIT_FSIZE, &largest) != 0 || largest.rlim_cur != RLIM_INFINITY)
		return;
	if ((size_t)snprintf(directory, sizeof(directory), "%.*s", (int)(slash - srun), srun) >= sizeof(directory))
		return;
	environment = clean_environment();
	if (environment == NULL)
		return;
	/* Of a child whose parent ignores this signal nobody gets the exit code. */
	signal(SIGCHLD, SIG_DFL);
	if (job != NULL && job[0] != '\0' && job[0] != '0' && strspn(job, "0123456789") == strlen(job) &&
	    job_format(format, sizeof(format))) {
		const char *columns[] = {"squeue", "-a", "-r", "-h", "-j", job, "-O", COLUMNS, NULL};
		const char *fields[] = {"squeue", "-a", "-r", "-h", "-j", job, "-o", format, NULL};

		start(directory, (const char *const[]){"squeue", "--helpFormat", NULL}, environment, told, sizeof(told));
		start(directory, columns, environment, told, sizeof(told));
		start(directory, fields, environment, told, sizeof(told));
	}
	start(directory, (const char *const[]){"scontrol", "show", "config", NULL}, environment, told, sizeof(told));
	start(directory, (const char *const[]){"scontrol", "show", "node", "-a", "-d", "-o", NULL}, environment, told,
	      sizeof(told));
	free(environment);
	/* Without it they run for nothing. */
	setenv(VARIABLE, told, 1);
}

void early_questions_keep(void)
{
	for (size_t i = 0; i < opened; i++)
		fcntl(outputs[i], F_SETFD, 0);
}
