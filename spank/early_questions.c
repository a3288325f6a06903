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
#include <sys/wait.h>
#include <unistd.h>

#include "early_questions.h"
#include "common.h"

#define VARIABLE "SRES_EARLY"
#define NEXT_COMMAND "\x1e"
#define NEXT_WORD "\x1f"
#define MOST_WORDS 9 /* with the NULL behind them */
#define MOST_COMMANDS 5
#define NICENESS 10
#define JOB_FIELDS "AUTBDhbPaqvLNj"
#define JOB_COLUMNS "JobID:16,Requeue:8,RestartCnt:12,BatchFlag:8"
/* Releases before it do not have the column, or leave it empty; the supervisor asks again where this is wrong. */
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 5, 0)
#define COLUMNS JOB_COLUMNS ",Exclusive:8"
#else
#define COLUMNS JOB_COLUMNS
#endif

extern char **environ;

struct command {
	const char *words[MOST_WORDS];
	int output, errors;
};

/* What the asker writes when a command has ended. */
struct ended {
	int command, status;
};

static struct command commands[MOST_COMMANDS];
static size_t asked;
static int ends[2] = {-1, -1}; /* the pipe that the asker writes to */

/* The environment without the job's own SLURM_* and squeue's formats: environment() in slurm/cli.py. */
static char **clean_environment(void)
{
	static const char *const kept[] = {"SLURM_CONF=", "SLURM_CONF_SERVER=", "SLURM_CLUSTERS="};
	static const char *const dropped[] = {"SLURM_",  "SQUEUE_", "SALLOC_", "SCANCEL_",
					      "SBATCH_", "SINFO_",  "SLURMD_", "LC_ALL=", "TZ="};
	size_t count = 0, next = 0;
	char **clean;

	while (environ[count] != NULL)
		count++;
	clean = calloc(count + 4, sizeof(*clean));
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
	clean[next++] = "SLURM_TIME_FORMAT=standard";
	clean[next] = "TZ=UTC0";
	return clean;
}

static void add(const char *const *words)
{
	struct command *one = &commands[asked];

	one->output = memfd_create("output", MFD_CLOEXEC);
	one->errors = memfd_create("errors", MFD_CLOEXEC);
	/* One that is among 0, 1 and 2 would be overwritten in the command. */
	if (one->output <= STDERR_FILENO || one->errors <= STDERR_FILENO) {
		close(one->output);
		close(one->errors);
		return;
	}
	for (size_t i = 0; words[i] != NULL; i++)
		one->words[i] = words[i];
	asked++;
}

/* In the asker. Returns the process, or -1. */
static pid_t start(const char *directory, const struct command *one, char **environment)
{
	char path[2 * PATH_MAX], *argv[MOST_WORDS + 1] = {path};
	posix_spawn_file_actions_t files;
	posix_spawnattr_t attributes;
	sigset_t none, usual;
	pid_t pid = -1;

	snprintf(path, sizeof(path), "%s/%s", directory, one->words[0]);
	for (size_t i = 1; i < MOST_WORDS; i++)
		argv[i] = (char *)one->words[i];
	/*
	 * srun has blocked signals by now, and its caller may ignore some. SIGPIPE stays ignored: libmunge dies of it
	 * where munged, which has too much to do, closes the connection, and tries again where it does not.
	 */
	sigemptyset(&none);
	sigemptyset(&usual);
	sigaddset(&usual, SIGTERM);
	if (posix_spawn_file_actions_init(&files) != 0 || posix_spawnattr_init(&attributes) != 0)
		return -1;
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setsigdefault(&attributes, &usual);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	if (posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0) != 0 ||
	    posix_spawn_file_actions_adddup2(&files, one->output, STDOUT_FILENO) != 0 ||
	    posix_spawn_file_actions_adddup2(&files, one->errors, STDERR_FILENO) != 0 ||
	    posix_spawn(&pid, path, &files, &attributes, argv, environment) != 0)
		return -1;
	return pid;
}

