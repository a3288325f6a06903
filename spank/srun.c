/* In srun: register the options, and hand a flagged srun over to the supervisor. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include "common.h"
#include "contexts.h"
#include "early_questions.h"
#include "env_option.h"
#include "step_layout.h"
#include "task_report.h"

/*
 * Slurm passes options on in the environment. `sbatch --auto-resume` leaves the first name, which would
 * flag every srun of that job; srun itself sets the second for its tasks.
 */
#define OPTION_FROM_JOB "SLURM_SPANK__SLURM_SPANK_OPTION_sres_auto_resume"
#define OPTION_FOR_TASKS "_SLURM_SPANK_OPTION_sres_auto_resume"
/* The option's own name follows, with _ in place of -. */
#define MORE_FROM_JOB "SLURM_SPANK__SLURM_SPANK_OPTION_sres_"
#define MORE_FOR_TASKS "_SLURM_SPANK_OPTION_sres_"
/* How the supervisor gives --sres-report to its srun: other users can read a command line. */
#define REPORT_FROM_SUPERVISOR "SLURM_SPANK__SLURM_SPANK_OPTION_sres_sres_report"

/* Tells the supervisor this plugin's protocol, so that it need not read `srun --help` for it. */
#define PLUGIN_TO_SUPERVISOR "SRES_PLUGIN"

static struct sres_config config;
/* Options that only mean something with --auto-resume=1. */
static const struct {
	const char *name, *arginfo, *usage;
} more_options[] = {
	{"auto-resume-spares", "K", "with --auto-resume=1: keep K nodes to spare"},
	{"auto-resume-min-nodes", "M", "with --auto-resume=1: go on with M nodes"},
	{"auto-resume-max-nodes", "N", "with --auto-resume=1: grow to N nodes"},
	{"auto-resume-step-nodes", "S", "grow by S nodes at a time"},
	{"auto-resume-sizes", "A,B,..", "grow to these numbers of nodes only"},
	{"auto-resume-partition", "NAME", "partition of the nodes to grow by"},
	{"auto-resume-qos", "NAME", "QOS of the nodes to grow by"},
	{"auto-resume-hangs", "ACT", "with --auto-resume=1: end, tell or off"},
	{"auto-resume-progress", "FROM", "with --auto-resume=1: steps from file:PATH or log:REGEX"},
};
#define MORE_OPTIONS (sizeof(more_options) / sizeof(more_options[0]))

static bool asks_more;  /* an option is on it that only means something with --auto-resume=1 */
static bool flagged;    /* --auto-resume=1 is on this srun's own command line */
static bool supervised; /* the supervisor started this srun */

static int on_auto_resume(int val, const char *value, int remote)
{
	(void)val;
	(void)remote;
	if (value != NULL && strcmp(value, "1") == 0) {
		flagged = true;
	} else if (value != NULL && strcmp(value, "0") == 0) {
		flagged = false;
	} else {
		slurm_error("sres: --auto-resume=%s: write 1 (on) or 0 (off)", value ? value : "");
		sres_refuse();
	}
	return ESPANK_SUCCESS;
}

static int on_more(int val, const char *value, int remote)
{
	(void)val;
	(void)value;
	(void)remote;
	/* The supervisor reads the value, and complains of what makes no sense. */
	asks_more = true;
	return ESPANK_SUCCESS;
}

static int on_env_option(int val, const char *value, int remote)
{
	unsigned protocol;

	(void)val;
	(void)remote;
	if (value != NULL)
		value = env_option_pairs(value, &protocol);
	if (value != NULL && protocol != SRES_PROTOCOL) {
		slurm_error("sres: the plugin of this srun and its supervisor are of different releases (protocol %d "
			    "and %u), so nothing is started; install the same release of both on this machine",
			    SRES_PROTOCOL, protocol);
		sres_refuse();
	}
	if (value == NULL || !env_option_valid(value)) {
		slurm_error("sres: --sres-env: malformed value; this option is for the supervisor only");
		sres_refuse();
	}
	return ESPANK_SUCCESS;
}

static int on_report_option(int val, const char *value, int remote)
{
	(void)val;
	(void)remote;
	/* Without it the step runs all the same, and its tasks' ends are not told. */
	if (value == NULL || !task_report_valid(value))
		slurm_verbose("sres: --" SRES_REPORT_OPTION ": malformed value");
	return ESPANK_SUCCESS;
}

