#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "memory_events.h"
#include "step_view.h"
#include "task_report.h"

#define TOKEN_BYTES 65
/* Well below what every network carries in one piece. */
#define DATAGRAM_BYTES 600
/* An end is told again where the supervisor does not answer within so long, then twice and four times as long. */
#define FIRST_WAIT_MS 100
#define TIMES 3

struct target {
	char token[TOKEN_BYTES]; /* empty: nowhere */
	socklen_t length;
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} address;
};

static struct target target;
static bool unheard; /* it did not answer once, so it is not waited for any more */

static bool parse(const char *text, struct target *to)
{
	const char *comma = strchr(text, ','), *second = comma ? strchr(comma + 1, ',') : NULL;
	size_t token = comma ? (size_t)(comma - text) : 0;
	unsigned long port;
	char *end;

	memset(to, 0, sizeof(*to));
	if (second == NULL || token == 0 || token >= sizeof(to->token))
		return false;
	if (strspn(text, "0123456789abcdef") != token)
		return false;
	port = strtoul(comma + 1, &end, 10);
	if (end != second || comma[1] < '0' || comma[1] > '9' || port == 0 || port > 65535)
		return false;
	if (inet_pton(AF_INET, second + 1, &to->address.v4.sin_addr) == 1) {
		to->address.v4.sin_family = AF_INET;
		to->address.v4.sin_port = htons((uint16_t)port);
		to->length = sizeof(to->address.v4);
	} else if (inet_pton(AF_INET6, second + 1, &to->address.v6.sin6_addr) == 1) {
		to->address.v6.sin6_family = AF_INET6;
		to->address.v6.sin6_port = htons((uint16_t)port);
		to->length = sizeof(to->address.v6);
	} else {
		return false;
	}
	memcpy(to->token, text, token);
	return true;
}

bool task_report_valid(const char *text)
{
	struct target unused;

	return parse(text, &unused);
}

void task_report_to(const char *text)
{
	if (!parse(text, &target))
		memset(&target, 0, sizeof(target));
}

static void send_datagram(const char *text, size_t length)
{
	int fd = socket(target.address.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return;
	/* What cannot be sent now is not sent: slurmstepd has tasks to look after. */
	(void)sendto(fd, text, length, MSG_DONTWAIT | MSG_NOSIGNAL, &target.address.any, target.length);
	close(fd);
}

static long long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Wait for one answer. 1: it came; 0: it did not come in time; -1: none will come. */
static int answered(int fd, const char *answer, int wait_ms)
{
	long long left, until = now_ms() + wait_ms;
	struct pollfd news = {.fd = fd, .events = POLLIN};
	char heard[DATAGRAM_BYTES];
	ssize_t got;

	while ((left = until - now_ms()) > 0) {
		if (poll(&news, 1, (int)left) <= 0)
			continue; /* a signal, or the time is over */
		got = recv(fd, heard, sizeof(heard), MSG_DONTWAIT);
		if (got < 0 && errno != EAGAIN && errno != EINTR)
			return -1;
		if (got == (ssize_t)strlen(answer) && memcmp(heard, answer, (size_t)got) == 0)
			return 1;
	}
	return 0;
}

/*
 * Tell of an end until it is heard: networks lose datagrams, and the other tasks of a crashed one would wait for it for
 * ever. Where no answer comes, slurmstepd waits for less than a second, once.
 */
static void send_until_heard(const char *text, size_t length, const char *answer)
{
	int fd = socket(target.address.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int heard = 0;

	if (fd < 0)
		return;
	if (connect(fd, &target.address.any, target.length) == 0) {
		for (int i = 0; i < TIMES && heard == 0; i++) {
			if (send(fd, text, length, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 || unheard)
				break;
			heard = answered(fd, answer, FIRST_WAIT_MS << i);
		}
		unheard |= heard != 1;
	}
	close(fd);
}

void task_report_began(spank_t sp)
{
	char text[DATAGRAM_BYTES], node[HOST_BYTES];
	uint32_t step, node_id, nodes, tasks;
	int local, length;

	if (target.token[0] == '\0' || spank_get_item(sp, S_TASK_ID, &local) != ESPANK_SUCCESS || local != 0)
		return;
	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
	    !step_node_rank(sp, &node_id) ||
	    spank_get_item(sp, S_JOB_NNODES, &nodes) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_TOTAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS ||
	    spank_getenv(sp, "SLURMD_NODENAME", node, sizeof(node)) != ESPANK_SUCCESS)
		return;
	length = snprintf(text, sizeof(text),
			  "sres1 %s began %" PRIu32 " %" PRIu32 " %s %" PRIu32 " %" PRIu32, target.token, step,
			  node_id, node, nodes, tasks);
	if (length > 0 && (size_t)length < sizeof(text))
		send_datagram(text, (size_t)length);
}

void task_report_ended(spank_t sp)
{
	char text[DATAGRAM_BYTES], answer[DATAGRAM_BYTES];
	uint32_t step, node_id, task;
	int status, length;
	bool out_of_memory = false;
	struct timespec now;

	if (target.token[0] == '\0')
		return;
	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step_is_special(step) ||
	    !step_node_rank(sp, &node_id) ||
	    spank_get_item(sp, S_TASK_GLOBAL_ID, &task) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_TASK_EXIT_STATUS, &status) != ESPANK_SUCCESS)
		return;
	/* The kernel's SIGKILL looks like any other; the step's memory group counts its own. */
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
		out_of_memory = memory_kills("/proc/self/cgroup", "/sys/fs/cgroup") > 0;
	clock_gettime(CLOCK_REALTIME, &now);
	length = snprintf(text, sizeof(text),
			  "sres1 %s ended %" PRIu32 " %" PRIu32 " %" PRIu32 " %d %d %lld.%03ld", target.token,
			  step, node_id, task, status, out_of_memory, (long long)now.tv_sec,
			  now.tv_nsec / 1000000);
	snprintf(answer, sizeof(answer), "sres1 %s heard %" PRIu32 " %" PRIu32, target.token, step, task);
	if (length > 0 && (size_t)length < sizeof(text))
		send_until_heard(text, (size_t)length, answer);
}