/* Each start waits for the kernel to load a program: a process of its own does, for the supervisor. */
static void ask(const char *directory, char **environment)
{
	pid_t pids[MOST_COMMANDS], pid;
	struct ended end;

	/* The kernel keeps no exit code of a child whose parent ignores this signal. */
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	/* They are answered before the interpreter has loaded all, and may not keep a processor from it. */
	setpriority(PRIO_PROCESS, 0, NICENESS);
	for (size_t i = 0; i < asked; i++)
		pids[i] = start(directory, &commands[i], environment);
	for (size_t left = asked; left > 0; left--) {
		pid = waitpid(-1, &end.status, 0);
		if (pid < 0)
			break; /* one was not started: the pipe's end tells */
		for (end.command = 0; end.command < (int)asked && pids[end.command] != pid; end.command++)
			;
		if (write(ends[1], &end, sizeof(end)) != sizeof(end))
			break;
	}
	_exit(0);
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

/* Tell the program that srun becomes. */
static void tell(pid_t asker, const char *directory)
{
	static char told[MOST_COMMANDS * (PATH_MAX + 1024)];
	size_t used;

	used = (size_t)snprintf(told, sizeof(told), "%d" NEXT_WORD "%d", (int)asker, ends[0]);
	for (size_t i = 0; i < asked; i++) {
		const struct command *one = &commands[i];

		used += (size_t)snprintf(told + used, sizeof(told) - used, NEXT_COMMAND "%d" NEXT_WORD "%d" NEXT_WORD "%s/%s",
					 one->output, one->errors, directory, one->words[0]);
		for (size_t word = 1; one->words[word] != NULL; word++)
			used += (size_t)snprintf(told + used, sizeof(told) - used, NEXT_WORD "%s", one->words[word]);
	}
	setenv(VARIABLE, told, 1);
}

void early_questions_start(const char *srun)
{
	const char *job = getenv("SLURM_JOB_ID") ? getenv("SLURM_JOB_ID") : getenv("SLURM_JOBID");
	const char *slash = strrchr(srun, '/');
	char directory[PATH_MAX], format[512], **environment;
	struct rlimit largest;
	pid_t asker;

	unsetenv(VARIABLE);
	/* Where `ulimit -f` counts, it counts for a file of memory too. */
	if (slash == NULL || getrlimit(RLIMIT_FSIZE, &largest) != 0 || largest.rlim_cur != RLIM_INFINITY)
		return;
	if ((size_t)snprintf(directory, sizeof(directory), "%.*s", (int)(slash - srun), srun) >= sizeof(directory))
		return;
	if (job != NULL && job[0] != '\0' && job[0] != '0' && strlen(job) < 12 &&
	    strspn(job, "0123456789") == strlen(job) && job_format(format, sizeof(format))) {
		add((const char *const[]){"squeue", "--helpFormat", NULL});
		add((const char *const[]){"squeue", "-a", "-r", "-h", "-j", job, "-O", COLUMNS, NULL});
		add((const char *const[]){"squeue", "-a", "-r", "-h", "-j", job, "-o", format, NULL});
	}
	add((const char *const[]){"scontrol", "show", "config", NULL});
	add((const char *const[]){"scontrol", "show", "node", "-a", "-d", "-o", NULL});
	environment = clean_environment();
	/* What is wrong here will be told by who asks again. */
	if (environment == NULL || pipe2(ends, O_CLOEXEC) != 0)
		return;
	asker = fork();
	if (asker == 0) {
		setpgid(0, 0);
		ask(directory, environment);
	}
	free(environment);
	close(ends[1]);
	if (asker < 0)
		return;
	/* Here and in the asker: the group, by which all commands can be ended, is there for both from now on. */
	setpgid(asker, asker);
	tell(asker, directory);
}

void early_questions_keep(void)
{
	if (ends[0] < 0)
		return;
	fcntl(ends[0], F_SETFD, 0);
	for (size_t i = 0; i < asked; i++) {
		fcntl(commands[i].output, F_SETFD, 0);
		fcntl(commands[i].errors, F_SETFD, 0);
	}
}