/*
 * Read /proc/self/cmdline: arguments, each ended by a NUL. The file does not tell its size, so the buffer
 * grows. Returns NULL with errno set on failure; the caller frees.
 */
static char *read_command_line(size_t *length)
{
	size_t capacity = 4096, used = 0;
	char *buffer = malloc(capacity), *grown;
	ssize_t got;
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);

	if (buffer == NULL || fd < 0)
		goto fail;
	while ((got = read(fd, buffer + used, capacity - used)) != 0) {
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			goto fail;
		used += (size_t)got;
		if (used < capacity)
			continue;
		grown = realloc(buffer, capacity * 2);
		if (grown == NULL)
			goto fail;
		buffer = grown;
		capacity *= 2;
	}
	if (used == 0 || buffer[used - 1] != '\0') {
		errno = EINVAL;
		goto fail;
	}
	close(fd);
	*length = used;
	return buffer;

fail:
	if (fd >= 0)
		close(fd);
	free(buffer);
	return NULL;
}

/*
 * Whether the line, or a reader of `srun --help`, asks for the options that begin with --auto-resume-. Where they
 * are not registered, shortened names of --auto-resume are not ambiguous.
 */
static bool asks_for_more(void)
{
	static const char begin[] = "--auto-resume-";
	size_t length = 0;
	char *line = read_command_line(&length);
	bool asks = line == NULL;

	for (char *word = line; !asks && word < line + length; word += strlen(word) + 1)
		asks = strncmp(word, begin, sizeof(begin) - 1) == 0 || strcmp(word, "--help") == 0 ||
		       strcmp(word, "-h") == 0;
	free(line);
	return asks;
}

static void unset_more(const char *prefix)
{
	char name[128];

	for (size_t i = 0; i < MORE_OPTIONS; i++) {
		snprintf(name, sizeof(name), "%s%s", prefix, more_options[i].name);
		for (char *letter = name; *letter != '\0'; letter++)
			if (*letter == '-')
				*letter = '_';
		unsetenv(name);
	}
}

static void register_more(spank_t sp)
{
	for (size_t i = 0; i < MORE_OPTIONS; i++) {
		/* Slurm copies what it keeps of it. */
		struct spank_option option = {
			.name = (char *)more_options[i].name,
			.arginfo = (char *)more_options[i].arginfo,
			.usage = (char *)more_options[i].usage,
			.has_arg = 1,
			.cb = on_more,
		};

		if (spank_option_register(sp, &option) != ESPANK_SUCCESS)
			slurm_verbose("sres: could not register --%s", more_options[i].name);
	}
}

/*
 * kill -9 of the supervisor must end the step, as it does with plain srun. Where a program of the site's stands between
 * the two, it is no matter of ours.
 */
static void end_with(pid_t parent)
{
	if (getppid() == parent)
		prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	/* It has ended before that. */
	if (getppid() != parent && kill(parent, 0) != 0 && errno == ESRCH)
		_exit(1);
}

int sres_srun_init(spank_t sp, int ac, char *av[])
{
	struct spank_option auto_resume = {
		.name = "auto-resume",
		.arginfo = "N",
		/* The supervisor reads the number behind it in the output of `srun --help`. */
		.usage = "1: start the step again after a node failure (v" SRES_TEXT(SRES_PROTOCOL) ")",
		.has_arg = 1,
		.cb = on_auto_resume,
	};
	struct spank_option env = {
		.name = SRES_ENV_OPTION,
		.arginfo = "VARIABLES",
		.usage = "used by the supervisor of --auto-resume",
		.has_arg = 1,
		.cb = on_env_option,
	};
	struct spank_option report = {
		.name = SRES_REPORT_OPTION,
		.arginfo = "TARGET",
		.usage = "used by the supervisor of --auto-resume",
		.has_arg = 1,
		.cb = on_report_option,
	};

	pid_t parent;

	config = sres_config_parse(ac, av);
	supervised = sres_take_guard(&parent);
	if (parent != 0)
		end_with(parent);
	/* With this gone, Slurm calls on_auto_resume for the command line only. */
	unsetenv(OPTION_FROM_JOB);
	unset_more(MORE_FROM_JOB);
	/* Of another step, where this srun is started by a task. */
	unsetenv(RANK_0_NODE);

	/* A failure only makes the option unknown to this srun; an srun without it must go on. */
	if (spank_option_register(sp, &auto_resume) != ESPANK_SUCCESS)
		slurm_verbose("sres: could not register --auto-resume");
	if (asks_for_more())
		register_more(sp);
	/* SPANK cannot hide an option from `srun --help`, so only the sruns that get it know it. */
	if (supervised && spank_option_register(sp, &env) != ESPANK_SUCCESS)
		slurm_verbose("sres: could not register --" SRES_ENV_OPTION);
	if (supervised && spank_option_register(sp, &report) != ESPANK_SUCCESS)
		slurm_verbose("sres: could not register --" SRES_REPORT_OPTION);
	return ESPANK_SUCCESS;
}

/*
 * Write the Python that a script names in its first line to `python`. False: it is no Python script, or its
 * first line has options of its own.
 */
static bool python_of(const char *script, char *python, size_t size)
{
	FILE *file = fopen(script, "re");
	char *end, *name;
	bool read;

	if (file == NULL)
		return false;
	read = fgets(python, (int)size, file) != NULL;
	fclose(file);
	if (!read || strncmp(python, "#!/", 3) != 0 || (end = strchr(python, '\n')) == NULL)
		return false;
	*end = '\0';
	memmove(python, python + 2, strlen(python + 2) + 1);
	name = strrchr(python, '/') + 1;
	return strncmp(name, "python", 6) == 0 && strpbrk(python, " \t\r") == NULL;
}

/*
 * Become SUPERVISOR --srun /path/of/srun -- <srun's own arguments>. Returns only on failure, with errno set.
 *
 * A Python is told not to look at PYTHONPATH, PYTHONHOME and the like (-I): they are meant for the user's
 * program, which gets them, and may name modules of another release.
 */
static void become_supervisor(void)
{
	size_t length = 0, count = 0, next = 0;
	char **argv = NULL, *srun = NULL, *line = read_command_line(&length);
	char python[PATH_MAX];
	bool is_python = python_of(config.supervisor, python, sizeof(python));
	sigset_t none;
	int saved;

	if (line == NULL)
		goto fail;
	srun = realpath("/proc/self/exe", NULL);
	if (srun == NULL)
		goto fail;
	early_questions_start(srun);
	for (size_t i = 0; i < length; i++)
		count += line[i] == '\0';
	/* count includes srun's argv[0], which is dropped; six words and the NULL come on top. */
	argv = calloc(count + 6, sizeof(*argv));
	if (argv == NULL)
		goto fail;
	if (is_python) {
		argv[next++] = python;
		argv[next++] = "-I";
	}
	argv[next++] = (char *)config.supervisor;
	argv[next++] = "--srun";
	argv[next++] = srun;
	argv[next++] = "--";
	for (char *word = line + strlen(line) + 1; word < line + length; word += strlen(word) + 1)
		argv[next++] = word;

	unsetenv(OPTION_FOR_TASKS);
	unset_more(MORE_FOR_TASKS);
	if (setenv(PLUGIN_TO_SUPERVISOR, SRES_TEXT(SRES_PROTOCOL), 1) != 0)
		goto fail;
	/* srun has blocked INT, TERM, HUP and more by now, and a blocked mask outlives execv. */
	sigemptyset(&none);
	if (sigprocmask(SIG_SETMASK, &none, NULL) != 0)
		goto fail;
	early_questions_keep();
	execv(argv[0], argv);

fail:
	saved = errno;
	free(argv);
	free(srun);
	free(line);
	errno = saved;
}

int sres_srun_post_opt(void)
{
	/* Slurm has read it by now. A task that saw it could report in the name of others. */
	unsetenv(REPORT_FROM_SUPERVISOR);
	if (asks_more && !flagged && !supervised) {
		slurm_error("sres: the options --auto-resume-... are for srun --auto-resume=1: give that as well");
		sres_refuse();
	}
	if (!flagged || supervised)
		return ESPANK_SUCCESS;
	if (sres_config_complain(&config))
		sres_refuse();
	become_supervisor();
	slurm_error("sres: cannot start the supervisor %s: %s; install slurm-resilience on this machine "
		    "or give supervisor=PATH in plugstack.conf (or leave out --auto-resume)",
		    config.supervisor, strerror(errno));
	sres_refuse();
}

int sres_srun_step_made(spank_t sp)
{
	if (supervised)
		step_layout_export(sp);
	return ESPANK_SUCCESS;
}
